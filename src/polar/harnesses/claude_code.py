"""claude-code (npm @anthropic-ai/claude-code): `claude -p "..."`. It speaks Messages.

Settings:
    json    false: its answer as text, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

from polar.harnesses.base import (
    CallPatterns,
    CommonSettings,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    build_server_table,
    encode_json,
    read_settings,
)


class ClaudeCode:
    name = "claude_code"
    executables = ("claude", "claude-code")
    default_model = "claude-sonnet-4-5"  # an unknown name gets other prompts
    call_patterns = CallPatterns(
        agent_headers=("x-claude-code-agent-id",),
        subagent_headers=("x-claude-code-agent-id",),  # the main agent has no id
        # Helpers share the main agent's prompt and tools, for the sake of the provider's cache.
        role_patterns=(
            RolePattern("compaction", header="x-claude-code-compaction"),
            RolePattern("compaction", last_user_message="Your task is to create a detailed summary of"),
            RolePattern("compaction", system_prompt="tasked with summarizing conversations"),
            RolePattern("auxiliary", header="x-claude-code-auxiliary-type"),
            RolePattern("auxiliary", last_user_message="[SUGGESTION MODE:"),
        ),
    )
    package = Package("npm", "@anthropic-ai/claude-code", "2.1.325", "claude")
    skills_folder = ".claude/skills"
    supports_mcp = True
    log_paths = (".claude/projects",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, CommonSettings)
        # Questions that it asks once, at its first start, as if they had been answered.
        state = {
            "hasCompletedOnboarding": True,
            "bypassPermissionsModeAccepted": True,
            "customApiKeyResponses": {"approved": [request.key[-20:]], "rejected": []},
            "mcpServers": build_server_table(request.mcp_servers),
        }
        return HarnessSetup(
            files={
                ".claude/settings.json": encode_json({"permissions": {"defaultMode": "bypassPermissions"}}),
                ".claude/.claude.json": encode_json(state),
            },
            env={
                "CLAUDE_CONFIG_DIR": str(PurePosixPath(request.home, ".claude")),
                "ANTHROPIC_BASE_URL": request.gateway_url,
                "ANTHROPIC_API_KEY": request.key,
                "ANTHROPIC_MODEL": request.model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "IS_SANDBOX": "1",  # else it won't bypass permissions as root, which is what one is in a container
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, CommonSettings)
        events = ["--output-format", "stream-json", "--verbose"] if chosen.json else []
        return ["claude", "-p", *events, *chosen.args, "--", instruction]
