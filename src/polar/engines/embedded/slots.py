"""Keys and values of sequences, a slot each, and which of them a new sequence can begin with.

A slot remembers the ids whose keys and values it holds, also when nobody uses it any more: the next turn of a
conversation finds its own beginning there, and the samples of a group copy the prompt that they share. New weights
empty all of them (`forget`): nothing that older weights computed can be found again.
"""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct, field
from numpy.typing import NDArray

Ids = NDArray[np.int32]
_NONE: Ids = np.empty(0, np.int32)
_WORTH = 16
"""Tokens that one must save to be worth a copy, or to wait for another sequence that computes them just now."""


class Slot(Struct, eq=False):
    """One sequence's keys and values."""

    place: int
    ids: Ids = field(default_factory=lambda: _NONE)  # whose keys and values are there
    coming: Ids = field(default_factory=lambda: _NONE)  # all that its sequence is about to compute, and has
    used: bool = False
    last: int = 0  # when it was given out last

    def extend(self, ids: Sequence[int]) -> None:
        self.ids = np.concatenate((self.ids, np.asarray(ids, np.int32)))


class Slots:
    def __init__(self, count: int, length: int) -> None:
        self.length = length
        self._slots = [Slot(place) for place in range(count)]
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [slots, heads, length, width]
        self._clock = 0

    @property
    def free(self) -> bool:
        return any(not slot.used for slot in self._slots)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, made when they are first seen; `key` and `value` ([1, heads, ..., width]) show
        their shapes, and where they are."""
        if index not in self._layers:
            self._layers[index] = self._empty(key), self._empty(value)
        return self._layers[index]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = len(self._slots), like.shape[1], self.length, like.shape[-1]
        if like.device.type != "cpu":
            return torch.zeros(shape, device=like.device, dtype=like.dtype)
        # Zeros that take no memory before something is written there: most slots are never filled.
        memory = mmap.mmap(-1, math.prod(shape) * like.itemsize)
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    def take(self, context: Ids) -> Slot | None:
        """A slot for a sequence, with as much of it as is known. None where there is none now, or where it is better to
        wait: another sequence is about to compute the same."""
        free = [slot for slot in self._slots if not slot.used]
        if not free:
            return None
        most = len(context) - 1  # of the last one something must be computed
        known = [min(_common(slot.ids, context), most) for slot in self._slots]
        best = max(self._slots, key=lambda slot: (known[slot.place], not slot.used))
        shared = known[best.place]
        if any(
            slot.used and min(_common(slot.coming, context), most) >= shared + _WORTH
            for slot in self._slots
            if len(slot.ids) < len(slot.coming)
        ):
            return None
        if not best.used and shared == len(best.ids):
            slot = best  # it goes on from there
        else:
            slot = min(free, key=lambda slot: (len(slot.ids) > 0, slot.last))
            if slot is not best and shared >= _WORTH:
                self._copy(best.place, slot.place, shared)
            elif slot is not best:
                shared = known[slot.place]
        self._clock += 1
        slot.ids, slot.coming, slot.used, slot.last = context[:shared], context, True, self._clock
        return slot

    def _copy(self, source: int, target: int, length: int) -> None:
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def give_back(self, slot: Slot) -> None:
        slot.used, slot.coming = False, _NONE

    def forget(self) -> None:
        """Everything, for all slots; who has one must give it back. The numbers go, too: a mask hides what lies behind
        a sequence, but not if that is no number at all, which broken weights may have left there."""
        for slot in self._slots:
            slot.ids, slot.coming = _NONE, _NONE
        self._layers.clear()


def _common(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    unequal = np.flatnonzero(a[:length] != b[:length])
    return int(unequal[0]) if len(unequal) else length
