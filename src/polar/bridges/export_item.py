"""Sessions as they come over the wire, as what exporters take: so a trainer gets the same from a live run as from an
export."""

from typing import Any, cast

import numpy as np

from polar.export.base import SessionItem
from polar.records import experts
from polar.records.result import SessionResult, TraceResult
from polar.records.session import Evidence, EvidenceKind, Session
from polar.records.trajectory import ExcludedSpan, SessionPaths, Span, TokenCounts, Trace, Trajectory


def to_export_item(result: SessionResult) -> SessionItem:
    """A session that has traces. Its calls' messages are not with it, but in the result."""
    told = result.trajectory.metadata
    created = result.metadata.get("timing", {}).get("created_at", 0.0)
    session = Session(
        result.session_id,
        key_hash=b"",
        created_at=float(created or 0.0),
        metadata={**result.metadata, "task_id": result.task_id},
        status="ended",
        reward=result.reward,
        reason=result.reason,
        evidence=[
            Evidence(cast(EvidenceKind, one.kind), one.subject, one.proven, one.detail, one.count)
            for one in result.evidence
        ],
    )
    trajectory = Trajectory(
        session_id=result.session_id,
        builder=str(told.get("builder", "")),
        traces=[_to_trace(result, one) for one in result.trajectory.traces],
        excluded=[ExcludedSpan(**one) for one in told.get("excluded", [])],
        tokens=TokenCounts(**told.get("tokens", {"computed": 0, "unique": 0, "trainable": 0})),
        reward=result.reward,
        reason=result.reason,
    )
    return SessionItem(session, SessionPaths(result.session_id, [], result.reward, result.reason), trajectory)


def _to_trace(result: SessionResult, found: TraceResult) -> Trace:
    more: dict[str, Any] = found.model_extra or {}
    recorded = found.response_logprobs
    routed = more.get("routed_experts")
    tokens = len(found.prompt_ids) + len(found.response_ids)
    return Trace(
        session_id=result.session_id,
        prompt_ids=np.array(found.prompt_ids, np.int32),
        response_ids=np.array(found.response_ids, np.int32),
        loss_mask=np.array(found.loss_mask, np.uint8),
        logprobs=None if recorded is None else np.array(recorded, np.float32),
        policy_versions=np.array(more["policy_versions"], np.int32),
        weight=more["weight"],
        exchange_ids=more["exchange_ids"],
        spans=[Span(**span) for span in found.metadata["spans"]],
        role=more["role"],
        agent_id=more["agent_id"],
        branch_reason=more["branch_reason"],
        temperature=more["temperature"],
        finish_reason=found.finish_reason,
        reward=found.reward,
        reason=more.get("reason"),
        turn_rewards=found.metadata.get("turn_rewards", {}),
        scales=found.metadata.get("scales", {}),
        experts=None if routed is None else experts.from_wire(routed, tokens),
    )
