"""goose (npm @aaif/goose; its 0.20.1 brings goose 1.34.0): `goose run -t "..."`. It speaks Chat or Messages.

It writes a message of its own between the text and the tool call of one turn, and takes it back on the next: no prompt
of it begins with the one before. It ends with 0 also where a model call has failed.

Settings:
    api     chat (default) or anthropic
    json    false: what a person reads, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any, Literal

import yaml

from polar.errors import ConfigError
from polar.harnesses.base import (
    CallPatterns,
    CommonSettings,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    read_settings,
    resolve_transport,
)
from polar.records.task import McpServer

_ROOT_FOLDER = ".goose"
_TOOL_TIMEOUT_SECONDS = (
    300  # seconds for a call of an MCP server's tool: goose's own default, which it wants spelled out
)


class _Settings(CommonSettings, frozen=True, forbid_unknown_fields=True):
    api: Literal["chat", "anthropic"] = "chat"


class Goose:
    name = "goose"
    executables = ("goose",)
    default_model = "polar"
    call_patterns = CallPatterns(
        role_patterns=(
            RolePattern("auxiliary", system_prompt="Generate a short title (four words or less)"),
            RolePattern("auxiliary", system_prompt="Your task is to summarize a tool call & response pair"),
            RolePattern(
                "compaction", system_prompt="An llm context limit was reached when a user was in a working session"
            ),
        )
    )
    package = Package("npm", "@aaif/goose", "0.20.1", "goose")
    skills_folder = ".agents/skills"
    supports_mcp = True
    log_paths = (f"{_ROOT_FOLDER}/data/sessions", f"{_ROOT_FOLDER}/state/logs")

    def setup(self, request: SetupRequest) -> HarnessSetup:
        settings = read_settings(self.name, request.settings, _Settings)
        config = {
            "GOOSE_PROVIDER": "openai" if settings.api == "chat" else "anthropic",
            "GOOSE_MODEL": request.model,
            "GOOSE_MODE": "auto",
            "GOOSE_TELEMETRY_ENABLED": False,
            "extensions": {server.name: _build_extension(server) for server in request.mcp_servers},
        }
        return HarnessSetup(
            files={f"{_ROOT_FOLDER}/config/config.yaml": yaml.safe_dump(config, sort_keys=False, allow_unicode=True)},
            env={
                "GOOSE_PATH_ROOT": str(PurePosixPath(request.home, _ROOT_FOLDER)),
                "GOOSE_DISABLE_KEYRING": "1",
                "OPENAI_HOST": request.gateway_url,
                "OPENAI_API_KEY": request.key,
                "ANTHROPIC_HOST": request.gateway_url,
                "ANTHROPIC_API_KEY": request.key,
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, _Settings)
        events = ["--output-format", "stream-json"] if chosen.json else []
        return ["goose", "run", *events, *chosen.args, f"--text={instruction}"]


def _build_extension(server: McpServer) -> dict[str, Any]:
    common = {"enabled": True, "name": server.name, "description": "", "timeout": _TOOL_TIMEOUT_SECONDS}
    if server.command is not None:
        return {**common, "type": "stdio", "cmd": server.command, "args": server.args, "envs": server.env}
    if resolve_transport(server) == "sse":
        raise ConfigError(f"goose takes no MCP servers over sse: {server.name!r} needs another transport.")
    return {**common, "type": "streamable_http", "uri": server.url, "headers": server.headers}
