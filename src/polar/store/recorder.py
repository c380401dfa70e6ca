"""Writes records as rows, by difference, on one connection of any driver.

Everything here runs in the one thread that owns the connection, inside a transaction that the caller opens and closes.
The lineages in memory run ahead of the database within a transaction, so a rollback drops those it touched. Pieces wait
until `flush_pieces`, which comes before the commit: each is inserted once, and all in one order, so that processes that
write the same pieces never deadlock.

If a commit was interrupted, it is unknown whether it took place. The same work is then done again; records whose ids
are stored already stay as they are.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from polar.errors import StoreError
from polar.records.exchange import Exchange, ExchangeStatus, RawRequest, StartedCall, TokenIds
from polar.records.session import Session, Verdict
from polar.store import session_copy
from polar.store.arrays import NO_IDS, count_shared_prefix, ids_to_bytes
from polar.store.base_link import load_context, split_bytes
from polar.store.checksum import compute_checksum
from polar.store.lineage import DIGEST_SIZE, Digester, Lineage
from polar.store.rows import (
    ExchangeDifference,
    FieldEntry,
    build_exchange_parameters,
    build_session_parameters,
    encode_evidence,
    encode_turn_rewards,
    is_valid_id,
    to_session,
)
from polar.store.session_copy import SessionCopy
from polar.store.sized_cache import SizedCache
from polar.store.sql import Queries, WritingConnection

MAX_INLINE_BYTES = 256
"""A request's field up to so many bytes stands in the exchange's own row; a larger one becomes a blob."""

Pieces = dict[bytes, Raw | bytes]
"""By digest."""


class StoredExchange(NamedTuple):
    """The columns that `stored_exchange` selects, in that order."""

    session_id: str
    seq: int
    checksum: bytes | None
    parent: str | None


class Recorder:
    def __init__(self, connection: WritingConnection, queries: Queries, *, max_lineage_bytes: int) -> None:
        self._db = connection
        self._queries = queries
        self._digester = Digester()
        self.lineages: SizedCache[str, Lineage] = SizedCache(max_lineage_bytes)
        self._touched: set[str] = set()
        self.may_be_written = False  # some of the work may be written already
        self._pieces: Pieces = {}
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def memory_bytes(self) -> int:
        """Memory held for lineages, items and fields, about."""
        return self.lineages.size + self._digester.size

    def flush_pieces(self) -> None:
        """Inserts the new pieces. It must be the last step of a transaction."""
        if self._pieces:
            ordered = sorted(self._pieces)
            self._db.executemany(
                self._queries.insert_blob,
                [{"digest": digest, "data": bytes(self._pieces[digest])} for digest in ordered],
            )
            self._pieces.clear()

    def on_commit(self) -> None:
        self._touched.clear()

    def on_settled(self) -> None:
        """Called when no work of a lost connection is left."""
        self.may_be_written = False

    def on_rollback(self, *, outcome_unknown: bool = False) -> None:
        """Drops what the transaction added to memory. With `outcome_unknown` (the connection was lost) it may have been
        committed."""
        self.may_be_written = self.may_be_written or outcome_unknown
        self._pieces.clear()
        for session_id in self._touched:
            self.lineages.drop(session_id)
        self._touched.clear()

    def ensure_store_id(self) -> str:
        """Returns the store's id, and creates it if there is none."""
        self._db.execute(self._queries.make_store_id, {"value": secrets.token_hex(16)})
        return str(self._db.execute(self._queries.store_id, {}).fetchone()[0])

    def write_probe(self) -> None:
        """Writes something that nobody reads."""
        self._db.execute(self._queries.write_probe, {"value": secrets.token_hex(16)})

    def create_session(self, session: Session) -> None:
        _check_reward(session.reward)
        if self.may_be_written and self._is_session_stored(session):
            return
        self._db.execute(self._queries.insert_session, build_session_parameters(session))

    def end_session(self, session_id: str, ended_at: float, verdict: Verdict) -> Session | None:
        for reward in (verdict.reward, *verdict.turn_rewards.values()):
            _check_reward(reward)
        if not is_valid_id(session_id):
            return None
        parameters = {
            "session_id": session_id,
            "ended_at": ended_at,
            "reward": verdict.reward,
            "reason": verdict.reason,
            "turn_rewards": encode_turn_rewards(verdict.turn_rewards),
            "evidence": encode_evidence(verdict.evidence),
        }
        rows = self._db.execute(self._queries.end_session, parameters).fetchall()
        self._forget(session_id)
        return to_session(rows[0]) if rows else None

    def revoke_session_reward(self, session_id: str, reason: str) -> None:
        self._db.execute(self._queries.disown_session, {"session_id": session_id, "reason": reason})

    def set_policy_versions(self, versions: Mapping[str, int]) -> None:
        for replica, version in sorted(versions.items()):  # in one order, as pieces are
            self._db.execute(self._queries.set_policy, {"replica": replica, "version": version})

    def amend(self, exchange_id: str, status: ExchangeStatus, delivered: int) -> None:
        parameters = {"exchange_id": exchange_id, "status": status, "delivered": delivered}
        if not self._db.execute(self._queries.amend_exchange, parameters).fetchall():
            raise StoreError(f"There is no exchange {exchange_id} to amend; append it first.")

    def append(self, exchange: Exchange) -> str | None:
        """Stores an exchange by difference, and returns its parent's id."""
        exchange.checksum = compute_checksum(exchange)
        if self.may_be_written and (stored := self._find_stored_exchange(exchange)) is not None:
            return stored.parent
        session_id, seq, items = exchange.session_id, exchange.seq, exchange.raw_request.items
        lineage = self.lineages.get(session_id)
        is_open = lineage is not None or self._is_open(session_id)
        lineage = lineage or self._load_lineage(session_id)
        self._touched.add(session_id)
        digests = self._digester.digest_items(session_id, items)
        base, parent, shared_items = lineage.find_base(seq, digests)
        if lineage.is_full:
            lineage, base, shared_items = Lineage(), None, 0
        new = digests[shared_items:]
        fields, field_pieces = self._split_fields(exchange.raw_request.fields)
        own_fields: bytes | None = fields
        if base is not None and fields == lineage.get_fields(base):
            own_fields, fields = None, lineage.get_fields(base)  # one object for all turns

        context = NO_IDS if base is None else self._load_context(lineage, session_id, base)
        shared_tokens = prompt = None
        if exchange.prompt_ids is not None:
            shared_tokens = count_shared_prefix(exchange.prompt_ids, context)
            prompt = ids_to_bytes(exchange.prompt_ids[shared_tokens:])
            context = _concatenate(exchange.prompt_ids, exchange.sampled_ids)

        difference = ExchangeDifference(
            base=base,
            parent=exchange.parent or parent,
            shared_items=shared_items,
            items=b"".join(new),
            fields=own_fields,
            shared_tokens=shared_tokens,
            prompt=prompt,
        )
        self._db.execute(self._queries.insert_exchange, build_exchange_parameters(exchange, difference))
        self._pieces.update(zip(new, items[shared_items:], strict=True))
        if own_fields is not None:
            self._pieces.update(field_pieces)
        lineage.add(seq, exchange.exchange_id, base, shared_items, new, fields)
        lineage.move_context(base, seq, context)
        if is_open:
            self.lineages.put(session_id, lineage, lineage.size)
        else:  # a call that was given up when its session ended
            self._forget(session_id)
        return difference.parent

    def record_interrupted(self, calls: Sequence[StartedCall]) -> list[str]:
        """Skips calls that are recorded already, and calls of sessions that are gone (retention)."""
        recorded = []
        for call in calls:
            if self._db.execute(self._queries.can_record_interrupted, msgspec.to_builtins(call)).fetchone() is not None:
                self.append(_make_interrupted_exchange(call))
                recorded.append(call.exchange_id)
        return recorded

    def import_copy(self, copy: SessionCopy) -> str:
        """Stores the copy of another store's session, and returns its id."""
        session_id = copy.session.session_id
        _check_reward(copy.session.reward)
        if session_copy.insert_copy(self._db, self._queries, copy):
            self._pieces.update(copy.pieces)
        self._forget(session_id)
        return session_id

    def _forget(self, session_id: str) -> None:
        self.lineages.drop(session_id)
        self._digester.forget(session_id)

    def _is_open(self, session_id: str) -> bool:
        row = self._db.execute(self._queries.session, {"session_id": session_id}).fetchone()
        return row is not None and to_session(row).status == "open"

    def _is_session_stored(self, session: Session) -> bool:
        row = self._db.execute(self._queries.session, {"session_id": session.session_id}).fetchone()
        return row is not None and to_session(row) == session

    def _find_stored_exchange(self, exchange: Exchange) -> StoredExchange | None:
        row = self._db.execute(self._queries.stored_exchange, {"exchange_id": exchange.exchange_id}).fetchone()
        if row is None or tuple(row[:3]) != (exchange.session_id, exchange.seq, exchange.checksum):
            return None
        return StoredExchange(*row)

    def _split_fields(self, fields: dict[str, Raw]) -> tuple[bytes, Pieces]:
        """Returns the table of fields, and the pieces that it names."""
        table: dict[str, FieldEntry] = {}
        pieces: Pieces = {}
        for name, raw in fields.items():
            data = bytes(raw)
            if len(data) <= MAX_INLINE_BYTES:
                table[name] = FieldEntry(False, data)
            else:
                digest = self._digester.digest_field(data)
                table[name] = FieldEntry(True, digest)
                pieces[digest] = data
        return self._encode(table), pieces

    def _load_context(self, lineage: Lineage, session_id: str, seq: int) -> TokenIds:
        cached = lineage.get_context(seq)
        return load_context(self._db, self._queries, session_id, seq) if cached is None else cached

    def _load_lineage(self, session_id: str) -> Lineage:
        """Loads a lineage after a restart, or when the session was idle for long. A base may have a higher `seq` (calls
        end in any order), so each exchange is added after its base. Exchanges whose base is of an earlier lineage are
        left out."""
        lineage = Lineage()
        links = self._db.execute(self._queries.latest_request_links, {"session_id": session_id}).fetchall()
        rows = {seq: row for seq, *row in links}
        fields: dict[int, bytes] = {}
        for first in rows:
            chain = [first]
            while (base := rows[chain[-1]][1]) in rows and base not in fields:
                chain.append(base)
            if base is not None and base not in fields:
                continue
            for seq in reversed(chain):
                if seq not in fields:
                    exchange_id, base, shared_items, items, own_fields = rows[seq]
                    fields[seq] = fields[base] if own_fields is None else own_fields
                    lineage.add(seq, exchange_id, base, shared_items, split_bytes(items, DIGEST_SIZE), fields[seq])
        return lineage


def _make_interrupted_exchange(call: StartedCall) -> Exchange:
    return Exchange(
        exchange_id=call.exchange_id,
        session_id=call.session_id,
        seq=call.seq,
        dialect=call.dialect,
        params={},
        hints={},
        raw_request=RawRequest({"model": Raw(msgspec.json.encode(call.model))}, call.list_name, []),
        status="interrupted",
        started_at=call.started_at,
        ended_at=call.started_at,  # when it really ended nobody knows
        error=(
            "The gateway's process ended before this call did; what was sampled is not known. Its request had "
            f"{call.request_bytes} bytes."
        ),
        untrainable="no_reply",
    )


def _concatenate(prompt: TokenIds, sampled: TokenIds | None) -> TokenIds:
    return prompt.copy() if sampled is None else np.concatenate((prompt, sampled))


def _check_reward(reward: float | None) -> None:
    if reward is not None and not math.isfinite(reward):
        raise StoreError(f"A reward must be a finite number, not {reward}; give none where there is no verdict.")
