"""A cache of values computed from recent keys, bounded in bytes."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 192
"""Approximate overhead of an entry in the dictionary: its slot, its link and its size."""

_ARRAY_BYTES = 112
"""Size of a NumPy array without its data."""


class Memo(Generic[K, V]):
    """Caches `compute(key)` for the most recently used keys, up to `budget_bytes` of keys and values. Thread-safe.

    Entries count with their overhead: a million short texts take much more memory than their characters."""

    def __init__(
        self,
        compute: Callable[[K], V],
        budget_bytes: int,
        *,
        measure: Callable[[K, V], int] | None = None,
        charge: Callable[[K], None] | None = None,
    ) -> None:
        """`measure` returns an entry's size if `estimate_bytes` does not know its types. `charge` is called with each
        key that has to be computed, and may raise to prevent that."""
        self._compute = compute
        self._charge = charge
        self._measure = measure or _measure
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        self.size_bytes = 0
        """Bytes held, about."""

    def __call__(self, key: K) -> V:
        # Hits take no lock: each step is one call into C. They are frequent, and suppress() takes as long as the rest.
        entry = self._entries.get(key)
        if entry is not None:
            try:  # noqa: SIM105
                self._entries.move_to_end(key)
            except KeyError:  # another thread has just evicted it
                pass
            return entry[0]
        if self._charge is not None:
            self._charge(key)
        value = self._compute(key)
        size = self._measure(key, value) + ENTRY_BYTES
        with self._lock:
            if key not in self._entries:
                self._entries[key] = value, size
                self.size_bytes += size
            while self.size_bytes > self._budget_bytes:
                _, (_, evicted_size) = self._entries.popitem(last=False)
                self.size_bytes -= evicted_size
        return value

    def __len__(self) -> int:
        return len(self._entries)


def estimate_bytes(value: Any) -> int:
    """Estimates the memory of text, bytes, an array, or a tuple of these."""
    if isinstance(value, np.ndarray):
        return value.nbytes + _ARRAY_BYTES
    inner = sum(map(estimate_bytes, value)) if isinstance(value, tuple) else 0
    return sys.getsizeof(value) + inner


def _measure(key: Hashable, value: object) -> int:
    return estimate_bytes(key) + (0 if value is key else estimate_bytes(value))
