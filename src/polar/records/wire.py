"""Trajectories as JSON: plain dicts and lists, with the field names that trainers read.

Everything an array holds is written as it is: a float32 becomes the double of the same value, so that reading it back
gives the same bits. A trace's messages and tools are those of the harness's requests; whoever has them passes them in.
"""

from typing import Any

import msgspec

from polar.records import experts
from polar.records.trajectory import ROOT, Term, TokenCounts, Trace, Trajectory, TreeTrajectory


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
