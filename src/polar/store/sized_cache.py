"""A least-recently-used cache, bounded in bytes."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """Evicts the entries that were not used for longest. `size` is the sum of the entries' sizes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        self.drop(key)
        self._entries[key] = (value, size)
        self.size += size
        while self.size > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry[1]
