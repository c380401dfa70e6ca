"""Trajectories as JSON, both ways: plain dicts and lists, with the field names that trainers read.

    Trajectory -> trajectory_to_dict -> JSON -> SessionResult -> trajectory_from_result -> Trajectory
    TreeTrajectory -> tree_to_dict -> JSON -> tree_from_dict -> TreeTrajectory

Everything an array holds is written as it is: a float32 becomes the double of the same value, so that reading it back
gives the same bits. A trace's messages and tools are those of the harness's requests; whoever has them passes them in.
"""

from typing import Any, get_args

import msgspec
import numpy as np

from polar.records import experts
from polar.records.result import SessionResult, TraceResult
from polar.records.spans import ExcludedSpan, TokenCounts
from polar.records.trajectory import ROOT, Term, Trace, Trajectory, TreeSession, TreeTrajectory


class TraceMessages(msgspec.Struct):
    """What a trace says, as messages: an empty list on the wire where it isn't known."""

    prompt: list[Any] | None = None
    response: list[Any] | None = None
    tools: list[Any] | None = None


NO_TRACE_MESSAGES = TraceMessages()


def trace_to_dict(trace: Trace, messages: TraceMessages = NO_TRACE_MESSAGES) -> dict[str, Any]:
    """`routed_experts` is there only where an engine told them."""
    routed_experts = {} if trace.experts is None else {"routed_experts": experts.to_wire(trace.experts)}
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": trace.response_ids.tolist(),
        "loss_mask": trace.loss_mask.tolist(),
        "response_logprobs": None if trace.logprobs is None else trace.logprobs.tolist(),
        "prompt_messages": messages.prompt or [],
        "response_messages": messages.response or [],
        "tools": messages.tools,
        "finish_reason": trace.finish_reason,
        "reward": trace.reward,
        "reason": trace.reason,
        "weight": trace.weight,
        "policy_versions": trace.policy_versions.tolist(),
        "exchange_ids": trace.exchange_ids,
        "role": trace.role,
        "agent_id": trace.agent_id,
        "branch_reason": trace.branch_reason,
        "temperature": trace.temperature,
        **routed_experts,
        "metadata": {
            "session_id": trace.session_id,
            "spans": msgspec.to_builtins(trace.spans),
            "turn_rewards": trace.turn_rewards,
            "scales": trace.scales,
        },
    }


def trajectory_to_dict(
    trajectory: Trajectory,
    messages: list[TraceMessages] | None = None,
    *,
    status: str = "COMPLETED",
    error: str | None = None,
) -> dict[str, Any]:
    """`messages` has one entry for each trace."""
    trace_messages = messages if messages is not None else [NO_TRACE_MESSAGES] * len(trajectory.traces)
    return {
        "status": status,
        "traces": [trace_to_dict(one, words) for one, words in zip(trajectory.traces, trace_messages, strict=True)],
        "metadata": {
            "session_id": trajectory.session_id,
            "builder": trajectory.builder,
            "excluded": msgspec.to_builtins(trajectory.excluded),
            "tokens": _counts_to_dict(trajectory.tokens),
            "reward": trajectory.reward,
            "reason": trajectory.reason,
        },
        "error": error,
    }


def tree_to_dict(tree: TreeTrajectory) -> dict[str, Any]:
    """A root's `parent` is null."""
    ids, starts = tree.ids.tolist(), tree.starts.tolist()
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    return {
        "nodes": [
            {
                "node": number,
                "parent": None if parent == ROOT else parent,
                "depth": depth,
                "ids": ids[starts[number] : starts[number + 1]],
            }
            for number, (parent, depth) in enumerate(zip(parents, depths, strict=True))
        ],
        "terms": [_term_to_dict(term) for term in tree.terms],
        "sessions": msgspec.to_builtins(tree.sessions),
        "excluded": msgspec.to_builtins(tree.excluded),
        "tokens": _counts_to_dict(tree.tokens),
    }


def _term_to_dict(term: Term) -> dict[str, Any]:
    return {
        "session_id": term.session_id,
        "exchange_id": term.exchange_id,
        "node": term.node,
        "start": term.start,
        "stop": term.stop,
        "offset": term.offset,
        "logprobs": None if term.logprobs is None else term.logprobs.tolist(),
        "policy_versions": term.policy_versions.tolist(),
        "weight": term.weight,
        "scale": term.scale,
    }


def _counts_to_dict(counts: TokenCounts) -> dict[str, int]:
    return {"computed": counts.computed, "unique": counts.unique, "trainable": counts.trainable}


def trajectory_from_result(result: SessionResult) -> Trajectory:
    """Raises msgspec.ValidationError or ValueError where the result's metadata or arrays are malformed."""
    received = result.trajectory
    return Trajectory(
        session_id=result.session_id,
        builder=received.builder,
        traces=[_trace_from_result(result.session_id, trace) for trace in received.traces],
        excluded=received.excluded,
        tokens=received.tokens,
        reward=result.reward,
        reason=result.reason,
    )


_TRAINING_FIELDS = frozenset(("weight", "policy_versions", "exchange_ids"))
"""Fields without which a trace can't be trained on. They have defaults only for programs that don't train."""


def _trace_from_result(session_id: str, trace: TraceResult) -> Trace:
    if missing := _TRAINING_FIELDS - trace.model_fields_set:
        raise ValueError(f"A trace of session {session_id} has no {', '.join(sorted(missing))}.")
    routed, tokens = trace.routed_experts, len(trace.prompt_ids) + len(trace.response_ids)
    return Trace(
        session_id=session_id,
        prompt_ids=np.array(trace.prompt_ids, np.int32),
        response_ids=np.array(trace.response_ids, np.int32),
        loss_mask=np.array(trace.loss_mask, np.uint8),
        logprobs=None if trace.response_logprobs is None else np.array(trace.response_logprobs, np.float32),
        policy_versions=np.array(trace.policy_versions, np.int32),
        weight=trace.weight,
        exchange_ids=trace.exchange_ids,
        spans=trace.spans,
        role=trace.role,
        agent_id=trace.agent_id,
        branch_reason=trace.branch_reason,
        temperature=trace.temperature,
        finish_reason=trace.finish_reason,
        reward=trace.reward,
        reason=trace.reason,
        turn_rewards=trace.turn_rewards,
        scales=trace.scales,
        experts=None if routed is None else experts.from_wire(routed, tokens),
    )


class _NodeDocument(msgspec.Struct):
    parent: int | None
    depth: int
    ids: list[int]


class _TreeDocument(msgspec.Struct):
    nodes: list[_NodeDocument]
    terms: list[Term]
    sessions: list[TreeSession]
    tokens: TokenCounts
    excluded: list[ExcludedSpan] = []


def tree_from_dict(document: dict[str, Any]) -> TreeTrajectory:
    """Raises msgspec.ValidationError where the document is malformed."""
    read = msgspec.convert(document, _TreeDocument, dec_hook=_decode_array)
    nodes = read.nodes
    return TreeTrajectory(
        ids=np.array([token for node in nodes for token in node.ids], np.int32),
        starts=np.cumsum([0, *(len(node.ids) for node in nodes)], dtype=np.int64),
        parents=np.array([ROOT if node.parent is None else node.parent for node in nodes], np.int32),
        depths=np.array([node.depth for node in nodes], np.int64),
        terms=read.terms,
        sessions=read.sessions,
        excluded=read.excluded,
        tokens=read.tokens,
    )


def _decode_array(kind: Any, values: Any) -> Any:
    """`kind` is an NDArray of some number type."""
    (number_type,) = get_args(get_args(kind)[1])
    return np.array(values, number_type)
