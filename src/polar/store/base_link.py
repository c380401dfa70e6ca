"""Restores a sequence that is stored as a link: the first n bytes of its base's sequence, then its own bytes.

The same walk serves item digests and token ids. It fills the result from its end, so that each stored piece is copied
once and only the result is in memory.
"""

from collections.abc import Callable, Mapping
from sys import maxsize
from typing import NamedTuple

from polar.errors import StoreError
from polar.records.exchange import TokenIds
from polar.store.arrays import ID_SIZE, NO_IDS, bytes_to_ids
from polar.store.sql import Connection, Queries


class BaseLink(NamedTuple):
    """The first `shared` bytes of the base's sequence, then `own`. SHARES_ALL stands for the base's whole sequence,
    however long it is."""

    base: int | None
    shared: int
    own: bytes


SHARES_ALL = maxsize


def resolve_link(
    link: BaseLink, fetch: Callable[[int], BaseLink], cached: Mapping[int, bytes | bytearray]
) -> bytearray:
    """Restores the sequence of `link`. `cached` has some sequences by `seq`."""
    missing = link.shared
    if missing < 0:
        raise make_damaged_store_error("an exchange shares less than nothing with its base")
    sequence = bytearray(missing + len(link.own))
    sequence[missing:] = link.own
    base = link.base
    visited: set[int | None] = set()
    while missing:
        if base in visited:
            raise make_damaged_store_error("an exchange is stored against itself")
        visited.add(base)
        if base is None:
            raise make_damaged_store_error("an exchange shares more with its base than that has")
        start, piece = 0, cached.get(base)
        if piece is None:
            base, start, piece = fetch(base)
        if start < missing:
            if len(piece) < missing - start:
                raise make_damaged_store_error("an exchange shares more with its base than that has")
            sequence[start:missing] = piece[: missing - start]
            missing = start
    return sequence


def load_token_link(db: Connection, queries: Queries, session_id: str, seq: int) -> BaseLink:
    """Loads the link of an exchange's context."""
    row = db.execute(queries.token_link, {"session_id": session_id, "seq": seq}).fetchone()
    if row is None:
        raise make_damaged_store_error(f"exchange {seq} of session {session_id} is missing")
    base, shared, prompt, sampled = row
    return make_context_link(base, shared, prompt, sampled)


def make_context_link(base: int | None, shared: int | None, prompt: bytes | None, sampled: bytes | None) -> BaseLink:
    if shared is None or prompt is None:
        return BaseLink(base, SHARES_ALL, b"")
    return BaseLink(base, shared * ID_SIZE, prompt + (sampled or b""))


def load_context(db: Connection, queries: Queries, session_id: str, seq: int) -> TokenIds:
    """Loads an exchange's prompt and sampled ids; empty if no prompt is known."""
    link = load_token_link(db, queries, session_id, seq)
    while link.shared == SHARES_ALL:
        if link.base is None:
            return NO_IDS
        link = load_token_link(db, queries, session_id, link.base)
    return bytes_to_ids(resolve_link(link, lambda base: load_token_link(db, queries, session_id, base), {}))


def split_bytes(data: bytes | bytearray, size: int) -> list[bytes]:
    """Splits data into pieces of equal size."""
    return [bytes(data[start : start + size]) for start in range(0, len(data), size)]


class DamagedStoreError(StoreError):
    """The stored data can't be read."""


def make_damaged_store_error(damage: str) -> DamagedStoreError:
    return DamagedStoreError(f"The store is damaged ({damage}); restore it from a backup.")
