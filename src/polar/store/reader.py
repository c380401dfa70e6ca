"""Reads records from rows and their bases, on one connection of any driver.

A session is read a few exchanges at a time, each with queries of its own, so that a slow reader holds no transaction
open, and memory does not grow with the session. What the next exchange probably shares is cached.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from cachetools import LRUCache
from msgspec import Raw

from polar.errors import StoreError
from polar.records.exchange import Exchange, RawRequest, TokenIds
from polar.records.session import Session, SessionRecord
from polar.store import session_copy
from polar.store.arrays import bytes_to_ids
from polar.store.base_link import (
    SHARES_ALL,
    BaseLink,
    DamagedStoreError,
    load_context,
    load_token_link,
    make_context_link,
    make_damaged_store_error,
    resolve_link,
    split_bytes,
)
from polar.store.lineage import DIGEST_SIZE
from polar.store.rows import ExchangeRow, FieldEntry, decode_usage, is_valid_id, to_exchange, to_session
from polar.store.sql import Connection, Queries
from polar.types import UsageTotals

_DIGEST_PARAMETERS = tuple(f"digest_{letter}" for letter in "abcdefghijklmnop")  # the parameters of the query `blobs`


class Reader:
    def __init__(self, connection: Connection, queries: Queries) -> None:
        self._db = connection
        self._queries = queries

    def find_session(self, session_id: str) -> Session | None:
        if not is_valid_id(session_id):
            return None
        row = self._db.execute(self._queries.session, {"session_id": session_id}).fetchone()
        return None if row is None else to_session(row)

    def find_accepted_session(self, run: str, task_id: str, work_id: int) -> str | None:
        work = {"run": run, "task_id": task_id, "work_id": work_id}
        row = self._db.execute(self._queries.standing_session, work).fetchone()
        return None if row is None else row[0]

    def find_session_by_key(self, key_hash: bytes) -> Session | None:
        row = self._db.execute(self._queries.session_by_key, {"key_hash": key_hash}).fetchone()
        return None if row is None else to_session(row)

    def list_sessions(self, limit: int, before: str | None) -> list[Session]:
        if before is None:
            rows = self._db.execute(self._queries.newest_sessions, {"limit": limit}).fetchall()
        else:
            last_session = self.find_session(before)
            if last_session is None:
                raise StoreError(f"There is no session {before} to list from; start again from the newest.")
            position = {"created_at": last_session.created_at, "session_id": before, "limit": limit}
            rows = self._db.execute(self._queries.sessions_before, position).fetchall()
        return [to_session(row) for row in rows]

    def read_policy_versions(self) -> dict[str, int]:
        return dict(self._db.execute(self._queries.policies, {}).fetchall())

    def read_usage_totals(self, session_id: str) -> UsageTotals:
        totals = UsageTotals()
        for status, detail in self._db.execute(self._queries.details, {"session_id": session_id}).fetchall():
            totals.add(decode_usage(detail), answered=status == "complete")
        return totals

    def read_next_seq(self, session_id: str) -> int:
        seq: int = self._db.execute(self._queries.next_seq, {"session_id": session_id}).fetchone()[0]
        return seq

    def read_context_ids(self, session_id: str, seq: int) -> TokenIds:
        return load_context(self._db, self._queries, session_id, seq)

    def export_session(self, session_id: str) -> bytes:
        return session_copy.pack(session_copy.load_copy(self._db, self._queries, session_id))

    def scan_exchanges(self, session_id: str) -> "SessionScan":
        return SessionScan(self._db, self._queries, session_id)

    def read_sessions(self, session_ids: Iterable[str | None]) -> Iterator[list[SessionRecord]]:
        """Yields the sessions that each step has completed. A step takes about as long as a switch of threads: it reads
        several short sessions, or a part of a long one, and then yields an empty list."""
        completed: list[SessionRecord] = []
        step_share = 0.0
        for session_id in session_ids:
            record = SessionRecord()
            try:
                record.session = None if session_id is None else self.find_session(session_id)
                scan = None if record.session is None else self.scan_exchanges(record.session.session_id)
                while scan is not None and (batch := scan.read_batch()):
                    record.exchanges += batch
                    step_share += sum(_measure_step_share(exchange) for exchange in batch)
                    if step_share >= 1:
                        yield completed
                        completed, step_share = [], 0.0
            except (DamagedStoreError, ValueError) as error:  # the other sessions can still be read
                record = SessionRecord(damage=str(error))
            completed.append(record)
            step_share += 1 / _STEP_SESSIONS
            if step_share >= 1:
                yield completed
                completed, step_share = [], 0.0
        yield completed


_STEP_SESSIONS, _STEP_EXCHANGES, _STEP_TOKENS = 32, 16, 100_000


def _measure_step_share(exchange: Exchange) -> float:
    """Returns which share of a step an exchange takes."""
    arrays = exchange.prompt_ids, exchange.sampled_ids
    tokens = sum(0 if ids is None else len(ids) for ids in arrays)
    return max(1 / _STEP_EXCHANGES, tokens / _STEP_TOKENS)


class SessionScan:
    """One pass over a session's exchanges."""

    MAX_RECENT_EXCHANGES = 8
    _MAX_PIECE_BYTES = 32 * 1024 * 1024
    _BATCH_EXCHANGES, _BATCH_TOKENS = 16, 500_000
    _ROWS_PER_QUERY = 8  # that are read at once

    def __init__(self, connection: Connection, queries: Queries, session_id: str) -> None:
        self._db = connection
        self._queries = queries
        self._session_id = session_id
        self._after = -1
        self._rows: deque[ExchangeRow] = deque()  # that were read, and not given yet
        # Of the exchanges that were read or needed last, by seq: item digests, items, table of fields, context.
        self._item_digests: LRUCache[int, bytearray] = LRUCache(self.MAX_RECENT_EXCHANGES)
        self._decoded_items: LRUCache[int, list[Raw]] = LRUCache(self.MAX_RECENT_EXCHANGES)
        self._fields: LRUCache[int, bytes] = LRUCache(self.MAX_RECENT_EXCHANGES)
        self._contexts: LRUCache[int, bytes | bytearray] = LRUCache(self.MAX_RECENT_EXCHANGES)
        self._pieces: dict[bytes, Raw] = {}
        self._pieces_size = 0
        self._decode_fields = msgspec.msgpack.Decoder(dict[str, FieldEntry]).decode

    def read_batch(self) -> list[Exchange]:
        """Reads the next few exchanges; none at the end. A switch of threads takes as long as reading a short one."""
        batch: list[Exchange] = []
        tokens = 0
        while len(batch) < self._BATCH_EXCHANGES and tokens < self._BATCH_TOKENS:
            exchange = self.read_next()
            if exchange is None:
                break
            batch.append(exchange)
            tokens += 0 if exchange.prompt_ids is None else len(exchange.prompt_ids)
        return batch

    def read_next(self) -> Exchange | None:
        if not self._rows:
            self._fetch_rows()
        if not self._rows:
            return None
        row = self._rows.popleft()
        return to_exchange(row, self._load_raw_request(row), self._load_prompt(row))

    def _fetch_rows(self) -> None:
        """Fetches the next rows and their new pieces, with few queries, since the server may be remote."""
        position = {"session_id": self._session_id, "after": self._after, "limit": self._ROWS_PER_QUERY}
        fetched = self._db.execute(self._queries.next_exchanges, position).fetchall()
        rows = [msgspec.convert(row, ExchangeRow) for row in fetched]
        self._rows.extend(rows)
        if rows:
            self._after = rows[-1].seq
        if self._pieces_size > self._MAX_PIECE_BYTES:
            self._pieces.clear()
            self._pieces_size = 0
        digests = (digest for row in rows for digest in self._list_own_digests(row))
        missing = list(dict.fromkeys(digest for digest in digests if digest not in self._pieces))
        count = len(_DIGEST_PARAMETERS)
        for start in range(0, len(missing), count):
            chunk = missing[start : start + count]
            parameters = dict(zip(_DIGEST_PARAMETERS, chunk + chunk[-1:] * (count - len(chunk)), strict=True))
            for digest, data in self._db.execute(self._queries.blobs, parameters).fetchall():
                self._pieces[bytes(digest)] = Raw(data)
                self._pieces_size += len(data)

    def _list_own_digests(self, row: ExchangeRow) -> Iterator[bytes]:
        """Yields the digests of the pieces that a row does not share with its base."""
        yield from split_bytes(row.items, DIGEST_SIZE)
        if row.fields is not None:
            yield from (entry.data for entry in self._decode_fields(row.fields).values() if entry.is_digest)

    def _load_raw_request(self, row: ExchangeRow) -> RawRequest:
        link = BaseLink(row.base, row.shared_items * DIGEST_SIZE, row.items)
        digests = resolve_link(link, self._load_request_link, self._item_digests)
        table = self._load_field_table(row.base, row.fields)
        self._item_digests[row.seq] = digests
        self._fields[row.seq] = table
        fields = {
            name: self._load_piece(entry.data) if entry.is_digest else Raw(entry.data)
            for name, entry in self._decode_fields(table).items()
        }
        shared = self._decoded_items.get(row.base, [])[: row.shared_items] if row.base is not None else []
        new = digests[len(shared) * DIGEST_SIZE :]
        items = [*shared, *(self._load_piece(digest) for digest in split_bytes(new, DIGEST_SIZE))]
        self._decoded_items[row.seq] = items
        return RawRequest(fields, row.list_name, items)

    def _load_prompt(self, row: ExchangeRow) -> TokenIds | None:
        link = make_context_link(row.base, row.shared_tokens, row.prompt, row.sampled)
        if link.shared == SHARES_ALL:
            if row.base is not None and row.base in self._contexts:
                self._contexts[row.seq] = self._contexts[row.base]
            return None
        context = resolve_link(
            link, lambda seq: load_token_link(self._db, self._queries, self._session_id, seq), self._contexts
        )
        self._contexts[row.seq] = context
        return bytes_to_ids(context[: len(context) - len(row.sampled or b"")])

    def _load_field_table(self, base: int | None, table: bytes | None) -> bytes:
        """Returns an exchange's own table of fields, or else that of the nearest base that has one."""
        visited: set[int | None] = set()
        while table is None:
            if base is None or base in visited:
                raise make_damaged_store_error(f"session {self._session_id} has an exchange without fields")
            visited.add(base)
            table = self._fields.get(base)
            if table is None:
                base, _, _, table = self._select_request(base)
        return table

    def _load_request_link(self, seq: int) -> BaseLink:
        base, shared_items, items, _ = self._select_request(seq)
        return BaseLink(base, shared_items * DIGEST_SIZE, items)

    def _select_request(self, seq: int) -> tuple[int | None, int, bytes, bytes | None]:
        row: tuple[int | None, int, bytes, bytes | None] | None = self._db.execute(
            self._queries.request_link, {"session_id": self._session_id, "seq": seq}
        ).fetchone()
        if row is None:
            raise make_damaged_store_error(f"exchange {seq} of session {self._session_id} is missing")
        return row

    def _load_piece(self, digest: bytes) -> Raw:
        piece = self._pieces.get(digest)
        if piece is None:
            row = self._db.execute(self._queries.blob, {"digest": digest}).fetchone()
            if row is None:
                raise make_damaged_store_error(f"piece {digest.hex()} of session {self._session_id} is missing")
            piece = self._pieces[digest] = Raw(row[0])
            self._pieces_size += len(row[0])
        return piece
