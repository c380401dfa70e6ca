"""qwen-code (npm @qwen-code/qwen-code): `qwen -p "..."`, or `qwen "..."`. It speaks Chat.

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
    build_google_server_table,
    encode_json,
    read_settings,
)


class QwenCode:
    name = "qwen_code"
    executables = ("qwen", "qwen-code")
    default_model = "qwen3-coder-plus"
    call_patterns = CallPatterns(
        role_patterns=(
            RolePattern("compaction", system_prompt="component that summarizes a conversation"),
            RolePattern("auxiliary", system_prompt="Generate a concise, sentence-case title"),
            RolePattern("auxiliary", system_prompt="You generate session recaps"),
            RolePattern("auxiliary", system_prompt="You are now acting as the managed memory"),
            RolePattern("auxiliary", system_prompt="You are performing a managed memory dream"),
            RolePattern("auxiliary", last_user_message="your immediately preceding response"),  # whose turn is it?
        )
    )
    package = Package("npm", "@qwen-code/qwen-code", "0.24.4", "qwen")
    skills_folder = ".qwen/skills"
    supports_mcp = True
    log_paths = (".qwen/projects",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, CommonSettings)
        settings = {
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
            "model": {"name": request.model},
            "tools": {"approvalMode": "yolo"},
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # Agents that write down what later sessions might use, which never see this home.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "mcpServers": build_google_server_table(request.mcp_servers),
        }
        return HarnessSetup(
            files={".qwen/settings.json": encode_json(settings)},
            env={
                "QWEN_HOME": str(PurePosixPath(request.home, ".qwen")),
                "OPENAI_BASE_URL": f"{request.gateway_url}/v1",
                "OPENAI_API_KEY": request.key,
                "OPENAI_MODEL": request.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, CommonSettings)
        events = ["-o", "stream-json"] if chosen.json else []
        return ["qwen", *events, *chosen.args, f"--prompt={instruction}"]
