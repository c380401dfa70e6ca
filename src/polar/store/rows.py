"""Records as rows, and back. What one may want to select by is a column; the rest is JSON that a person can read."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from polar.dialects.base import Wire
from polar.engines.base import Ids, LogprobKind, VersionSpan
from polar.rendering.mark import ContextMark
from polar.store.arrays import bytes_to_ids, bytes_to_logprobs, ids_to_bytes, logprobs_to_bytes
from polar.store.base import Continuation, Evidence, Exchange, ExchangeStatus, Session
from polar.types import FinishReason, Reply, Sampling, TokenLogprob, Usage


class Detail(Struct, omit_defaults=True):
    params: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    versions: list[VersionSpan] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    context: ContextMark | None = None
    malformed: bool = False


class SessionRow(Struct, array_like=True):
    """The columns that every query of sessions selects, in that order."""

    session_id: str
    key_hash: bytes
    created_at: float
    run: str
    status: Literal["open", "ended"]
    ended_at: float | None
    reward: float | None
    metadata: str
    reason: str | None
    turn_rewards: str | None
    evidence: str | None = None  # not in copies of older versions


class ExchangeRow(Struct, array_like=True):
    """The columns that `next_exchanges` selects, in that order."""

    exchange_id: str
    session_id: str
    seq: int
    base: int | None
    shared_items: int
    shared_tokens: int | None
    items: bytes
    fields: bytes | None
    list_name: str
    dialect: str
    parent: str | None
    status: ExchangeStatus
    finish_reason: FinishReason | None
    started_at: float
    first_token_at: float | None
    ended_at: float
    replica: str
    continuation: Continuation
    branch_reason: str | None
    untrainable: str | None
    delivered: int
    logprob_kind: LogprobKind
    detail: str
    prompt: bytes | None
    sampled: bytes | None
    logprobs: bytes | None
    reply: str | None
    reply_logprobs: bytes | None
    routed_experts: bytes | None
    checksum: bytes | None


class FieldEntry(Struct, array_like=True):
    """A request's field in the table of fields: its raw JSON, or the digest of it."""

    is_digest: bool
    data: bytes


class Difference(Struct):
    """How an exchange is stored against its base; the columns of the same names."""

    base: int | None
    parent: str | None
    shared_items: int
    items: bytes
    fields: bytes | None
    shared_tokens: int | None
    prompt: bytes | None


_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()
_detail = msgspec.json.Decoder(Detail)
_reply = msgspec.json.Decoder(Reply)
_metadata = msgspec.json.Decoder(dict[str, Any])
_rewards = msgspec.json.Decoder(dict[str, float])
_evidence = msgspec.json.Decoder(list[Evidence])
_logprobs = msgspec.msgpack.Decoder(list[TokenLogprob])


def may_be_id(text: str) -> bool:
    """False for what no database can be asked for; such an id may come over HTTP, and belongs to nothing."""
    return text.isprintable()


def turn_rewards_text(rewards: dict[str, float]) -> str | None:
    return _json.encode(rewards).decode() if rewards else None


def encode_evidence(evidence: list[Evidence]) -> str | None:
    return _json.encode(evidence).decode() if evidence else None


def session_parameters(session: Session) -> dict[str, object]:
    return {
        "session_id": session.session_id,
        "key_hash": session.key_hash,
        "created_at": session.created_at,
        "run": session.run,
        "status": session.status,
        "ended_at": session.ended_at,
        "reward": session.reward,
        "metadata": _json.encode(session.metadata).decode(),
        "reason": session.reason,
        "turn_rewards": turn_rewards_text(session.turn_rewards),
        "evidence": encode_evidence(session.evidence),
    }


def to_session(row: Sequence[object]) -> Session:
    it = msgspec.convert(row, SessionRow)
    return Session(
        session_id=it.session_id,
        key_hash=it.key_hash,
        created_at=it.created_at,
        run=it.run,
        metadata=_metadata.decode(it.metadata),
        status=it.status,
        ended_at=it.ended_at,
        reward=it.reward,
        reason=it.reason,
        turn_rewards=_rewards.decode(it.turn_rewards) if it.turn_rewards else {},
        evidence=_evidence.decode(it.evidence) if it.evidence else [],
    )


def exchange_parameters(exchange: Exchange, difference: Difference) -> dict[str, object]:
    reply, listed = exchange.reply, None
    if reply is not None and reply.logprobs is not None:
        listed = _msgpack.encode(reply.logprobs)
        reply = msgspec.structs.replace(reply, logprobs=None)
    detail = Detail(
        exchange.params,
        exchange.hints,
        exchange.sampling,
        exchange.versions,
        exchange.usage,
        exchange.error,
        exchange.context,
        exchange.malformed,
    )
    return {
        "exchange_id": exchange.exchange_id,
        "session_id": exchange.session_id,
        "seq": exchange.seq,
        "base": difference.base,
        "shared_items": difference.shared_items,
        "shared_tokens": difference.shared_tokens,
        "items": difference.items,
        "fields": difference.fields,
        "list_name": exchange.wire.list_name,
        "dialect": exchange.dialect,
        "parent": difference.parent,
        "status": exchange.status,
        "finish_reason": exchange.finish_reason,
        "started_at": exchange.started_at,
        "first_token_at": exchange.first_token_at,
        "ended_at": exchange.ended_at,
        "replica": exchange.replica,
        "continuation": exchange.continuation,
        "branch_reason": exchange.branch_reason,
        "untrainable": exchange.untrainable,
        "delivered": exchange.delivered,
        "logprob_kind": exchange.logprob_kind,
        "detail": _json.encode(detail).decode(),
        "prompt": difference.prompt,
        "sampled": None if exchange.sampled_ids is None else ids_to_bytes(exchange.sampled_ids),
        "logprobs": None if exchange.logprobs is None else logprobs_to_bytes(exchange.logprobs),
        "reply": None if reply is None else _json.encode(reply).decode(),
        "reply_logprobs": listed,
        "routed_experts": exchange.routed_experts,
        "checksum": exchange.checksum,
    }


def usage_in(detail: str) -> Usage:
    return _detail.decode(detail).usage


def to_exchange(it: ExchangeRow, wire: Wire, prompt_ids: Ids | None) -> Exchange:
    detail = _detail.decode(it.detail)
    reply = None if it.reply is None else _reply.decode(it.reply)
    if reply is not None and it.reply_logprobs is not None:
        reply.logprobs = _logprobs.decode(it.reply_logprobs)
    return Exchange(
        exchange_id=it.exchange_id,
        session_id=it.session_id,
        seq=it.seq,
        dialect=it.dialect,
        params=detail.params,
        hints=detail.hints,
        wire=wire,
        status=it.status,
        started_at=it.started_at,
        ended_at=it.ended_at,
        first_token_at=it.first_token_at,
        reply=reply,
        error=detail.error,
        prompt_ids=prompt_ids,
        sampled_ids=None if it.sampled is None else bytes_to_ids(it.sampled),
        logprobs=None if it.logprobs is None else bytes_to_logprobs(it.logprobs),
        logprob_kind=it.logprob_kind,
        delivered=it.delivered,
        sampling=detail.sampling,
        versions=detail.versions,
        replica=it.replica,
        finish_reason=it.finish_reason,
        usage=detail.usage,
        continuation=it.continuation,
        branch_reason=it.branch_reason,
        untrainable=it.untrainable,
        routed_experts=it.routed_experts,
        parent=it.parent,
        context=detail.context,
        malformed=detail.malformed,
        checksum=it.checksum,
    )
