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
from polar.harnesses.base import Knowledge, Mark, Package, Setup, Wanted
from polar.harnesses.mcp import transport
from polar.harnesses.settings import Common, read_settings
from polar.rollout.models import McpServer

_ROOT = ".goose"
_TIMEOUT = 300  # seconds for a call of an MCP server's tool: goose's own default, which it wants spelled out


class _Settings(Common, frozen=True, forbid_unknown_fields=True):
    api: Literal["chat", "anthropic"] = "chat"


class Goose:
    name = "goose"
    executables = ("goose",)
    default_model = "polar"
    knowledge = Knowledge(
        marks=(
            Mark("auxiliary", system="Generate a short title (four words or less)"),
            Mark("auxiliary", system="Your task is to summarize a tool call & response pair"),
            Mark("compaction", system="An llm context limit was reached when a user was in a working session"),
        )
    )
    package = Package("npm", "@aaif/goose", "0.20.1", "goose")
    skills = ".agents/skills"
    takes_mcp = True
    logs = (f"{_ROOT}/data/sessions", f"{_ROOT}/state/logs")

    def setup(self, wanted: Wanted) -> Setup:
        settings = read_settings(self.name, wanted.settings, _Settings)
        config = {
            "GOOSE_PROVIDER": "openai" if settings.api == "chat" else "anthropic",
            "GOOSE_MODEL": wanted.model,
            "GOOSE_MODE": "auto",
            "GOOSE_TELEMETRY_ENABLED": False,
            "extensions": {server.name: _extension(server) for server in wanted.mcp_servers},
        }
        return Setup(
            files={f"{_ROOT}/config/config.yaml": yaml.safe_dump(config, sort_keys=False, allow_unicode=True)},
            env={
                "GOOSE_PATH_ROOT": str(PurePosixPath(wanted.home, _ROOT)),
                "GOOSE_DISABLE_KEYRING": "1",
                "OPENAI_HOST": wanted.gateway_url,
                "OPENAI_API_KEY": wanted.key,
                "ANTHROPIC_HOST": wanted.gateway_url,
                "ANTHROPIC_API_KEY": wanted.key,
            },
        )

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, _Settings)
        events = ["--output-format", "stream-json"] if chosen.json else []
        return ["goose", "run", *events, *chosen.args, f"--text={instruction}"]


def _extension(server: McpServer) -> dict[str, Any]:
    common = {"enabled": True, "name": server.name, "description": "", "timeout": _TIMEOUT}
    if server.command is not None:
        return {**common, "type": "stdio", "cmd": server.command, "args": server.args, "envs": server.env}
    if transport(server) == "sse":
        raise ConfigError(f"goose takes no MCP servers over sse: {server.name!r} needs another transport.")
    return {**common, "type": "streamable_http", "uri": server.url, "headers": server.headers}
