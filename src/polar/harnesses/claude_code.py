"""claude-code (npm @anthropic-ai/claude-code): `claude -p "..."`. It speaks Messages.

Settings:
    json    false: its answer as text, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

from polar.harnesses.base import Knowledge, Mark, Package, Setup, Wanted
from polar.harnesses.files import as_json
from polar.harnesses.mcp import by_name
from polar.harnesses.settings import Common, read_settings


class ClaudeCode:
    name = "claude_code"
    executables = ("claude", "claude-code")
    default_model = "claude-sonnet-4-5"  # an unknown name gets other prompts
    knowledge = Knowledge(
        agents=("x-claude-code-agent-id",),
        subagents=("x-claude-code-agent-id",),  # the main agent has no id
        # Helpers share the main agent's prompt and tools, for the sake of the provider's cache.
        marks=(
            Mark("compaction", header="x-claude-code-compaction"),
            Mark("compaction", last="Your task is to create a detailed summary of"),
            Mark("compaction", system="tasked with summarizing conversations"),
            Mark("auxiliary", header="x-claude-code-auxiliary-type"),
            Mark("auxiliary", last="[SUGGESTION MODE:"),
        ),
    )
    package = Package("npm", "@anthropic-ai/claude-code", "2.1.325", "claude")
    skills = ".claude/skills"
    takes_mcp = True
    logs = (".claude/projects",)

    def setup(self, wanted: Wanted) -> Setup:
        read_settings(self.name, wanted.settings, Common)
        # Questions that it asks once, at its first start, as if they had been answered.
        state = {
            "hasCompletedOnboarding": True,
            "bypassPermissionsModeAccepted": True,
            "customApiKeyResponses": {"approved": [wanted.key[-20:]], "rejected": []},
            "mcpServers": by_name(wanted.mcp_servers),
        }
        return Setup(
            files={
                ".claude/settings.json": as_json({"permissions": {"defaultMode": "bypassPermissions"}}),
                ".claude/.claude.json": as_json(state),
            },
            env={
                "CLAUDE_CONFIG_DIR": str(PurePosixPath(wanted.home, ".claude")),
                "ANTHROPIC_BASE_URL": wanted.gateway_url,
                "ANTHROPIC_API_KEY": wanted.key,
                "ANTHROPIC_MODEL": wanted.model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "IS_SANDBOX": "1",  # else it won't bypass permissions as root, which is what one is in a container
            },
        )

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, Common)
        events = ["--output-format", "stream-json", "--verbose"] if chosen.json else []
        return ["claude", "-p", *events, *chosen.args, "--", instruction]
