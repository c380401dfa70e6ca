"""gemini-cli (npm @google/gemini-cli): `gemini -p "..."`. It speaks generateContent.

Settings:
    json    false: its answer as text, instead of events
    args    further words for its command line
"""

from typing import Any

from polar.harnesses.base import (
    CallPatterns,
    CommonSettings,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    build_google_server_table,
    encode_json,
    read_settings,
)

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
    call_patterns = CallPatterns(
        role_patterns=(
            RolePattern("compaction", system_prompt="distilling chat history into"),
            RolePattern("compaction", last_user_message="evaluate the <state_snapshot> you just generated"),
            RolePattern("auxiliary", last_user_message="your immediately preceding response"),  # whose turn is it?
        )
    )
    package = Package("npm", "@google/gemini-cli", "0.61.0", "gemini")
    skills_folder = ".gemini/skills"
    supports_mcp = True
    log_paths = (".gemini/tmp",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, CommonSettings)
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"name": request.model},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "mcpServers": build_google_server_table(request.mcp_servers),
        }
        return HarnessSetup(
            files={".gemini/settings.json": encode_json(settings), ".gemini/policies/polar.toml": _POLICY},
            env={
                "GEMINI_CLI_HOME": request.home,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                "GOOGLE_GEMINI_BASE_URL": request.gateway_url,
                "GEMINI_API_KEY": request.key,
                "GEMINI_MODEL": request.model,
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, CommonSettings)
        events = ["-o", "stream-json"] if chosen.json else []
        return ["gemini", *events, *chosen.args, f"--prompt={instruction}"]
