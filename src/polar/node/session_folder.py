"""What is kept of a session beside the store: SESSIONS/ID/ with what people look at.

agent.log        what the harness printed
workspace.diff   what the agent changed, as a patch
logs/            what the harness wrote of its own run, and what the evaluator printed
verdict.json     the reward, or the reason why there is none, and how it came about
timing.json      seconds in each stage
"""

import os
from pathlib import Path
from typing import Any

import msgspec


class SessionFolder:
    def __init__(self, data: Path, session_id: str) -> None:
        self.path = data / "sessions" / session_id
        self.logs = self.path / "logs"

    def create(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    @property
    def agent_log(self) -> Path:
        return self.path / "agent.log"

    @property
    def workspace_diff(self) -> Path:
        return self.path / "workspace.diff"

    def write_json(self, name: str, content: Any) -> None:
        """Whole or not at all."""
        beside = self.path / f".{name}.part"
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        os.replace(beside, self.path / name)

    def log_tail(self, characters: int = 600) -> str:
        """The end of what the harness printed."""
        try:
            with self.agent_log.open("rb") as file:
                file.seek(max(0, self.agent_log.stat().st_size - 4 * characters))
                return file.read().decode(errors="replace")[-characters:].strip()
        except FileNotFoundError:
            return ""
