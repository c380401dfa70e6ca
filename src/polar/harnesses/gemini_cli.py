"""gemini-cli (npm @google/gemini-cli): `gemini -p "..."`. It speaks generateContent.

Settings:
    json    false: its answer as text, instead of events
    args    further words for its command line
"""

from typing import Any

from polar.harnesses.base import Knowledge, Mark, Package, Setup, Wanted
from polar.harnesses.files import as_json
from polar.harnesses.mcp import google_by_name
from polar.harnesses.settings import Common, read_settings

# What --yolo does, which no setting can: allow every tool, also shell commands that redirect.
_POLICY = """\
[[rule]]
toolName = "*"
decision = "allow"
priority = 998
allowRedirection = true
"""


class GeminiCli:
    name = "gemini_cli"
    executables = ("gemini", "gemini-cli")
    default_model = "gemini-2.5-pro"
    knowledge = Knowledge(
        marks=(
            Mark("compaction", system="distilling chat history into"),
            Mark("compaction", last="evaluate the <state_snapshot> you just generated"),
            Mark("auxiliary", last="your immediately preceding response"),  # whose turn is it?
        )
    )
    package = Package("npm", "@google/gemini-cli", "0.61.0", "gemini")
    skills = ".gemini/skills"
    takes_mcp = True
    logs = (".gemini/tmp",)

    def setup(self, wanted: Wanted) -> Setup:
        read_settings(self.name, wanted.settings, Common)
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"name": wanted.model},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "mcpServers": google_by_name(wanted.mcp_servers),
        }
        return Setup(
            files={".gemini/settings.json": as_json(settings), ".gemini/policies/polar.toml": _POLICY},
            env={
                "GEMINI_CLI_HOME": wanted.home,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                "GOOGLE_GEMINI_BASE_URL": wanted.gateway_url,
                "GEMINI_API_KEY": wanted.key,
                "GEMINI_MODEL": wanted.model,
            },
        )

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, Common)
        events = ["-o", "stream-json"] if chosen.json else []
        return ["gemini", *events, *chosen.args, f"--prompt={instruction}"]
