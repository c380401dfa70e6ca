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

from polar.records.exchange import TokenIds

_NO_IDS: TokenIds = np.empty(0, np.int32)
_MIN_SAVED_TOKENS = 16
"""Tokens that one must save to be worth a copy, or to wait for another sequence that computes them just now."""


class CacheSlot(Struct, eq=False):
    """One sequence's keys and values."""

    index: int
    ids: TokenIds = field(default_factory=lambda: _NO_IDS)  # whose keys and values are there
    planned_ids: TokenIds = field(default_factory=lambda: _NO_IDS)  # all that its sequence is about to compute, and has
    in_use: bool = False
    last_acquired: int = 0  # when it was given out last

    def extend(self, ids: Sequence[int]) -> None:
        self.ids = np.concatenate((self.ids, np.asarray(ids, np.int32)))


class KVCache:
    def __init__(self, count: int, length: int) -> None:
        self.length = length
        self._slots = [CacheSlot(place) for place in range(count)]
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [slots, heads, length, width]
        self._clock = 0

    @property
    def has_free_slot(self) -> bool:
        return any(not slot.in_use for slot in self._slots)

    def get_layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, made when they are first seen; `key` and `value` ([1, heads, ..., width]) show
        their shapes, and where they are."""
        if index not in self._layers:
            self._layers[index] = self._allocate(key), self._allocate(value)
        return self._layers[index]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = len(self._slots), like.shape[1], self.length, like.shape[-1]
        if like.device.type != "cpu":
            return torch.zeros(shape, device=like.device, dtype=like.dtype)
        # Zeros that take no memory before something is written there: most slots are never filled.
        memory = mmap.mmap(-1, math.prod(shape) * like.itemsize)
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    def acquire_slot(self, context: TokenIds) -> CacheSlot | None:
        """A slot for a sequence, with as much of it as is known. None where there is none now, or where it is better to
        wait: another sequence is about to compute the same."""
        free = [slot for slot in self._slots if not slot.in_use]
        if not free:
            return None
        most = len(context) - 1  # of the last one something must be computed
        known = [min(_count_common_prefix(slot.ids, context), most) for slot in self._slots]
        best = max(self._slots, key=lambda slot: (known[slot.index], not slot.in_use))
        shared = known[best.index]
        if any(
            slot.in_use and min(_count_common_prefix(slot.planned_ids, context), most) >= shared + _MIN_SAVED_TOKENS
            for slot in self._slots
            if len(slot.ids) < len(slot.planned_ids)
        ):
            return None
        if not best.in_use and shared == len(best.ids):
            slot = best  # it goes on from there
        else:
            slot = min(free, key=lambda slot: (len(slot.ids) > 0, slot.last_acquired))
            if slot is not best and shared >= _MIN_SAVED_TOKENS:
                self._copy(best.index, slot.index, shared)
            elif slot is not best:
                shared = known[slot.index]
        self._clock += 1
        slot.ids, slot.planned_ids, slot.in_use, slot.last_acquired = context[:shared], context, True, self._clock
        return slot

    def _copy(self, source: int, target: int, length: int) -> None:
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def release_slot(self, slot: CacheSlot) -> None:
        slot.in_use, slot.planned_ids = False, _NO_IDS

    def clear(self) -> None:
        """Everything, for all slots; who has one must give it back. The numbers go, too: a mask hides what lies behind
        a sequence, but not if that is no number at all, which broken weights may have left there."""
        for slot in self._slots:
            slot.ids, slot.planned_ids = _NO_IDS, _NO_IDS
        self._layers.clear()


def _count_common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    unequal = np.flatnonzero(a[:length] != b[:length])
    return int(unequal[0]) if len(unequal) else length
