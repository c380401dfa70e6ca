"""Polar's own: a line is a SessionResult, as the rollout service gives it and as bridges for NVIDIA's Polar read it.

Who divides: the trainer; each trace has its `weight`.

What is lost: nothing. A session without a reward has null and its reason, and one with nothing to train has no traces.
"""

from typing import Any, ClassVar

from polar.export.base import Item, Need, SessionLines
from polar.export.messages import of_trace, said_of
from polar.store.base import Session
from polar.trajectory import wire


class Polar(SessionLines):
    name: ClassVar[str] = "polar"
    needs: ClassVar[frozenset[Need]] = frozenset(("messages",))

    def lines(self, item: Item) -> list[dict[str, Any]]:
        session = item.session
        said = said_of(item)
        status = _status(session)
        messages = [of_trace(trace, said) for trace in item.trajectory.traces]
        result = {
            "session_id": session.session_id,
            "task_id": item.group,
            "status": status,
            "trajectory": wire.trajectory(item.trajectory, messages, status=status, error=session.reason),
            "timing": {
                "created_at": session.created_at,
                "ended_at": session.ended_at,
                "seconds": None if session.ended_at is None else session.ended_at - session.created_at,
            },
            "node_id": session.metadata.get("node_id"),
            "error": session.reason,
            "metadata": {"run": session.run, **session.metadata},
        }
        return [result]


def _status(session: Session) -> str:
    """A reason is why there is no reward; a reward, whatever it is, means that the session was graded."""
    if session.reason is None:
        return "COMPLETED"
    return "TIMEOUT" if session.reason.startswith("timeout") else "ERROR"
