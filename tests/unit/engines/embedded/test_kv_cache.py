"""Which slot a new sequence gets, and with how much of it known."""

import numpy as np
import torch

from polar.engines.embedded.kv_cache import CacheSlot, KVCache
from polar.records.exchange import TokenIds

A: TokenIds = np.arange(100, dtype=np.int32)
B: TokenIds = np.arange(200, 300, dtype=np.int32)


def made(count: int) -> KVCache:
    return KVCache(count, 128)


def compute(slots: KVCache, slot: CacheSlot) -> None:
    """Its sequence's keys, as a model would: here each is its own id."""
    keys, values = slots.get_layer(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    start = len(slot.ids)
    keys[slot.index, 0, start : len(slot.planned_ids), 0] = torch.from_numpy(slot.planned_ids[start:]).float()
    values[slot.index, 0, start : len(slot.planned_ids), 0] = torch.from_numpy(slot.planned_ids[start:]).float()
    slot.extend(slot.planned_ids[start:].tolist())


def used(slots: KVCache, context: TokenIds) -> CacheSlot:
    """A slot that a sequence has used and given back."""
    slot = slots.acquire_slot(context)
    assert slot is not None
    compute(slots, slot)
    slots.release_slot(slot)
    return slot


def holds(slots: KVCache, slot: CacheSlot) -> bool:
    keys, values = slots.get_layer(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    ids = torch.from_numpy(slot.ids).float()
    return all(bool((cached[slot.index, 0, : len(ids), 0] == ids).all()) for cached in (keys, values))


def test_a_conversation_goes_on_in_its_own_slot() -> None:
    slots = made(3)
    first, other = used(slots, A[:50]), used(slots, B)
    again = slots.acquire_slot(A)
    assert again is first
    assert (len(again.ids), holds(slots, again), len(other.ids)) == (50, True, 100)


def test_a_prompt_that_is_known_elsewhere_is_copied() -> None:
    slots = made(3)
    first = slots.acquire_slot(A)
    assert first is not None
    compute(slots, first)  # it is in use
    second = slots.acquire_slot(np.concatenate((A[:60], B)))
    assert second is not None
    assert second is not first
    assert (len(second.ids), holds(slots, second), holds(slots, first)) == (60, True, True)


def test_what_another_one_is_about_to_compute_is_waited_for() -> None:
    slots = made(3)
    first = slots.acquire_slot(A)
    assert first is not None
    assert slots.acquire_slot(A) is None
    assert slots.acquire_slot(B) is not None
    compute(slots, first)
    second = slots.acquire_slot(A)
    assert second is not None
    assert len(second.ids) == 99  # the last token's logits are wanted


def test_without_a_free_slot_there_is_none() -> None:
    slots = made(1)
    first = slots.acquire_slot(A)
    assert first is not None
    assert slots.acquire_slot(B) is None
    slots.release_slot(first)
    assert slots.acquire_slot(B) is first


def test_the_slot_that_was_used_longest_ago_is_given_up() -> None:
    slots = made(2)
    old, young = used(slots, A), used(slots, B)
    assert slots.acquire_slot(np.full(30, 7, np.int32)) is old
    assert len(young.ids) == 100


def test_nothing_is_found_after_forgetting() -> None:
    slots = made(2)
    used(slots, A)
    slots.clear()
    again = slots.acquire_slot(A)
    assert again is not None
    assert len(again.ids) == 0
    shown = torch.zeros(1, 1, 1, 1)
    assert not any(cached.any() for cached in slots.get_layer(0, shown, shown))
