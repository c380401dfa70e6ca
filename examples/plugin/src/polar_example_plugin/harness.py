"""`oneshot`: an agent that asks the model once and writes its answer into a file.

Settings:
    file    where the answer goes, in the workspace [answer.txt]
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from polar.harnesses.base import CallPatterns, HarnessSetup, Package, SetupRequest, read_settings


class OneshotSettings(Struct, frozen=True, forbid_unknown_fields=True):
    file: str = "answer.txt"


class Oneshot:
    name = "oneshot"
    executables: tuple[str, ...] = ()  # no command of its own that `polar capture` could recognize
    default_model = "polar"
    call_patterns = CallPatterns()  # every call is the main agent's
    package: Package | None = None  # nothing to install: it comes with its setup
    skills_folder = None
    supports_mcp = False
    log_paths: tuple[str, ...] = ()

    def setup(self, request: SetupRequest) -> HarnessSetup:
        """Its files, below the session's private home. The key is in the environment already, and in no file."""
        settings = read_settings(self.name, request.settings, OneshotSettings)
        config = {"base_url": f"{request.gateway_url}/v1", "model": request.model, "file": settings.file}
        agent = Path(__file__).with_name("agent.py").read_text(encoding="utf-8")
        return HarnessSetup({".oneshot/agent.py": agent, ".oneshot/config.json": json.dumps(config)})

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        read_settings(self.name, settings, OneshotSettings)  # says what is wrong before anything runs
        return ["sh", "-c", 'exec python3 "$HOME/.oneshot/agent.py" "$0"', instruction]
