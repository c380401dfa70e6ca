"""qwen-code (npm @qwen-code/qwen-code): `qwen -p "..."`, or `qwen "..."`. It speaks Chat.

Settings:
    json    false: its answer as text, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

from polar.harnesses.base import Knowledge, Mark, Package, Setup, Wanted
from polar.harnesses.files import as_json
from polar.harnesses.mcp import google_by_name
from polar.harnesses.settings import Common, read_settings


class QwenCode:
    name = "qwen_code"
    executables = ("qwen", "qwen-code")
    default_model = "qwen3-coder-plus"
    knowledge = Knowledge(
        marks=(
            Mark("compaction", system="component that summarizes a conversation"),
            Mark("auxiliary", system="Generate a concise, sentence-case title"),
            Mark("auxiliary", system="You generate session recaps"),
            Mark("auxiliary", system="You are now acting as the managed memory"),
            Mark("auxiliary", system="You are performing a managed memory dream"),
            Mark("auxiliary", last="your immediately preceding response"),  # whose turn is it?
        )
    )
    package = Package("npm", "@qwen-code/qwen-code", "0.24.4", "qwen")
    skills = ".qwen/skills"
    takes_mcp = True
    logs = (".qwen/projects",)

    def setup(self, wanted: Wanted) -> Setup:
        read_settings(self.name, wanted.settings, Common)
        settings = {
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
            "model": {"name": wanted.model},
            "tools": {"approvalMode": "yolo"},
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # Agents that write down what later sessions might use, which never see this home.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "mcpServers": google_by_name(wanted.mcp_servers),
        }
        return Setup(
            files={".qwen/settings.json": as_json(settings)},
            env={
                "QWEN_HOME": str(PurePosixPath(wanted.home, ".qwen")),
                "OPENAI_BASE_URL": f"{wanted.gateway_url}/v1",
                "OPENAI_API_KEY": wanted.key,
                "OPENAI_MODEL": wanted.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            },
        )

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, Common)
        events = ["-o", "stream-json"] if chosen.json else []
        return ["qwen", *events, *chosen.args, f"--prompt={instruction}"]
