"""Finished sessions: their verdict, their report, and the folder that is kept beside the store."""

import math
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from polar.evaluators.base import GraderError, Outcome
from polar.records.session import Verdict, is_suspicious

_MAX_LIST_ITEMS = 1000  # of a list in a verdict's detail
_MAX_REASON_CHARS = 200  # reasons are counted by and shown in tables


class FinishedSession(Struct):
    """The result of a session, as the node reports it."""

    session_id: str
    task_id: str
    sample: int
    verdict: Verdict
    seconds: dict[str, float]  # by stage, and by wait
    folder: Path
    outcome: Outcome | None = None  # None where the harness never ran
    turns: int = 0
    tokens: int = 0  # sampled
    error: str | None = None  # the error message, where the verdict is a reason
    versions: tuple[int, int] | None = None  # the oldest and newest policy version among its sampled tokens


def check_verdict(verdict: Verdict, *, in_live_runtime: bool) -> Verdict:
    rewards = [*verdict.turn_rewards.values(), *(() if verdict.reward is None else (verdict.reward,))]
    if not all(math.isfinite(reward) for reward in rewards):
        raise GraderError(f"The evaluator returned a reward that is not finite: {verdict.reward}.")
    if verdict.reward is not None and verdict.reason is not None:
        raise GraderError(
            f"The evaluator returned a reward ({verdict.reward}) and a reason for having none ({verdict.reason!r})."
        )
    if verdict.reason is not None and not (verdict.reason.isprintable() and len(verdict.reason) <= _MAX_REASON_CHARS):
        raise GraderError(
            f"The evaluator returned a reason that is not printable or longer than {_MAX_REASON_CHARS} characters: "
            "put the explanation into `detail`."
        )
    detail = to_printable({**verdict.detail, "live_runtime": True} if in_live_runtime else verdict.detail)
    return msgspec.structs.replace(verdict, detail=detail)


def to_printable(document: Any) -> Any:
    """Makes a verdict's detail storable: escapes undecodable bytes (an agent's file names), truncates long lists."""
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
    """The folder sessions/ID/ that is kept of a session beside the store, for people to read.

    agent.log        the harness's output
    workspace.diff   the agent's changes to its workspace, as a patch
    logs/            the harness's own logs, and the evaluator's output
    verdict.json     the reward, or the reason for having none, with its detail
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
        """Writes the file atomically."""
        part = self.path / f".{name}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        os.replace(part, self.path / name)

    def read_log_tail(self, characters: int = 600) -> str:
        """The end of the harness's output."""
        try:
            with self.agent_log.open("rb") as file:
                file.seek(max(0, self.agent_log.stat().st_size - 4 * characters))
                return file.read().decode(errors="replace")[-characters:].strip()
        except FileNotFoundError:
            return ""
