"""A finished session as trainers read it: models.SessionResult, as a plain document."""

from collections.abc import Sequence
from typing import Any

import msgspec

from polar.export.base import Item
from polar.export.messages import of_trace, said_of
from polar.rollout.models import SessionStatus
from polar.rollout.protocol import Ended
from polar.store.base import Exchange, Session
from polar.trajectory import wire
from polar.trajectory.session import MERGED, parts_of, sampled_in, traced


class _Builder(msgspec.Struct):
    strategy: str = MERGED


class _Request(msgspec.Struct):
    """Of a TaskRequest, what is needed here."""

    builder: _Builder = msgspec.field(default_factory=_Builder)


_request = msgspec.json.Decoder(_Request).decode


def builder_of(request: str) -> str:
    """The one that a task names. `request` is a TaskRequest, as JSON."""
    return _request(request).builder.strategy


def ended_result(
    task_id: str, sample: int, ended: Ended, builder: str, session: Session | None, exchanges: Sequence[Exchange]
) -> dict[str, Any]:
    """What the rollout server keeps of a session's end, together with what the store has of it: nothing, where it
    ended before it began."""
    known = as_ended(session or Session(ended.session_id or f"{task_id}#{sample}", b"", 0.0), ended)
    known.metadata = {**known.metadata, "task_id": task_id}
    parts = parts_of(known, exchanges)
    paths = sampled_in(known, parts)
    item = Item(known, paths, traced(paths, builder), list(exchanges), parts=parts)
    result = session_result(
        item, stages=ended.seconds, error=ended.error, outcome=ended.outcome, detail=ended.detail or None
    )
    if session is None:
        result["timing"] = {"stages": ended.seconds}
    result["node_id"] = ended.node_id or result["node_id"]
    result["metadata"] |= {
        "sample": sample,
        "turns": ended.turns,
        "sampled_tokens": ended.tokens,
        "oldest_version": ended.oldest_version,
        "newest_version": ended.newest_version,
        "lag": ended.lag,
        "stale": ended.stale,
    }
    return result


def as_ended(session: Session, ended: Ended) -> Session:
    """With the verdict that counts: what a node said of the session in time."""
    return msgspec.structs.replace(session, reward=ended.reward, reason=ended.reason)


def unbuilt_result(task_id: str, sample: int, ended: Ended, reason: str, error: str) -> dict[str, Any]:
    """Of a session whose traces can't be made: there is no use in its reward without them."""
    failed = msgspec.structs.replace(ended, reward=None, reason=reason, error=error)
    return ended_result(task_id, sample, failed, MERGED, None, ())


def session_result(
    item: Item,
    *,
    stages: dict[str, float] | None = None,
    error: str | None = None,
    outcome: Any = None,
    detail: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What only the node knows: `stages` are the seconds in each, `error` says in words what the session's reason says
    in one, `outcome` how the harness's run ended, and `detail` how its verdict came about (in a live runtime, say)."""
    session = item.session
    said = said_of(item)
    status = status_of(session)
    messages = [of_trace(trace, said) for trace in item.trajectory.traces]
    error = error or session.reason
    return {
        "session_id": session.session_id,
        "task_id": item.group,
        "status": status,
        "reward": session.reward,
        "reason": session.reason,
        "trajectory": wire.trajectory(item.trajectory, messages, status=status, error=error),
        "timing": {
            "created_at": session.created_at,
            "ended_at": session.ended_at,
            "seconds": None if session.ended_at is None else session.ended_at - session.created_at,
            **({} if stages is None else {"stages": stages}),
        },
        "node_id": session.metadata.get("node_id"),
        "error": error,
        "metadata": {
            "run": session.run,
            **session.metadata,
            **({} if outcome is None else {"outcome": outcome}),
            **({"verdict": detail} if detail else {}),
        },
    }


def status_of(session: Session) -> SessionStatus:
    """A reason is why there is no reward; a reward, whatever it is, means that the session was graded."""
    if session.reason is None:
        return "COMPLETED"
    return "TIMEOUT" if session.reason.startswith("timeout") else "ERROR"
