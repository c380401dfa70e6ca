"""What an exchange shares with the earlier ones of its session.

A conversation repeats itself: request k holds nearly all of request k-1, and its prompt begins with the tokens of turn
k-1. So an exchange is stored against a base: how many leading items and tokens it shares with it, and what is new.

    base     the exchange that shares the most leading items; the latest one where none shares any
    parent   the exchange whose whole request this one extends: the longest such, the latest among equals
    context  an exchange's prompt and sampled ids, which the next prompt usually begins with

Items are compared by digest. Invariant: any base gives back what was stored; the choice only decides how much is saved.

So a session whose lineage has become too large begins a new one, with an exchange that has no base. Otherwise a session
of huge requests would cost more with every call, in memory and wherever its lineage has to be loaded again.
"""

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from msgspec import Raw

from polar.records.exchange import TokenIds
from polar.store.sized_cache import SizedCache

DIGEST_SIZE = 16


class Digester:
    """Digests of pieces: SHA-256, the first 16 bytes. Content is adversarial, so the hash must be a cryptographic one;
    with the CPU's own instructions for it, this is the fastest of them.

    Most of a request came with an earlier one, and comparing bytes takes a twentieth of the time of hashing them. So a
    conversation's last items are kept with their digests, and large fields (tools, system prompts: many sessions have
    the same) one per length. Only equal bytes are taken for equal.
    """

    LARGE_FIELD_BYTES = 4096
    ITEM_CACHE_BYTES = 32 * 1024 * 1024
    FIELD_CACHE_BYTES = 16 * 1024 * 1024
    _ITEM_OVERHEAD_BYTES = 170  # bytes, about: an item's objects and its digest, beside its text

    def __init__(self) -> None:
        self._items: SizedCache[Hashable, tuple[list[Raw], list[bytes]]] = SizedCache(self.ITEM_CACHE_BYTES)
        self._fields: SizedCache[int, tuple[bytes, bytes]] = SizedCache(self.FIELD_CACHE_BYTES)

    def digest_items(self, conversation: Hashable, items: list[Raw]) -> list[bytes]:
        cached_items, digests = self._items.get(conversation) or ([], [])
        shared = 0
        for cached_item, item in zip(cached_items, items, strict=False):
            if cached_item != item:
                break
            shared += 1
        digests = digests[:shared] + [compute_digest(item) for item in items[shared:]]
        # Items are copied, since a Raw keeps its whole request in memory.
        cached_items = cached_items[:shared] + [item.copy() for item in items[shared:]]
        self._items.put(conversation, (cached_items, digests), self._count_bytes(cached_items))
        return digests

    def forget(self, conversation: Hashable) -> None:
        """Drops what is kept of a conversation that has ended."""
        self._items.drop(conversation)

    @property
    def size(self) -> int:
        """Bytes held, about."""
        return self._items.size + self._fields.size

    def _count_bytes(self, items: list[Raw]) -> int:
        return sum(memoryview(item).nbytes for item in items) + self._ITEM_OVERHEAD_BYTES * len(items)

    def digest_field(self, field: bytes) -> bytes:
        if len(field) < self.LARGE_FIELD_BYTES:
            return compute_digest(field)
        cached = self._fields.get(len(field))
        if cached is not None and cached[0] == field:
            return cached[1]
        digest = compute_digest(field)
        self._fields.put(len(field), (field, digest), len(field))
        return digest


def compute_digest(piece: Raw | bytes) -> bytes:
    return sha256(piece).digest()[:DIGEST_SIZE]


class BaseMatch(NamedTuple):
    base: int | None
    parent: str | None
    shared_items: int


class LineageEntry(NamedTuple):
    """An exchange in a lineage."""

    exchange_id: str
    last_node: int  # the node of its last item
    length: int  # in items
    fields: bytes


class Lineage:
    """One session's exchanges as a trie over item digests, and the contexts at its tips.

    Node 0 is the empty request. A node knows the node above it and the exchange that passed it last.
    """

    MAX_CONTEXTS = 8
    MAX_TRIE_BYTES = 8 * 1024 * 1024
    """Bytes, contexts apart: about 36,000 different items."""
    _NODE_BYTES = 230  # bytes, about: a key of two objects, its value, their slot, two array entries
    _ENTRY_BYTES = 420

    def __init__(self) -> None:
        self._children: dict[tuple[int, bytes], int] = {}
        self._parent_nodes = array("q", [0])
        self._latest_seqs = array("q", [-1])
        self._seqs_by_last_node: dict[int, list[int]] = {}
        self._entries: dict[int, LineageEntry] = {}
        self._contexts: OrderedDict[int, TokenIds] = OrderedDict()
        self._context_size = 0

    @property
    def size(self) -> int:
        """Bytes held, about."""
        return self._trie_size + self._context_size

    @property
    def is_full(self) -> bool:
        """Whether the session's next exchange is to begin a new lineage."""
        return self._trie_size > self.MAX_TRIE_BYTES

    @property
    def _trie_size(self) -> int:
        return self._NODE_BYTES * len(self._parent_nodes) + self._ENTRY_BYTES * len(self._entries)

    def find_base(self, seq: int, digests: Sequence[bytes]) -> BaseMatch:
        if not self._entries:
            return BaseMatch(None, None, 0)
        path = [0]
        for digest in digests:
            node = self._children.get((path[-1], digest))
            if node is None:
                break
            path.append(node)
        return BaseMatch(self._latest_seqs[path[-1]], self._find_parent(seq, path[1 : len(digests)]), len(path) - 1)

    def _find_parent(self, seq: int, path: list[int]) -> str | None:
        for node in reversed(path):
            ends = self._seqs_by_last_node.get(node)
            if ends and ends[0] < seq:
                return self._entries[ends[bisect_left(ends, seq) - 1]].exchange_id
        return None

    def get_fields(self, seq: int) -> bytes:
        return self._entries[seq].fields

    def add(
        self, seq: int, exchange_id: str, base: int | None, shared: int, new: Iterable[bytes], fields: bytes
    ) -> None:
        """Adds an exchange that is stored against `base`, with `new` after the first `shared` items."""
        node, count = 0, shared
        if base is not None:
            stored = self._entries[base]
            node = stored.last_node
            for _ in range(stored.length - shared):
                node = self._parent_nodes[node]
        self._latest_seqs[0] = self._latest_seqs[node] = seq
        for digest in new:
            node = self._get_or_add_child(node, digest)
            self._latest_seqs[node] = seq
            count += 1
        self._entries[seq] = LineageEntry(exchange_id, node, count, fields)
        if count:
            insort(self._seqs_by_last_node.setdefault(node, []), seq)

    def _get_or_add_child(self, node: int, digest: bytes) -> int:
        child = self._children.setdefault((node, digest), len(self._parent_nodes))
        if child == len(self._parent_nodes):
            self._parent_nodes.append(node)
            self._latest_seqs.append(-1)
        return child

    def get_context(self, seq: int) -> TokenIds | None:
        """Returns an exchange's prompt and sampled ids, or None if they are not cached."""
        return self._contexts.get(seq)

    def move_context(self, base: int | None, seq: int, context: TokenIds) -> None:
        """Caches the context of `seq` instead of its base's, since the next exchange probably extends it."""
        if base is not None:
            self._release(base)
        self._contexts[seq] = context
        self._context_size += context.nbytes
        if len(self._contexts) > self.MAX_CONTEXTS:
            self._release(next(iter(self._contexts)))

    def _release(self, seq: int) -> None:
        context = self._contexts.pop(seq, None)
        if context is not None:
            self._context_size -= context.nbytes
