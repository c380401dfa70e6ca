"""Remembers what was computed from recent keys, bounded by the bytes that this takes."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 192
"""What the dictionary itself takes for an entry, about: its slot, its link and its size."""

_ARRAY_BYTES = 112
"""A NumPy array without its data."""


class Memo(Generic[K, V]):
    """Remembers `compute(key)` for the keys that were asked for last, `budget` bytes of keys and values. It is safe to
    use from several threads.

    Short texts are counted with all that surrounds them: a million of them take much more than their characters."""

    def __init__(
        self,
        compute: Callable[[K], V],
        budget_bytes: int,
        *,
        measure: Callable[[K, V], int] | None = None,
        charge: Callable[[K], None] | None = None,
    ) -> None:
        """`measure` gives an entry's bytes where `held_bytes` does not know its types. `charge` is called with each
        key that has to be computed; it may raise instead of allowing that."""
        self._compute = compute
        self._charge = charge
        self._measure = measure or _measure
        self._budget_bytes = budget_bytes
        self._known: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        self.size_bytes = 0
        """Bytes held, about."""

    def __call__(self, key: K) -> V:
        # Hits take no lock: each step is one call into C. They are frequent, and suppress() takes as long as the rest.
        held = self._known.get(key)
        if held is not None:
            try:  # noqa: SIM105
                self._known.move_to_end(key)
            except KeyError:  # another thread has just forgotten it
                pass
            return held[0]
        if self._charge is not None:
            self._charge(key)
        value = self._compute(key)
        size = self._measure(key, value) + ENTRY_BYTES
        with self._lock:
            if key not in self._known:
                self._known[key] = value, size
                self.size_bytes += size
            while self.size_bytes > self._budget_bytes:
                _, (_, freed) = self._known.popitem(last=False)
                self.size_bytes -= freed
        return value

    def __len__(self) -> int:
        return len(self._known)


def estimate_bytes(value: Any) -> int:
    """Of text, bytes, an array, or a tuple of these."""
    if isinstance(value, np.ndarray):
        return value.nbytes + _ARRAY_BYTES
    inner = sum(map(estimate_bytes, value)) if isinstance(value, tuple) else 0
    return sys.getsizeof(value) + inner


def _measure(key: Hashable, value: object) -> int:
    return estimate_bytes(key) + (0 if value is key else estimate_bytes(value))
