"""A finished session as trainers read it: models.SessionResult, as a plain document."""

from typing import Any

from polar.export.base import Item
from polar.export.messages import of_trace, said_of
from polar.rollout.models import SessionStatus
from polar.store.base import Session
from polar.trajectory import wire


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
