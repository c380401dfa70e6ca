"""Sessions and exchanges as the control plane shows them."""

from typing import Any

import msgspec
from msgspec import Raw

from polar.errors import ApiError
from polar.plugins import load
from polar.records.exchange import Exchange
from polar.records.session import Session
from polar.trajectory.roles import CallLabel
from polar.types import Reply


def session_to_dict(record: Session) -> dict[str, Any]:
    """Converts a session, without its key's hash."""
    return {
        "session_id": record.session_id,
        "run": record.run,
        "status": record.status,
        "metadata": record.metadata,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
        "reward": record.reward,
        "reason": record.reason,
        "turn_rewards": record.turn_rewards,
        "evidence": record.evidence,
        "suspicious": record.suspicious,
    }


def exchange_to_dict(record: Exchange, label: CallLabel) -> dict[str, Any]:
    sampled = record.sampled_ids
    return {
        "exchange_id": record.exchange_id,
        "session_id": record.session_id,
        "seq": record.seq,
        "parent": record.parent,
        "agent_id": label.agent_id,
        "dialect": record.dialect,
        "role": label.role,
        "status": record.status,
        "error": record.error,
        "request": record.build_request_body(),
        "params": record.params,
        "hints": record.hints,
        "reply": _encode_reply(record),
        "prompt_ids": _to_list(record.prompt_ids),
        "sampled_ids": _to_list(sampled),
        "logprobs": _to_list(record.logprobs),
        "logprob_kind": record.logprob_kind,
        "delivered": record.delivered,
        "sampling": record.sampling,
        "policy_versions": _expand_versions(record),
        "mixed_kv": len({span.version for span in record.versions}) > 1,  # context computed under older weights
        "routed_experts": record.routed_experts,
        "finish_reason": record.finish_reason,
        "continuation": record.continuation,
        "branch_reason": record.branch_reason,
        "untrainable": record.untrainable,
        "malformed": record.malformed,
        "usage": record.usage,
        "replica": record.replica,
        "started_at": record.started_at,
        "first_token_at": record.first_token_at,
        "ended_at": record.ended_at,
    }


def _to_list(values: Any) -> list[Any] | None:
    """Converts an array. NaN and infinite log-probabilities become null in JSON."""
    return None if values is None else values.tolist()


def _expand_versions(record: Exchange) -> list[int] | None:
    if record.sampled_ids is None or not record.versions:
        return None
    return [span.version for span in record.versions for _ in range(span.stop - span.start)]


def _encode_reply(record: Exchange) -> Raw | Reply | None:
    """Encodes the reply as the harness would get it without streaming, or in canonical form if the dialect can't."""
    if record.reply is None:
        return None
    dialect = load("dialects", record.dialect)()
    try:
        request = dialect.decode_request(record.raw_request, dict(record.params))
        return Raw(dialect.encode_reply(request, record.reply))
    except ApiError:
        return record.reply


def encode_json(value: Any) -> bytes:
    return msgspec.json.encode(value)
