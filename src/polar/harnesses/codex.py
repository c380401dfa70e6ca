"""codex (npm @openai/codex): `codex exec "..."`. It speaks Responses.

Outside a Git repository it insists on `--skip-git-repo-check`, which no setting replaces.

Settings:
    json    false: what a person reads, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

from polar.errors import ConfigError
from polar.harnesses.base import (
    CallPatterns,
    CommonSettings,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    quote_toml_string,
    read_settings,
    resolve_transport,
)
from polar.records.task import McpServer

# Nothing is asked and nothing is boxed in: whoever runs the harness decides where it runs. Web search, a tool that the
# provider would run, is off: no engine has it.
_CONFIG_TEMPLATE = """\
model = {model}
model_provider = "polar"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.polar]
name = "Polar"
base_url = {base_url}
env_key = "POLAR_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
plugins = false
apps = false
"""


class Codex:
    name = "codex"
    executables = ("codex",)
    default_model = "gpt-5.5"  # known to this version: it warns about unknown names, and guesses what they can do
    call_patterns = CallPatterns(
        agent_headers=("thread-id",),  # the session id is the same for all of them
        subagent_headers=("x-codex-parent-thread-id", "x-openai-subagent"),
        role_patterns=(
            RolePattern("compaction", header="x-codex-turn-metadata", header_text='"request_kind":"compaction"'),
            RolePattern("compaction", header="x-openai-subagent", header_text="compact"),
            RolePattern("compaction", last_user_message="CONTEXT CHECKPOINT COMPACTION"),
            RolePattern("auxiliary", header="x-openai-subagent", header_text="memory_consolidation"),
        ),
    )
    package = Package("npm", "@openai/codex", "0.166.0", "codex")
    skills_folder = ".codex/skills"
    supports_mcp = True
    log_paths = (".codex/sessions",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, CommonSettings)
        config = _CONFIG_TEMPLATE.format(
            model=quote_toml_string(request.model), base_url=quote_toml_string(f"{request.gateway_url}/v1")
        )
        return HarnessSetup(
            files={
                ".codex/config.toml": config + "".join(_build_server_fields(server) for server in request.mcp_servers)
            },
            env={"CODEX_HOME": str(PurePosixPath(request.home, ".codex")), "POLAR_API_KEY": request.key},
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, CommonSettings)
        events = ["--json"] if chosen.json else []
        return ["codex", "exec", "--skip-git-repo-check", *events, *chosen.args, "--", instruction]


def _build_server_fields(server: McpServer) -> str:
    if resolve_transport(server) == "sse":
        raise ConfigError(f"codex takes no MCP servers over sse: {server.name!r} needs another transport.")
    lines = ["", f"[mcp_servers.{quote_toml_string(server.name)}]"]
    if server.command is not None:
        lines += [
            f"command = {quote_toml_string(server.command)}",
            f"args = [{', '.join(map(quote_toml_string, server.args))}]",
        ]
        lines.append(f"env = {_format_table(server.env)}")
    elif server.url is not None:
        lines += [f"url = {quote_toml_string(server.url)}", f"http_headers = {_format_table(server.headers)}"]
    return "\n".join(lines) + "\n"


def _format_table(values: dict[str, str]) -> str:
    return (
        "{"
        + ", ".join(f"{quote_toml_string(name)} = {quote_toml_string(value)}" for name, value in values.items())
        + "}"
    )
