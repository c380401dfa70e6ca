"""Renders an ended session for trainers: its result, with the server's own fields."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from polar.export.base import SessionItem
from polar.export.polar import render_session_result
from polar.records.exchange import Exchange
from polar.records.result import TaskState
from polar.records.session import Session
from polar.records.spans import TokenCounts
from polar.records.trajectory import SessionPaths, Trajectory
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
    """The fields of a TaskRequest that are needed here."""

    builder: _Builder = msgspec.field(default_factory=_Builder)
    semantics: _Semantics = msgspec.field(default_factory=_Semantics)


_decode_request = msgspec.json.Decoder(_Request).decode


class ResultForm(msgspec.Struct, frozen=True):
    """How the results of a task are rendered."""

    builder: str = TRACE_BUILDER
    mask_traces: bool = False  # of sessions without a reward


def parse_result_form(request: str) -> ResultForm:
    """`request` is a TaskRequest, as JSON."""
    parsed = _decode_request(request)
    return ResultForm(parsed.builder.strategy, parsed.semantics.mask_traces)


def get_task_status(task: TaskRow) -> TaskState:
    """The task's state under its semantics."""
    return _decode_request(task.request).semantics.all_failed if task.state == "failed" else task.state


def render_ended_result(
    task_id: str,
    sample: int,
    outcome: SessionOutcome,
    form: ResultForm,
    session: Session | None,
    exchanges: Sequence[Exchange],
    checker: SessionChecker,
) -> dict[str, Any]:
    """Renders an outcome with the recorded session; `session` is None where the work ended before a session began.
    Raises HeldBackError where the session fails the check."""
    session_with_outcome = _build_session(task_id, sample, outcome, session)
    built = build_trajectory(session_with_outcome, exchanges, form.builder, checker)
    item = SessionItem(
        session_with_outcome.summary, built.session_paths, built.trajectory, list(exchanges), calls=built.calls
    )
    return _render(item, sample, outcome, form, has_session=session is not None)


def render_failed_result(
    task_id: str, sample: int, outcome: SessionOutcome, reason: str, error: str, session: Session | None = None
) -> dict[str, Any]:
    """Renders a session whose traces can't be built or must be held back: without a reward, since that is useless
    without traces."""
    failed = msgspec.structs.replace(outcome, reward=None, reason=reason, error=error)
    session_with_outcome = _build_session(task_id, sample, failed, session)
    empty_trajectory = Trajectory(
        session_with_outcome.session_id, TRACE_BUILDER, [], [], TokenCounts(0, 0, 0), None, reason
    )
    item = SessionItem(
        session_with_outcome.summary, SessionPaths(session_with_outcome.session_id, [], None, reason), empty_trajectory
    )
    return _render(item, sample, failed, ResultForm(), has_session=session is not None)


def _build_session(task_id: str, sample: int, outcome: SessionOutcome, session: Session | None) -> Session:
    with_outcome = apply_outcome(session or Session(outcome.session_id or f"{task_id}#{sample}", b"", 0.0), outcome)
    with_outcome.metadata = {**with_outcome.metadata, "task_id": task_id}
    return with_outcome


def _render(
    item: SessionItem, sample: int, outcome: SessionOutcome, form: ResultForm, *, has_session: bool
) -> dict[str, Any]:
    result = render_session_result(
        item,
        stages=outcome.seconds,
        error=outcome.error,
        outcome=outcome.outcome,
        detail=outcome.detail or None,
        mask_traces=form.mask_traces,
    )
    if not has_session:
        result["metadata"]["timing"] = {"stages": outcome.seconds}
    result["node_id"] = outcome.node_id or result["node_id"]
    result["metadata"] |= {
        "sample": sample,
        "turns": outcome.turns,
        "sampled_tokens": outcome.tokens,
        "oldest_version": outcome.oldest_version,
        "newest_version": outcome.newest_version,
        "lag": outcome.lag,
        "stale": outcome.stale,
    }
    return result


def apply_outcome(session: Session, outcome: SessionOutcome) -> Session:
    """Replaces the session's verdict by the outcome's, which is the one that counts."""
    return msgspec.structs.replace(session, reward=outcome.reward, reason=outcome.reason, evidence=outcome.evidence)
