"""openhands (PyPI openhands-sdk, with openhands-tools): its default agent, with terminal, file editor and task tracker.
It speaks Chat, Responses or Messages, through LiteLLM.

The SDK brings no command, so a small script of ours, in the home, drives it: `python SCRIPT "..."`. Its exit status is
0 only where the agent finished; where the agent asks back instead, nobody answers, and that is its end, too.

Settings:
    api     chat (default), responses or anthropic
    json    false: what a person reads, instead of events
"""

from pathlib import PurePosixPath
from typing import Any, Literal

from msgspec import Struct

from polar.harnesses.base import (
    CallPatterns,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    encode_json,
    read_settings,
    resolve_transport,
)
from polar.records.task import McpServer

_CONFIG_FOLDER = ".openhands"
_SCRIPT = '''\
"""Runs one instruction with OpenHands' default agent; what it runs with stands in polar.json, beside this file."""

import json
import os
import sys
from pathlib import Path

from openhands.sdk import LLM, AgentContext, Conversation, ConversationExecutionStatus
from openhands.sdk.conversation.visualizer import DefaultConversationVisualizer
from openhands.sdk.mcp.config import MCPServer
from openhands.tools.preset.default import get_default_agent

config = json.loads(Path(__file__).with_name("polar.json").read_text(encoding="utf-8"))
events, instruction = sys.argv[1] == "json", sys.argv[2]
llm = LLM(usage_id="agent", api_key=os.environ["POLAR_API_KEY"], **config["llm"])
servers = {name: MCPServer.model_validate(server) for name, server in config["mcp_servers"].items()}
context = AgentContext(load_user_skills=True, load_project_skills=True)
agent = get_default_agent(llm, cli_mode=True).model_copy(update={"mcp_config": servers, "agent_context": context})
conversation = Conversation(
    agent,
    workspace=os.getcwd(),
    persistence_dir=config["conversations"],
    delete_on_close=False,
    callbacks=[lambda event: print(event.model_dump_json(), flush=True)] if events else [],
    visualizer=None if events else DefaultConversationVisualizer,
)
conversation.send_message(instruction)
conversation.run()
status = conversation.state.execution_status
conversation.close()
if status != ConversationExecutionStatus.FINISHED:
    sys.exit(f"OpenHands ended as {status.value}.")
'''


class _Settings(Struct, frozen=True, forbid_unknown_fields=True):
    api: Literal["chat", "responses", "anthropic"] = "chat"
    json: bool = True


class OpenHands:
    name = "openhands"
    executables = ("openhands",)
    default_model = "polar"
    call_patterns = CallPatterns(
        role_patterns=(RolePattern("compaction", system_prompt="You are maintaining a context-aware state summary"),)
    )
    package = Package(
        "pypi", "openhands-sdk", "1.58.0", "python", extra_packages=("openhands-tools==1.58.0",), requires_python="3.12"
    )
    skills_folder = f"{_CONFIG_FOLDER}/skills"
    supports_mcp = True
    log_paths = (f"{_CONFIG_FOLDER}/conversations",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        settings = read_settings(self.name, request.settings, _Settings)
        folder = PurePosixPath(request.home, _CONFIG_FOLDER)
        if settings.api == "anthropic":
            llm = {"model": f"anthropic/{request.model}", "base_url": request.gateway_url}
        else:
            llm = {
                "model": f"openai/{request.model}",
                "base_url": f"{request.gateway_url}/v1",
                "api_mode": settings.api,
            }
        config = {
            "llm": llm,
            "mcp_servers": {server.name: _build_server_fields(server) for server in request.mcp_servers},
            "conversations": str(folder / "conversations"),
        }
        return HarnessSetup(
            files={f"{_CONFIG_FOLDER}/run.py": _SCRIPT, f"{_CONFIG_FOLDER}/polar.json": encode_json(config)},
            env={
                "POLAR_OPENHANDS": str(folder / "run.py"),
                "POLAR_API_KEY": request.key,
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, _Settings)
        start = "import os, runpy; runpy.run_path(os.environ['POLAR_OPENHANDS'], run_name='__main__')"
        return ["python", "-c", start, "json" if chosen.json else "text", instruction]


def _build_server_fields(server: McpServer) -> dict[str, Any]:
    if server.command is not None:
        return {"command": server.command, "args": server.args, "env": server.env}
    return {"transport": resolve_transport(server), "url": server.url, "headers": server.headers}
