"""claude-code (npm @anthropic-ai/claude-code): `claude -p "..."`. It speaks Messages."""

from pathlib import Path

from polar.harnesses.base import Knowledge, Mark
from polar.harnesses.files import write_json


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

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        folder = home / ".claude"
        write_json(folder / "settings.json", {"permissions": {"defaultMode": "bypassPermissions"}})
        # Questions that it asks once, at its first start, as if they had been answered.
        answered = {
            "hasCompletedOnboarding": True,
            "bypassPermissionsModeAccepted": True,
            "customApiKeyResponses": {"approved": [key[-20:]], "rejected": []},
        }
        write_json(folder / ".claude.json", answered)
        return {
            "CLAUDE_CONFIG_DIR": str(folder),
            "ANTHROPIC_BASE_URL": gateway_url,
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # else it won't bypass permissions as root, which is what one is in a container
        }

    def command(self, instruction: str) -> list[str]:
        return ["claude", "-p", instruction]
