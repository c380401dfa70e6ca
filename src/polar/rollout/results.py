"""A finished session as trainers read it: records.result.SessionResult, as a plain document."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from polar.export.base import SessionItem
from polar.export.messages import conversation_calls, trace_messages
from polar.records import wire
from polar.records.exchange import Exchange
from polar.records.result import SessionStatus, TaskState
from polar.records.session import Session
from polar.records.trajectory import SessionPaths, TokenCounts, Trajectory
from polar.rollout.protocol import SessionOutcome
from polar.rollout.queue.records import TaskRow
from polar.trajectory.checker import SessionChecker
from polar.trajectory.session import TRACE_BUILDER, build_trajectory


class _Builder(msgspec.Struct):
    strategy: str = TRACE_BUILDER


class _Semantics(msgspec.Struct):
    mask_traces: bool = False
    all_failed: Literal["failed", "completed"] = "failed"


class _Request(msgspec.Struct):
    """Of a TaskRequest, what is needed here."""

    builder: _Builder = msgspec.field(default_factory=_Builder)
    semantics: _Semantics = msgspec.field(default_factory=_Semantics)


_decode_request = msgspec.json.Decoder(_Request).decode


class ResultForm(msgspec.Struct, frozen=True):
    """How a task wants its results."""

    builder: str = TRACE_BUILDER
    mask_traces: bool = False  # of sessions without a reward


def result_form(request: str) -> ResultForm:
    """`request` is a TaskRequest, as JSON."""
    read = _decode_request(request)
    return ResultForm(read.builder.strategy, read.semantics.mask_traces)


def task_status(task: TaskRow) -> TaskState:
    """As its semantics have it."""
    return _decode_request(task.request).semantics.all_failed if task.state == "failed" else task.state


def render_ended_result(
    task_id: str,
    sample: int,
    ended: SessionOutcome,
    form: ResultForm,
    session: Session | None,
    exchanges: Sequence[Exchange],
    checker: SessionChecker,
) -> dict[str, Any]:
    """What the rollout server keeps of a session's end, together with what the store has of it: nothing, where it
    ended before it began. Raises HeldBackError where the session fails the check."""
    known = _ended_session(task_id, sample, ended, session)
    built = build_trajectory(known, exchanges, form.builder, checker)
    item = SessionItem(known, built.session_paths, built.trajectory, list(exchanges), calls=built.calls)
    return _render(item, sample, ended, form, has_session=session is not None)


def render_failed_result(
    task_id: str, sample: int, ended: SessionOutcome, reason: str, error: str, session: Session | None = None
) -> dict[str, Any]:
    """Of a session whose traces can't be made, or must not be handed on: there is no use in its reward without them."""
    failed = msgspec.structs.replace(ended, reward=None, reason=reason, error=error)
    known = _ended_session(task_id, sample, failed, session)
    nothing = Trajectory(known.session_id, TRACE_BUILDER, [], [], TokenCounts(0, 0, 0), None, reason)
    item = SessionItem(known, SessionPaths(known.session_id, [], None, reason), nothing)
    return _render(item, sample, failed, ResultForm(), has_session=session is not None)


def _ended_session(task_id: str, sample: int, ended: SessionOutcome, session: Session | None) -> Session:
    known = with_outcome(session or Session(ended.session_id or f"{task_id}#{sample}", b"", 0.0), ended)
    known.metadata = {**known.metadata, "task_id": task_id}
    return known


def _render(
    item: SessionItem, sample: int, ended: SessionOutcome, form: ResultForm, *, has_session: bool
) -> dict[str, Any]:
    result = render_session_result(
        item,
        stages=ended.seconds,
        error=ended.error,
        outcome=ended.outcome,
        detail=ended.detail or None,
        mask_traces=form.mask_traces,
    )
    if not has_session:
        result["metadata"]["timing"] = {"stages": ended.seconds}
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


def with_outcome(session: Session, ended: SessionOutcome) -> Session:
    """With the verdict that counts: what a node said of the session in time."""
    return msgspec.structs.replace(session, reward=ended.reward, reason=ended.reason, evidence=ended.evidence)


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
