"""Copies of sessions for other stores: rows as they are stored, by difference, and the pieces that they name.

So a copy is as large as the session is in the store, however long its prompts are. It has the hash of the key only.

    [version, checksum of the body, body]    MessagePack, and so is the body: [session, exchanges, pieces]

A copy is imported completely or not at all. Rows that both stores have must be the same; new ones are added. So a copy
may be imported twice, and a later copy updates an earlier one.
"""

import math
from collections.abc import Collection
from hashlib import sha256

import msgspec
from msgspec import Raw, Struct

from polar.errors import StoreError
from polar.records.exchange import RawRequest
from polar.store.arrays import ID_SIZE
from polar.store.base_link import make_damaged_store_error, split_bytes
from polar.store.lineage import DIGEST_SIZE, compute_digest
from polar.store.rows import ExchangeRow, FieldEntry, SessionRow, is_valid_id, to_exchange, to_session
from polar.store.sql import Connection, Queries, WritingConnection

FORMAT_VERSION = 2
"""Version of the format, which includes the columns of the rows."""

_READABLE_VERSIONS = (1, 2)
"""Version 1 has no evidence."""


class CopyRefusedError(StoreError):
    """A copy can't be imported, now or later: the copy is at fault, not the store."""


class SessionCopy(Struct):
    session: SessionRow
    exchanges: list[ExchangeRow]  # each after its base
    pieces: dict[bytes, bytes]  # by digest


class _Body(Struct, array_like=True):
    session: SessionRow
    exchanges: list[ExchangeRow]
    pieces: list[bytes]


class _CopyEnvelope(Struct, array_like=True):
    version: int
    checksum: bytes
    body: bytes


_encode = msgspec.msgpack.Encoder().encode
_envelope_decoder = msgspec.msgpack.Decoder(_CopyEnvelope)
_body_decoder = msgspec.msgpack.Decoder(_Body)


def pack(copy: SessionCopy) -> bytes:
    body = _encode(_Body(copy.session, copy.exchanges, list(copy.pieces.values())))
    return _encode(_CopyEnvelope(FORMAT_VERSION, sha256(body).digest(), body))


def unpack(data: bytes) -> SessionCopy:
    """Decodes and checks a copy. Raises CopyRefusedError if it is damaged or inconsistent."""
    try:
        envelope = _envelope_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise _make_damaged_copy_error(f"it is no copy: {error}") from error
    if envelope.version not in _READABLE_VERSIONS:
        raise CopyRefusedError(
            f"A copy of a session has version {envelope.version}, and this Polar knows version {FORMAT_VERSION}; "
            f"use one Polar on both sides."
        )
    if sha256(envelope.body).digest() != envelope.checksum:
        raise _make_damaged_copy_error("its checksum is another")
    try:
        body = _body_decoder.decode(envelope.body)
        copy = SessionCopy(body.session, body.exchanges, {compute_digest(piece): piece for piece in body.pieces})
        check_session(copy.session)
        check_exchanges(copy.session.session_id, copy.exchanges, copy.pieces.keys())
        for piece in body.pieces:
            check_piece(piece)
    except ValueError as error:  # msgspec's among them
        raise _make_damaged_copy_error(str(error)) from error
    return copy


def load_copy(db: Connection, queries: Queries, session_id: str) -> SessionCopy:
    row = db.execute(queries.session, {"session_id": session_id}).fetchone() if is_valid_id(session_id) else None
    if row is None:
        raise StoreError(f"There is no session {session_id} to copy.")
    exchanges = _sort_bases_first(_select_exchanges(db, queries, session_id))
    pieces: dict[bytes, bytes] = {}
    for digest in sorted({digest for exchange in exchanges for digest in list_piece_digests(exchange)}):
        piece = db.execute(queries.blob, {"digest": digest}).fetchone()
        if piece is None:
            raise make_damaged_store_error(f"piece {digest.hex()} of session {session_id} is missing")
        pieces[digest] = piece[0]
    return SessionCopy(msgspec.convert(row, SessionRow), exchanges, pieces)


