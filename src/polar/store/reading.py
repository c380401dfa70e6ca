"""Reading: rows to records, whole again, on one connection of any driver.

A session is read a few exchanges at a time, with queries of their own, so that a slow reader holds no transaction
open and memory stays the same however long the session is. What the next exchange probably shares is kept at hand.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Raw

from polar.dialects.base import Wire
from polar.engines.base import Ids
from polar.errors import StoreError
from polar.store import copying
from polar.store.arrays import bytes_to_ids
from polar.store.base import Exchange, Recorded, Session
from polar.store.difference import DIGEST_SIZE
from polar.store.links import ALL, Damaged, Link, context_link, cut, damaged, follow, load_context, token_link
from polar.store.rows import ExchangeRow, FieldEntry, may_be_id, to_exchange, to_session, usage_in
from polar.store.sql import Connection, Queries
from polar.types import Used

T = TypeVar("T")

_DIGESTS = tuple(f"digest_{letter}" for letter in "abcdefghijklmnop")  # the parameters of the query `blobs`


class Reader:
    def __init__(self, connection: Connection, queries: Queries) -> None:
        self._db = connection
        self._q = queries

    def session(self, session_id: str) -> Session | None:
        if not may_be_id(session_id):
            return None
        row = self._db.execute(self._q.session, {"session_id": session_id}).fetchone()
        return None if row is None else to_session(row)

    def standing_session(self, run: str, task_id: str, work_id: int) -> str | None:
        work = {"run": run, "task_id": task_id, "work_id": work_id}
        row = self._db.execute(self._q.standing_session, work).fetchone()
        return None if row is None else row[0]

    def session_by_key(self, key_hash: bytes) -> Session | None:
        row = self._db.execute(self._q.session_by_key, {"key_hash": key_hash}).fetchone()
        return None if row is None else to_session(row)

    def sessions(self, limit: int, before: str | None) -> list[Session]:
        if before is None:
            rows = self._db.execute(self._q.newest_sessions, {"limit": limit}).fetchall()
        else:
            last = self.session(before)
            if last is None:
                raise StoreError(f"There is no session {before} to list from; start again from the newest.")
            place = {"created_at": last.created_at, "session_id": before, "limit": limit}
            rows = self._db.execute(self._q.sessions_before, place).fetchall()
        return [to_session(row) for row in rows]

    def policies(self) -> dict[str, int]:
        return dict(self._db.execute(self._q.policies, {}).fetchall())

    def used(self, session_id: str) -> Used:
        used = Used()
        for status, detail in self._db.execute(self._q.details, {"session_id": session_id}).fetchall():
            used.add(usage_in(detail), answered=status == "complete")
        return used

    def next_seq(self, session_id: str) -> int:
        found: int = self._db.execute(self._q.next_seq, {"session_id": session_id}).fetchone()[0]
        return found

    def context(self, session_id: str, seq: int) -> Ids:
        return load_context(self._db, self._q, session_id, seq)

    def copy(self, session_id: str) -> bytes:
        return copying.pack(copying.load(self._db, self._q, session_id))

    def exchanges(self, session_id: str) -> "SessionReading":
        return SessionReading(self._db, self._q, session_id)

    def recorded(self, session_ids: Iterable[str | None]) -> Iterator[list[Recorded]]:
        """A step reads as much as takes about as long as going from thread to thread: several short sessions, or some
        of a long one, and then there may be none to show for it."""
        whole: list[Recorded] = []
        read = 0.0
        for session_id in session_ids:
            found = Recorded()
            try:
                found.session = None if session_id is None else self.session(session_id)
                exchanges = None if found.session is None else self.exchanges(found.session.session_id)
                while exchanges is not None and (some := exchanges.some()):
                    found.exchanges += some
                    read += sum(_length(exchange) for exchange in some)
                    if read >= 1:
                        yield whole
                        whole, read = [], 0.0
            except (Damaged, ValueError) as error:  # it alone: the others can be read
                found = Recorded(damage=str(error))
            whole.append(found)
            read += 1 / _SESSIONS_AT_ONCE
            if read >= 1:
                yield whole
                whole, read = [], 0.0
        yield whole


_SESSIONS_AT_ONCE, _EXCHANGES_AT_ONCE, _TOKENS_AT_ONCE = 32, 16, 100_000


def _length(exchange: Exchange) -> float:
    """Of a step, the share that it takes."""
    ids = exchange.prompt_ids, exchange.sampled_ids
    tokens = sum(0 if some is None else len(some) for some in ids)
    return max(1 / _EXCHANGES_AT_ONCE, tokens / _TOKENS_AT_ONCE)


class SessionReading:
    """One pass over a session's exchanges."""

    RECENT = 8
    _PIECES_BUDGET = 32 * 1024 * 1024
    _AT_ONCE, _TOKENS_AT_ONCE = 16, 500_000
    _ROWS = 8  # that are read at once

    def __init__(self, connection: Connection, queries: Queries, session_id: str) -> None:
        self._db = connection
        self._q = queries
        self._session_id = session_id
        self._after = -1
        self._rows: deque[ExchangeRow] = deque()  # that were read, and not given yet
        # Of the latest exchanges, by seq: item digests, items, table of fields, context.
        self._items: OrderedDict[int, bytearray] = OrderedDict()
        self._given: OrderedDict[int, list[Raw]] = OrderedDict()
        self._fields: OrderedDict[int, bytes] = OrderedDict()
        self._contexts: OrderedDict[int, bytes | bytearray] = OrderedDict()
        self._pieces: dict[bytes, Raw] = {}
        self._pieces_size = 0
        self._decode_fields = msgspec.msgpack.Decoder(dict[str, FieldEntry]).decode

    def some(self) -> list[Exchange]:
        """The next few, none at the end: going from thread to thread takes as long as reading a short one."""
        found: list[Exchange] = []
        tokens = 0
        while len(found) < self._AT_ONCE and tokens < self._TOKENS_AT_ONCE:
            exchange = self.next()
            if exchange is None:
                break
            found.append(exchange)
            tokens += 0 if exchange.prompt_ids is None else len(exchange.prompt_ids)
        return found

    def next(self) -> Exchange | None:
        if not self._rows:
            self._read_on()
        if not self._rows:
            return None
        row = self._rows.popleft()
        return to_exchange(row, self._wire(row), self._prompt(row))

    def _read_on(self) -> None:
        """The next rows, and the pieces that are new with them: a server elsewhere is asked few times."""
        place = {"session_id": self._session_id, "after": self._after, "limit": self._ROWS}
        found = self._db.execute(self._q.next_exchanges, place).fetchall()
        rows = [msgspec.convert(row, ExchangeRow) for row in found]
        self._rows.extend(rows)
        if rows:
            self._after = rows[-1].seq
        if self._pieces_size > self._PIECES_BUDGET:
            self._pieces.clear()
            self._pieces_size = 0
        new = dict.fromkeys(digest for row in rows for digest in self._digests(row) if digest not in self._pieces)
        missing = list(new)
        for first in range(0, len(missing), len(_DIGESTS)):
            some = missing[first : first + len(_DIGESTS)]
            wanted = dict(zip(_DIGESTS, some + some[-1:] * (len(_DIGESTS) - len(some)), strict=True))
            for digest, data in self._db.execute(self._q.blobs, wanted).fetchall():
                self._pieces[bytes(digest)] = Raw(data)
                self._pieces_size += len(data)

    def _digests(self, row: ExchangeRow) -> Iterator[bytes]:
        """Of the pieces that it does not share with its base."""
        yield from cut(row.items, DIGEST_SIZE)
        if row.fields is not None:
            yield from (entry.data for entry in self._decode_fields(row.fields).values() if entry.is_digest)

    def _wire(self, row: ExchangeRow) -> Wire:
        link = Link(row.base, row.shared_items * DIGEST_SIZE, row.items)
        digests = follow(link, self._request_link, self._items)
        table = self._table(row.base, row.fields)
        self._keep(self._items, row.seq, digests)
        self._keep(self._fields, row.seq, table)
        fields = {
            name: self._piece(entry.data) if entry.is_digest else Raw(entry.data)
            for name, entry in self._decode_fields(table).items()
        }
        shared = self._given.get(row.base, [])[: row.shared_items] if row.base is not None else []
        new = digests[len(shared) * DIGEST_SIZE :]
        items = [*shared, *(self._piece(digest) for digest in cut(new, DIGEST_SIZE))]
        self._keep(self._given, row.seq, items)
        return Wire(fields, row.list_name, items)

    def _prompt(self, row: ExchangeRow) -> Ids | None:
        link = context_link(row.base, row.shared_tokens, row.prompt, row.sampled)
        if link.shared == ALL:
            if row.base is not None and row.base in self._contexts:
                self._keep(self._contexts, row.seq, self._contexts[row.base])
            return None
        context = follow(link, lambda seq: token_link(self._db, self._q, self._session_id, seq), self._contexts)
        self._keep(self._contexts, row.seq, context)
        return bytes_to_ids(context[: len(context) - len(row.sampled or b"")])

    def _table(self, base: int | None, own: bytes | None) -> bytes:
        met: set[int | None] = set()
        while own is None:
            if base is None or base in met:
                raise damaged(f"session {self._session_id} has an exchange without fields")
            met.add(base)
            own = self._fields.get(base)
            if own is None:
                base, _, _, own = self._request(base)
        return own

    def _request_link(self, seq: int) -> Link:
        base, shared_items, items, _ = self._request(seq)
        return Link(base, shared_items * DIGEST_SIZE, items)

    def _request(self, seq: int) -> tuple[int | None, int, bytes, bytes | None]:
        row: tuple[int | None, int, bytes, bytes | None] | None = self._db.execute(
            self._q.request_link, {"session_id": self._session_id, "seq": seq}
        ).fetchone()
        if row is None:
            raise damaged(f"exchange {seq} of session {self._session_id} is missing")
        return row

    def _piece(self, digest: bytes) -> Raw:
        piece = self._pieces.get(digest)
        if piece is None:
            row = self._db.execute(self._q.blob, {"digest": digest}).fetchone()
            if row is None:
                raise damaged(f"piece {digest.hex()} of session {self._session_id} is missing")
            piece = self._pieces[digest] = Raw(row[0])
            self._pieces_size += len(row[0])
        return piece

    def _keep(self, recent: OrderedDict[int, T], seq: int, value: T) -> None:
        recent[seq] = value
        if len(recent) > self.RECENT:
            recent.popitem(last=False)
