"""A memory of what was used last, bounded in bytes."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Forgets what was put longest ago. `size` is the sum of the sizes that were given."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        held = self._held.get(key)
        return None if held is None else held[0]

    def put(self, key: K, value: V, size: int) -> None:
        self.drop(key)
        self._held[key] = (value, size)
        self.size += size
        while self.size > self._budget:
            self.drop(next(iter(self._held)))

    def drop(self, key: K) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.size -= held[1]
