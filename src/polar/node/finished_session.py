"""What became of a session: its verdict, what is reported of it, and what is kept of it beside the store."""

import math
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from polar.evaluators.base import GraderError, Outcome
from polar.records.session import Verdict, is_suspicious

_MAX_LIST_ITEMS = 1000  # of a list in a verdict's detail
_MAX_REASON_CHARS = 200  # characters: it is counted by, and stands in tables


class FinishedSession(Struct):
    """What became of a session."""

    session_id: str
    task_id: str
    sample: int
    verdict: Verdict
    seconds: dict[str, float]  # in each stage, and waiting for it
    folder: Path
    outcome: Outcome | None = None  # None where the harness never ran
    turns: int = 0
    tokens: int = 0  # sampled
    error: str | None = None  # what went wrong, in words, where the verdict is a reason
    versions: tuple[int, int] | None = None  # of the policy: the oldest and the newest that its tokens come from


def check_verdict(verdict: Verdict, *, in_live_runtime: bool) -> Verdict:
    rewards = [*verdict.turn_rewards.values(), *(() if verdict.reward is None else (verdict.reward,))]
    if not all(math.isfinite(reward) for reward in rewards):
        raise GraderError(f"The evaluator gave a reward that is no finite number: {verdict.reward}.")
    if verdict.reward is not None and verdict.reason is not None:
        raise GraderError("The evaluator gave a reward and a reason why there is none.")
    if verdict.reason is not None and not (verdict.reason.isprintable() and len(verdict.reason) <= _MAX_REASON_CHARS):
        raise GraderError("The evaluator gave a reason that is no word: say more in its detail.")
    detail = to_printable({**verdict.detail, "live_runtime": True} if in_live_runtime else verdict.detail)
    return msgspec.structs.replace(verdict, detail=detail)


def to_printable(document: Any) -> Any:
    """Names of an agent's files are bytes that need not be text, and stand in what is told of them, however many they
    are: as text that can be written, and not without end."""
    if isinstance(document, str):
        return document.encode(errors="backslashreplace").decode()
    if isinstance(document, dict):
        return {to_printable(key): to_printable(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        omitted = [f"and {len(document) - _MAX_LIST_ITEMS} more"] if len(document) > _MAX_LIST_ITEMS else []
        return [to_printable(value) for value in document[:_MAX_LIST_ITEMS]] + omitted
    return document if document is None or isinstance(document, bool | int | float) else to_printable(str(document))


def to_document(finished: FinishedSession) -> dict[str, Any]:
    return {
        "session_id": finished.session_id,
        "task_id": finished.task_id,
        "sample": finished.sample,
        "reward": finished.verdict.reward,
        "reason": finished.verdict.reason,
        "error": finished.error,
        "turn_rewards": finished.verdict.turn_rewards,
        "detail": finished.verdict.detail,
        "evidence": finished.verdict.evidence,
        "suspicious": is_suspicious(finished.verdict.evidence),
        "outcome": finished.outcome,
        "turns": finished.turns,
        "tokens": finished.tokens,
    }


class SessionFolder:
    """What is kept of a session beside the store: sessions/ID/ with what people look at.

    agent.log        what the harness printed
    workspace.diff   what the agent changed, as a patch
    logs/            what the harness wrote of its own run, and what the evaluator printed
    verdict.json     the reward, or the reason why there is none, and how it came about
    timing.json      seconds in each stage
    """

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
        part = self.path / f".{name}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        os.replace(part, self.path / name)

    def read_log_tail(self, characters: int = 600) -> str:
        """The end of what the harness printed."""
        try:
            with self.agent_log.open("rb") as file:
                file.seek(max(0, self.agent_log.stat().st_size - 4 * characters))
                return file.read().decode(errors="replace")[-characters:].strip()
        except FileNotFoundError:
            return ""
