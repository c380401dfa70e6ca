"""Whether a copy of a session can be read again. It may come from anybody with a node's token, and one session that
can't be read must not come to stand among others."""

import math
from collections.abc import Collection

import msgspec
from msgspec import Raw, Struct

from polar.records.exchange import RawRequest
from polar.store.arrays import ID_SIZE
from polar.store.base_link import split_bytes
from polar.store.lineage import DIGEST_SIZE
from polar.store.rows import ExchangeRow, FieldEntry, SessionRow, is_valid_id, to_exchange, to_session

_BIGINT_LIMIT = 2**63
_field_table_decoder = msgspec.msgpack.Decoder(dict[str, FieldEntry])


class _ExchangeLength(Struct):
    """Of an exchange, whole."""

    items: int = 0
    tokens: int = 0


def check_session(row: SessionRow) -> None:
    """Raises ValueError, here and below."""
    session = to_session(msgspec.structs.astuple(row))
    if not is_valid_id(session.session_id):
        raise ValueError("its session has no id that can be")
    if not session.run.isprintable() or "\0" in (session.reason or ""):
        raise ValueError("its session has a name that can't be kept")
    numbers = (session.created_at, session.ended_at, session.reward, *session.turn_rewards.values())
    if not all(math.isfinite(number) for number in numbers if number is not None):
        raise ValueError("its session has a number that is none")


def check_exchanges(session_id: str, rows: Collection[ExchangeRow], digests: Collection[bytes]) -> None:
    """`digests` are those of the pieces that came with them."""
    lengths: dict[int, _ExchangeLength] = {}
    for row in rows:
        if row.session_id != session_id:
            raise ValueError("an exchange is another session's")
        if row.seq in lengths or (row.base is not None and row.base not in lengths):
            raise ValueError("an exchange is there twice, or without its base")
        _check_columns(row)
        if not set(digests) >= set(list_piece_digests(row)):
            raise ValueError("a piece is missing")
        lengths[row.seq] = _measure(row, _ExchangeLength() if row.base is None else lengths[row.base])


def check_piece(piece: bytes) -> None:
    """It stands in what is told of the session as it is."""
    try:
        msgspec.json.decode(piece)
    except RecursionError as error:
        raise ValueError("a piece is nested too deeply") from error


def list_piece_digests(row: ExchangeRow) -> list[bytes]:
    """Digests of the pieces that it brought."""
    return [
        *split_bytes(row.items, DIGEST_SIZE),
        *(entry.data for entry in _decode_field_table(row).values() if entry.is_digest),
    ]


def _decode_field_table(row: ExchangeRow) -> dict[str, FieldEntry]:
    return {} if row.fields is None else _field_table_decoder.decode(row.fields)


def _measure(row: ExchangeRow, base: _ExchangeLength) -> _ExchangeLength:
    if not 0 <= row.shared_items <= base.items:
        raise ValueError("an exchange shares more with its base than that has")
    items = row.shared_items + len(row.items) // DIGEST_SIZE
    if row.shared_tokens is None or row.prompt is None:
        return _ExchangeLength(items, base.tokens)
    if not 0 <= row.shared_tokens <= base.tokens:
        raise ValueError("an exchange shares more with its base than that has")
    return _ExchangeLength(items, row.shared_tokens + (len(row.prompt) + len(row.sampled or b"")) // ID_SIZE)


def _check_columns(row: ExchangeRow) -> None:
    if not (0 <= row.seq < _BIGINT_LIMIT and 0 <= row.delivered < _BIGINT_LIMIT):
        raise ValueError("an exchange has a number that can't be kept")
    if not all(math.isfinite(time) for time in (row.started_at, row.ended_at, row.first_token_at) if time is not None):
        raise ValueError("an exchange has a time that is none")
    names = (row.exchange_id, row.list_name, row.dialect, row.replica, row.parent or "")
    if not all(map(is_valid_id, names)) or "\0" in (row.branch_reason or "") + (row.untrainable or ""):
        raise ValueError("an exchange has a name that can't be kept")
    if len(row.items) % DIGEST_SIZE or (row.fields is None and row.base is None):
        raise ValueError("an exchange has no request")
    if any(len(ids or b"") % ID_SIZE for ids in (row.prompt, row.sampled, row.logprobs)):
        raise ValueError("an exchange has half a token")
    for entry in _decode_field_table(row).values():
        if not entry.is_digest:
            check_piece(entry.data)
    to_exchange(row, RawRequest({}, row.list_name, list[Raw]()), None)
