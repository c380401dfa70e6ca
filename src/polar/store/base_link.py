"""Following bases: a sequence that is stored as "the first n of the base's, then these" put together again.

The same walk serves item digests and token ids. It fills the result from its end, so that each stored piece is copied
once and nothing but the result is held.
"""

from collections.abc import Callable, Mapping
from sys import maxsize
from typing import NamedTuple

from polar.errors import StoreError
from polar.records.exchange import TokenIds
from polar.store.arrays import ID_SIZE, NO_IDS, bytes_to_ids
from polar.store.sql import Connection, Queries


class BaseLink(NamedTuple):
    """The first `shared` bytes of the base's sequence, then `own`. A link that has nothing of its own and shares all
    of its base's sequence, however long, has `shared` = ALL."""

    base: int | None
    shared: int
    own: bytes


SHARES_ALL = maxsize


def resolve_link(
    link: BaseLink, fetch: Callable[[int], BaseLink], cached: Mapping[int, bytes | bytearray]
) -> bytearray:
    """The whole sequence of `link`. `held` has sequences that are at hand already, by `seq`."""
    need = link.shared
    if need < 0:
        raise make_damaged_store_error("an exchange shares less than nothing with its base")
    whole = bytearray(need + len(link.own))
    whole[need:] = link.own
    base = link.base
    met: set[int | None] = set()
    while need:
        if base in met:
            raise make_damaged_store_error("an exchange is stored against itself")
        met.add(base)
        if base is None:
            raise make_damaged_store_error("an exchange shares more with its base than that has")
        start, piece = 0, cached.get(base)
        if piece is None:
            base, start, piece = fetch(base)
        if start < need:
            if len(piece) < need - start:
                raise make_damaged_store_error("an exchange shares more with its base than that has")
            whole[start:need] = piece[: need - start]
            need = start
    return whole


def load_token_link(db: Connection, queries: Queries, session_id: str, seq: int) -> BaseLink:
    """Of an exchange's context."""
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
    """Empty where no prompt is known."""
    link = load_token_link(db, queries, session_id, seq)
    while link.shared == SHARES_ALL:
        if link.base is None:
            return NO_IDS
        link = load_token_link(db, queries, session_id, link.base)
    return bytes_to_ids(resolve_link(link, lambda base: load_token_link(db, queries, session_id, base), {}))


def split_bytes(data: bytes | bytearray, size: int) -> list[bytes]:
    """Into pieces of equal size."""
    return [bytes(data[start : start + size]) for start in range(0, len(data), size)]


class DamagedStoreError(StoreError):
    """What is stored can't be read."""


def make_damaged_store_error(what: str) -> DamagedStoreError:
    return DamagedStoreError(f"The store is damaged ({what}); restore it from a backup.")
