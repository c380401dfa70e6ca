"""Conversion between records and rows. Fields that queries may select by are columns; the others are readable JSON."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from polar.records.exchange import (
    ContextMark,
    Continuation,
    Exchange,
    ExchangeStatus,
    LogprobKind,
    RawRequest,
    TokenIds,
    VersionSpan,
)
from polar.records.session import Evidence, Session
from polar.store.arrays import bytes_to_ids, bytes_to_logprobs, ids_to_bytes, logprobs_to_bytes
from polar.types import FinishReason, Reply, SamplingParams, TokenLogprob, Usage


class ExchangeDetail(Struct, omit_defaults=True):
    params: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
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


class ExchangeDifference(Struct):
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
_detail = msgspec.json.Decoder(ExchangeDetail)
_reply = msgspec.json.Decoder(Reply)
_metadata = msgspec.json.Decoder(dict[str, Any])
_rewards = msgspec.json.Decoder(dict[str, float])
_evidence = msgspec.json.Decoder(list[Evidence])
_logprobs = msgspec.msgpack.Decoder(list[TokenLogprob])


def is_valid_id(text: str) -> bool:
    """Whether a database can be asked for this id. Others may come over HTTP, and belong to no record."""
    return text.isprintable()


def encode_turn_rewards(rewards: dict[str, float]) -> str | None:
    return _json.encode(rewards).decode() if rewards else None


def encode_evidence(evidence: list[Evidence]) -> str | None:
    return _json.encode(evidence).decode() if evidence else None


def build_session_parameters(session: Session) -> dict[str, object]:
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
        "turn_rewards": encode_turn_rewards(session.turn_rewards),
        "evidence": encode_evidence(session.evidence),
    }


def to_session(row: Sequence[object]) -> Session:
    session_row = msgspec.convert(row, SessionRow)
    return Session(
        session_id=session_row.session_id,
        key_hash=session_row.key_hash,
        created_at=session_row.created_at,
        run=session_row.run,
        metadata=_metadata.decode(session_row.metadata),
        status=session_row.status,
        ended_at=session_row.ended_at,
        reward=session_row.reward,
        reason=session_row.reason,
        turn_rewards=_rewards.decode(session_row.turn_rewards) if session_row.turn_rewards else {},
        evidence=_evidence.decode(session_row.evidence) if session_row.evidence else [],
    )


def build_exchange_parameters(exchange: Exchange, difference: ExchangeDifference) -> dict[str, object]:
    reply, reply_logprobs = exchange.reply, None
    if reply is not None and reply.logprobs is not None:
        reply_logprobs = _msgpack.encode(reply.logprobs)
        reply = msgspec.structs.replace(reply, logprobs=None)
    detail = ExchangeDetail(
        exchange.params,
        exchange.hints,
        exchange.sampling,
        exchange.versions,
        exchange.usage,
        exchange.error,
        exchange.context_mark,
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
        "list_name": exchange.raw_request.list_name,
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
        "reply_logprobs": reply_logprobs,
        "routed_experts": exchange.routed_experts,
        "checksum": exchange.checksum,
    }


def decode_usage(detail: str) -> Usage:
    return _detail.decode(detail).usage


def to_exchange(row: ExchangeRow, raw_request: RawRequest, prompt_ids: TokenIds | None) -> Exchange:
    detail = _detail.decode(row.detail)
    reply = None if row.reply is None else _reply.decode(row.reply)
    if reply is not None and row.reply_logprobs is not None:
        reply.logprobs = _logprobs.decode(row.reply_logprobs)
    return Exchange(
        exchange_id=row.exchange_id,
        session_id=row.session_id,
        seq=row.seq,
        dialect=row.dialect,
        params=detail.params,
        hints=detail.hints,
        raw_request=raw_request,
        status=row.status,
        started_at=row.started_at,
        ended_at=row.ended_at,
        first_token_at=row.first_token_at,
        reply=reply,
        error=detail.error,
        prompt_ids=prompt_ids,
        sampled_ids=None if row.sampled is None else bytes_to_ids(row.sampled),
        logprobs=None if row.logprobs is None else bytes_to_logprobs(row.logprobs),
        logprob_kind=row.logprob_kind,
        delivered=row.delivered,
        sampling=detail.sampling,
        versions=detail.versions,
        replica=row.replica,
        finish_reason=row.finish_reason,
        usage=detail.usage,
        continuation=row.continuation,
        branch_reason=row.branch_reason,
        untrainable=row.untrainable,
        routed_experts=row.routed_experts,
        parent=row.parent,
        context_mark=detail.context,
        malformed=detail.malformed,
        checksum=row.checksum,
    )
