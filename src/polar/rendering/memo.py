"""What was computed of texts that come again and again, bounded by their length and not only by their number."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class Memo(Generic[V]):
    """Remembers `compute(text)` for the texts that were asked for last, `budget` characters of them. Safe to use from
    several threads."""

    def __init__(self, compute: Callable[[str], V], budget: int, charge: Callable[[str], None]) -> None:
        """`charge` is called with each text that has to be computed; it may raise instead of allowing that."""
        self._compute = compute
        self._charge = charge
        self._budget = budget
        self._known: OrderedDict[str, V] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def __call__(self, text: str) -> V:
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
                return self._known[text]
        self._charge(text)
        value = self._compute(text)
        with self._lock:
            if text not in self._known:
                self._known[text] = value
                self._size += len(text)
            while self._size > self._budget:
                forgotten, _ = self._known.popitem(last=False)
                self._size -= len(forgotten)
        return value
