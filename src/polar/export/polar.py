"""Polar's own: a line is a SessionResult, as the rollout service gives it and as bridges for NVIDIA's Polar read it.

Who divides: the trainer; each trace has its `weight`.

What is lost: nothing. A session without a reward has null and its reason, and one with nothing to train has no traces.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from polar.export.base import ExportNeed, SessionItem, SessionLines
from polar.export.messages import conversation_calls, trace_messages
from polar.records import wire
from polar.records.exchange import Exchange
from polar.records.result import SessionStatus
from polar.records.session import HeldBackError, Session
from polar.records.trajectory import SessionPaths
from polar.trajectory.checker import SessionChecker
from polar.trajectory.session import build_trajectory, hold_back_session


class PolarExporter(SessionLines):
    name: ClassVar[str] = "polar"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages",))

    def lines(self, item: SessionItem) -> list[dict[str, Any]]:
        return [render_session_result(item)]


def build_session_result(
    session: Session,
    exchanges: Sequence[Exchange],
    builder: str,
    checker: SessionChecker,
    *,
    error: str | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """The result of a stored session: built, checked and rendered. One that fails the check is held back. `parts` are
    those of `render_session_result`."""
    try:
        built = build_trajectory(session, exchanges, builder, checker)
        item = SessionItem(session.summary, built.session_paths, built.trajectory, list(exchanges), calls=built.calls)
    except HeldBackError as held:
        error = str(held)
        kept, nothing = hold_back_session(session, builder, held)
        item = SessionItem(kept.summary, SessionPaths(session.session_id, []), nothing)
    return render_session_result(item, error=error, **parts)


def render_session_result(
    item: SessionItem,
    *,
    stages: dict[str, float] | None = None,
    error: str | None = None,
    outcome: Any = None,
    detail: dict[str, Any] | None = None,
    mask_traces: bool = False,
) -> dict[str, Any]:
    """What only the node knows: `stages` are the seconds in each, `error` says in words what the session's reason says
    in one, `outcome` how the harness's run ended, and `detail` how its verdict came about (in a live runtime, say).
    `mask_traces`: where there is no reward."""
    session = item.session
    sampled_texts = conversation_calls(item)
    status = session_status(session.reason)
    messages = [trace_messages(trace, sampled_texts) for trace in item.trajectory.traces]
    error = error or session.reason
    trajectory = wire.trajectory_to_dict(item.trajectory, messages, status=status, error=error)
    if session.reward is not None:
        trajectory["metadata"]["evaluation"] = evaluation_report(session.reward, detail or {})
    if mask_traces and status != "COMPLETED":
        _mask_traces(trajectory)
    return {
        "session_id": session.session_id,
        "task_id": item.group_id,
        "status": status,
        "reward": session.reward,
        "reason": session.reason,
        "trajectory": trajectory,
        "timing": stage_timing(stages or {}),
        "node_id": session.metadata.get("node_id"),
        "error": error,
        "evidence": msgspec.to_builtins(session.evidence),
        "metadata": {
            "run": session.run,
            **session.metadata,
            "suspicious": session.suspicious,
            "timing": {
                "created_at": session.created_at,
                "ended_at": session.ended_at,
                "seconds": None if session.ended_at is None else session.ended_at - session.created_at,
                **({} if stages is None else {"stages": stages}),
            },
            **({} if outcome is None else {"outcome": outcome}),
            **({"verdict": detail} if detail else {}),
        },
    }


def evaluation_report(reward: float, detail: dict[str, Any]) -> dict[str, Any]:
    """As bridges look for it: `report.resolved` is the evaluator's own word, else whether the reward is all of 1."""
    resolved = detail.get("resolved")
    report = {**detail, "resolved": resolved if isinstance(resolved, bool) else reward >= 1.0}
    return {"outcome_reward": reward, "trace_rewards": None, "report": report}


def _mask_traces(trajectory: dict[str, Any]) -> None:
    """Nothing of it is to be trained on, whatever a trainer reads of it."""
    reason = "session_timeout" if trajectory["status"] == "TIMEOUT" else "session_error"
    for trace in trajectory["traces"]:
        trace["loss_mask"] = [0] * len(trace["response_ids"])
        trace["reward"] = 0.0
        trace["metadata"]["training_filter"] = {"masked": True, "reason": reason, "detail": trajectory["error"]}
    trajectory["metadata"]["tokens"]["trainable"] = 0


def stage_timing(stages: dict[str, float]) -> dict[str, float]:
    """records.result.SessionTiming of the seconds in each stage."""
    named = {
        "register_to_init_queue_ms": "queued",
        "init_ms": "init",
        "run_ms": "run",
        "postrun_ms": "postrun",
    }
    return {field: 1000.0 * stages.get(stage, 0.0) for field, stage in named.items()}


def session_status(reason: str | None) -> SessionStatus:
    """A reason is why there is no reward; a reward, whatever it is, means that the session was graded."""
    if reason is None:
        return "COMPLETED"
    return "TIMEOUT" if reason.startswith("timeout") else "ERROR"
