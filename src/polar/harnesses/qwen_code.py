"""qwen-code (npm @qwen-code/qwen-code): `qwen -p "..."`, or `qwen "..."`. It speaks Chat."""

from pathlib import Path

from polar.harnesses.base import Knowledge, Mark
from polar.harnesses.files import write_json


class QwenCode:
    name = "qwen_code"
    executables = ("qwen", "qwen-code")
    default_model = "qwen3-coder-plus"
    knowledge = Knowledge(
        marks=(
            Mark("compaction", system="component that summarizes a conversation"),
            Mark("auxiliary", system="Generate a concise, sentence-case title"),
            Mark("auxiliary", system="You generate session recaps"),
            Mark("auxiliary", last="your immediately preceding response"),  # whose turn is it?
        )
    )

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        folder = home / ".qwen"
        settings = {
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
            "model": {"name": model},
            "tools": {"approvalMode": "yolo"},
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
        }
        write_json(folder / "settings.json", settings)
        return {
            "QWEN_HOME": str(folder),
            "OPENAI_BASE_URL": f"{gateway_url}/v1",
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": model,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        }

    def command(self, instruction: str) -> list[str]:
        return ["qwen", "-p", instruction]
