"""opencode (npm opencode-ai): `opencode run "..."`.

It speaks Chat; `-m polar-responses/MODEL` or `-m polar-anthropic/MODEL` selects another API. Its first call asks for a
title, without tools, always by Chat.

Settings:
    api     chat (default), responses or anthropic
    json    false: what a person reads, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any, Literal

from polar.harnesses.base import (
    CallPatterns,
    CommonSettings,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    encode_json,
    read_settings,
)
from polar.records.task import McpServer

# The libraries that speak these APIs are part of opencode.
_APIS = {
    "chat": ("polar", "@ai-sdk/openai-compatible"),
    "responses": ("polar-responses", "@ai-sdk/openai"),
    "anthropic": ("polar-anthropic", "@ai-sdk/anthropic"),
}
_CONFIG_FOLDER = ".config/opencode"
_DATA_FOLDER = ".local/share/opencode"


class _Settings(CommonSettings, frozen=True, forbid_unknown_fields=True):
    api: Literal["chat", "responses", "anthropic"] = "chat"


class OpenCode:
    name = "opencode"
    executables = ("opencode", "opencode-ai")
    default_model = "polar"
    call_patterns = CallPatterns(
        agent_headers=("x-session-id",),
        subagent_headers=("x-parent-session-id",),
        role_patterns=(
            RolePattern("auxiliary", system_prompt="You are a title generator"),
            RolePattern("compaction", last_user_message="anchored summary"),
        ),
    )
    package = Package("npm", "opencode-ai", "1.18.33", "opencode")
    skills_folder = f"{_CONFIG_FOLDER}/skills"
    supports_mcp = True
    log_paths = tuple(f"{_DATA_FOLDER}/{name}" for name in ("log", "opencode.db", "opencode.db-wal"))

    def setup(self, request: SetupRequest) -> HarnessSetup:
        settings = read_settings(self.name, request.settings, _Settings)
        home = PurePosixPath(request.home)
        options = {"baseURL": f"{request.gateway_url}/v1", "apiKey": "{env:POLAR_API_KEY}"}
        models = {request.model: {"name": request.model, "tool_call": True, "reasoning": True}}
        config = {
            "model": f"{_APIS[settings.api][0]}/{request.model}",
            "small_model": f"polar/{request.model}",
            "provider": {
                name: {"npm": library, "options": options, "models": models} for name, library in _APIS.values()
            },
            "enabled_providers": [name for name, _ in _APIS.values()],
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
            "mcp": {server.name: _build_server_fields(server) for server in request.mcp_servers},
        }
        # It fetches the library for plug-ins, which there are none of, unless its folder says that it is there.
        plugins = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
        return HarnessSetup(
            files={
                f"{_CONFIG_FOLDER}/opencode.json": encode_json(config),
                f"{_CONFIG_FOLDER}/package-lock.json": encode_json(plugins),
                f"{_CONFIG_FOLDER}/node_modules/.package-lock.json": encode_json({"packages": {}}),
            },
            env={
                "XDG_CONFIG_HOME": str(home / ".config"),
                "XDG_DATA_HOME": str(home / ".local" / "share"),
                "XDG_STATE_HOME": str(home / ".local" / "state"),
                "XDG_CACHE_HOME": str(home / ".cache"),
                "OPENCODE_CONFIG": str(home / _CONFIG_FOLDER / "opencode.json"),
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "POLAR_API_KEY": request.key,
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, _Settings)
        events = ["--format", "json"] if chosen.json else []
        return ["opencode", "run", *events, *chosen.args, *_split_words(instruction)]


def _split_words(instruction: str) -> list[str]:
    """It joins words with spaces, and puts quotes around those that have some: so each is a word. Those that begin with
    a dash would be flags (and behind `--` numbers are a fault): a tab is put before them instead of the space."""
    first, *others = instruction.split(" ")
    words = [f"\n{first}" if first.startswith("-") else first]
    for word in others:
        if word.startswith("-"):
            words[-1] += f"\t{word}"
        else:
            words.append(word)
    return words


def _build_server_fields(server: McpServer) -> dict[str, Any]:
    if server.command is not None:
        return {"type": "local", "command": [server.command, *server.args], "environment": server.env}
    return {"type": "remote", "url": server.url, "headers": server.headers}
