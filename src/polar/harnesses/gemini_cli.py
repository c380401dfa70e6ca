"""gemini-cli (npm @google/gemini-cli): `gemini -p "..."`. It speaks generateContent."""

from pathlib import Path

from polar.harnesses.base import Knowledge, Mark
from polar.harnesses.files import write, write_json

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

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        folder = home / ".gemini"
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"name": model},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
        }
        write_json(folder / "settings.json", settings)
        write(folder / "policies" / "polar.toml", _POLICY)
        return {
            "GEMINI_CLI_HOME": str(home),
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GOOGLE_GEMINI_BASE_URL": gateway_url,
            "GEMINI_API_KEY": key,
            "GEMINI_MODEL": model,
        }

    def command(self, instruction: str) -> list[str]:
        return ["gemini", "-p", instruction]
