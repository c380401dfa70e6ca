"""What became of a session: its verdict, and what is told of it."""

import math
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
        more = [f"and {len(document) - _MAX_LIST_ITEMS} more"] if len(document) > _MAX_LIST_ITEMS else []
        return [to_printable(value) for value in document[:_MAX_LIST_ITEMS]] + more
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