def insert_copy(db: WritingConnection, queries: Queries, copy: SessionCopy) -> bool:
    """Inserts the rows that are not stored yet; the caller inserts the pieces. Returns False if none was new."""
    session_id = copy.session.session_id
    stored_session = db.execute(queries.session, {"session_id": session_id}).fetchone()
    if stored_session is None:
        if db.execute(queries.session_by_key, {"key_hash": copy.session.key_hash}).fetchone() is not None:
            raise CopyRefusedError(f"Session {session_id} has the key of another session in this store.")
        db.execute(queries.insert_session, msgspec.structs.asdict(copy.session))
    else:
        _add_verdict(db, queries, msgspec.convert(stored_session, SessionRow), copy.session)
    stored = {row.seq: row for row in _select_exchanges(db, queries, session_id)}
    new_rows = [row for row in copy.exchanges if row.seq not in stored]
    for row in copy.exchanges:
        if row.seq in stored:
            _amend_exchange(db, queries, stored[row.seq], row)
    for row in new_rows:
        if db.execute(queries.stored_exchange, {"exchange_id": row.exchange_id}).fetchone() is not None:
            raise CopyRefusedError(f"Session {session_id} has an exchange of another session in this store.")
        db.execute(queries.insert_exchange, msgspec.structs.asdict(row))
    return bool(new_rows)


def _add_verdict(db: WritingConnection, queries: Queries, stored: SessionRow, row: SessionRow) -> None:
    """Adds the copy's verdict as `end_session` does: the first end stays."""
    fixed = ("key_hash", "created_at", "run", "metadata")
    once = ("reward", "turn_rewards", "evidence")
    if any(getattr(stored, name) != getattr(row, name) for name in fixed) or any(
        None not in (values := (getattr(stored, name), getattr(row, name))) and values[0] != values[1] for name in once
    ):
        raise _make_conflicting_copy_error(row.session_id)
    if row.status == "ended":
        names = ("session_id", "ended_at", "reward", "reason", "turn_rewards", "evidence")
        db.execute(queries.end_session, {name: getattr(row, name) for name in names}).fetchall()


def _amend_exchange(db: WritingConnection, queries: Queries, stored: ExchangeRow, row: ExchangeRow) -> None:
    """Updates what was delivered, which may have been corrected since the stored row was copied."""
    if stored == row:
        return
    amended = {"status": row.status, "delivered": row.delivered}
    if msgspec.structs.replace(stored, **amended) != row:
        raise _make_conflicting_copy_error(row.session_id)
    db.execute(queries.amend_exchange, {"exchange_id": row.exchange_id, **amended}).fetchall()


def _select_exchanges(db: Connection, queries: Queries, session_id: str) -> list[ExchangeRow]:
    """Selects all exchanges in one statement, so that each base is among them even if others are written meanwhile."""
    rows = db.execute(queries.session_exchanges, {"session_id": session_id}).fetchall()
    return [msgspec.convert(row, ExchangeRow) for row in rows]


def _sort_bases_first(rows: list[ExchangeRow]) -> list[ExchangeRow]:
    """Sorts rows so that each follows its base. Calls end in any order, so a base may have a higher `seq`."""
    by_seq = {row.seq: row for row in rows}
    ordered: dict[int, ExchangeRow] = {}
    for row in rows:
        chain: dict[int, ExchangeRow] = {}
        link: ExchangeRow | None = row
        while link is not None and link.seq not in ordered:
            if link.seq in chain:
                raise make_damaged_store_error(
                    f"exchange {link.seq} of session {link.session_id} is stored against itself"
                )
            chain[link.seq] = link
            link = None if link.base is None else by_seq.get(link.base)
        ordered.update(reversed(chain.items()))
    return list(ordered.values())


def _make_damaged_copy_error(damage: str) -> StoreError:
    return CopyRefusedError(f"A copy of a session is damaged ({damage}); send it again.")


def _make_conflicting_copy_error(session_id: str) -> StoreError:
    return CopyRefusedError(
        f"Session {session_id} is in this store already, with other content; "
        f"it stays as it is: look whether two stores were given the same session."
    )


# Checks that a copy can be read again. It may come from anybody with a node's token, and a session that can't be read
# must not get into the store.

_BIGINT_LIMIT = 2**63
_field_table_decoder = msgspec.msgpack.Decoder(dict[str, FieldEntry])


class _ExchangeLength(Struct):
    """How long an exchange's request and context are."""

    items: int = 0
    tokens: int = 0


def check_session(row: SessionRow) -> None:
    """Raises ValueError if the session can't be stored. So do the checks below."""
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
    """Raises ValueError if a piece is no JSON, since documents about the session contain it unchanged."""
    try:
        msgspec.json.decode(piece)
    except RecursionError as error:
        raise ValueError("a piece is nested too deeply") from error


def list_piece_digests(row: ExchangeRow) -> list[bytes]:
    """Lists the digests of the pieces that a row names."""
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
