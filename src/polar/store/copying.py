"""A session as bytes, for another store: its rows as they are stored, by difference, and the pieces that they name.

So a copy is as large as what the session takes in the store, however long its prompts are. A key travels as its hash.

    [version, checksum of the body, body]    MessagePack, and so is the body: [session, exchanges, pieces]

A copy is taken in whole or not at all. What both stores have must be the same; what is new is added. So a copy may come
twice, and one that is made later brings an earlier one up to date.
"""

from hashlib import sha256

import msgspec
from msgspec import Struct

from polar.errors import StoreError
from polar.store.copy_check import check_exchanges, check_piece, check_session, named
from polar.store.difference import digest_of
from polar.store.links import damaged
from polar.store.rows import ExchangeRow, SessionRow, may_be_id
from polar.store.sql import Connection, Queries, WritingConnection

VERSION = 2
"""Of the format, which the columns of the rows are part of."""

_READABLE = (1, 2)
"""Version 1 has no evidence."""


class CopyRefused(StoreError):
    """A copy can't be taken in, now or later: it is at fault, not the store."""


class Copy(Struct):
    session: SessionRow
    exchanges: list[ExchangeRow]  # each after its base
    pieces: dict[bytes, bytes]  # by digest


class _Body(Struct, array_like=True):
    session: SessionRow
    exchanges: list[ExchangeRow]
    pieces: list[bytes]


class _Envelope(Struct, array_like=True):
    version: int
    checksum: bytes
    body: bytes


_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(_Envelope)
_body = msgspec.msgpack.Decoder(_Body)


def pack(copy: Copy) -> bytes:
    body = _encode(_Body(copy.session, copy.exchanges, list(copy.pieces.values())))
    return _encode(_Envelope(VERSION, sha256(body).digest(), body))


def unpack(data: bytes) -> Copy:
    """Whole and consistent, or CopyRefused."""
    try:
        envelope = _envelope.decode(data)
    except msgspec.DecodeError as error:
        raise _broken(f"it is no copy: {error}") from error
    if envelope.version not in _READABLE:
        raise CopyRefused(
            f"A copy of a session has version {envelope.version}, and this Polar knows version {VERSION}; "
            f"use one Polar on both sides."
        )
    if sha256(envelope.body).digest() != envelope.checksum:
        raise _broken("its checksum is another")
    try:
        body = _body.decode(envelope.body)
        copy = Copy(body.session, body.exchanges, {digest_of(piece): piece for piece in body.pieces})
        check_session(copy.session)
        check_exchanges(copy.session.session_id, copy.exchanges, copy.pieces.keys())
        for piece in body.pieces:
            check_piece(piece)
    except ValueError as error:  # msgspec's among them
        raise _broken(str(error)) from error
    return copy


def load(db: Connection, queries: Queries, session_id: str) -> Copy:
    found = db.execute(queries.session, {"session_id": session_id}).fetchone() if may_be_id(session_id) else None
    if found is None:
        raise StoreError(f"There is no session {session_id} to copy.")
    exchanges = _bases_first(_exchanges(db, queries, session_id))
    pieces: dict[bytes, bytes] = {}
    for digest in sorted({digest for row in exchanges for digest in named(row)}):
        piece = db.execute(queries.blob, {"digest": digest}).fetchone()
        if piece is None:
            raise damaged(f"piece {digest.hex()} of session {session_id} is missing")
        pieces[digest] = piece[0]
    return Copy(msgspec.convert(found, SessionRow), exchanges, pieces)


def insert(db: WritingConnection, queries: Queries, copy: Copy) -> bool:
    """The rows that are not there yet; the pieces are the caller's. False where all of them were."""
    session_id = copy.session.session_id
    found = db.execute(queries.session, {"session_id": session_id}).fetchone()
    if found is None:
        if db.execute(queries.session_by_key, {"key_hash": copy.session.key_hash}).fetchone() is not None:
            raise CopyRefused(f"Session {session_id} has the key of another session in this store.")
        db.execute(queries.insert_session, msgspec.structs.asdict(copy.session))
    else:
        _add_verdict(db, queries, msgspec.convert(found, SessionRow), copy.session)
    there = {row.seq: row for row in _exchanges(db, queries, session_id)}
    new = [row for row in copy.exchanges if row.seq not in there]
    for row in copy.exchanges:
        if row.seq in there:
            _amend(db, queries, there[row.seq], row)
    for row in new:
        if db.execute(queries.stored_exchange, {"exchange_id": row.exchange_id}).fetchone() is not None:
            raise CopyRefused(f"Session {session_id} has an exchange of another session in this store.")
        db.execute(queries.insert_exchange, msgspec.structs.asdict(row))
    return bool(new)


def _add_verdict(db: WritingConnection, queries: Queries, there: SessionRow, row: SessionRow) -> None:
    """As if the session ended here: the first end stays."""
    fixed = ("key_hash", "created_at", "run", "metadata")
    once = ("reward", "turn_rewards", "evidence")
    if any(getattr(there, name) != getattr(row, name) for name in fixed) or any(
        None not in (told := (getattr(there, name), getattr(row, name))) and told[0] != told[1] for name in once
    ):
        raise _other(row.session_id)
    if row.status == "ended":
        names = ("session_id", "ended_at", "reward", "reason", "turn_rewards", "evidence")
        db.execute(queries.end_session, {name: getattr(row, name) for name in names}).fetchall()


def _amend(db: WritingConnection, queries: Queries, there: ExchangeRow, row: ExchangeRow) -> None:
    """What was delivered may have been corrected since."""
    if there == row:
        return
    amended = {"status": row.status, "delivered": row.delivered}
    if msgspec.structs.replace(there, **amended) != row:
        raise _other(row.session_id)
    db.execute(queries.amend_exchange, {"exchange_id": row.exchange_id, **amended}).fetchall()


def _exchanges(db: Connection, queries: Queries, session_id: str) -> list[ExchangeRow]:
    """All in one statement, so that each base is among them though others may be written meanwhile."""
    rows = db.execute(queries.session_exchanges, {"session_id": session_id}).fetchall()
    return [msgspec.convert(row, ExchangeRow) for row in rows]


def _bases_first(rows: list[ExchangeRow]) -> list[ExchangeRow]:
    """Calls end in any order, so a base may have a higher `seq`."""
    by_seq = {row.seq: row for row in rows}
    ordered: dict[int, ExchangeRow] = {}
    for row in rows:
        chain: dict[int, ExchangeRow] = {}
        link: ExchangeRow | None = row
        while link is not None and link.seq not in ordered:
            if link.seq in chain:
                raise damaged(f"exchange {link.seq} of session {link.session_id} is stored against itself")
            chain[link.seq] = link
            link = None if link.base is None else by_seq.get(link.base)
        ordered.update(reversed(chain.items()))
    return list(ordered.values())


def _broken(what: str) -> StoreError:
    return CopyRefused(f"A copy of a session is damaged ({what}); send it again.")


def _other(session_id: str) -> StoreError:
    return CopyRefused(
        f"Session {session_id} is in this store already, with other content; "
        f"it stays as it is: look whether two stores were given the same session."
    )
