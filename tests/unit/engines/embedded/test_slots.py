"""Which slot a new sequence gets, and with how much of it known."""

import numpy as np
import torch

from polar.engines.embedded.slots import Ids, Slot, Slots

A: Ids = np.arange(100, dtype=np.int32)
B: Ids = np.arange(200, 300, dtype=np.int32)


def made(count: int) -> Slots:
    return Slots(count, 128)


def compute(slots: Slots, slot: Slot) -> None:
    """Its sequence's keys, as a model would: here each is its own id."""
    keys, values = slots.layer(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    start = len(slot.ids)
    keys[slot.place, 0, start : len(slot.coming), 0] = torch.from_numpy(slot.coming[start:]).float()
    values[slot.place, 0, start : len(slot.coming), 0] = torch.from_numpy(slot.coming[start:]).float()
    slot.extend(slot.coming[start:].tolist())


def used(slots: Slots, context: Ids) -> Slot:
    """A slot that a sequence has used and given back."""
    slot = slots.take(context)
    assert slot is not None
    compute(slots, slot)
    slots.give_back(slot)
    return slot


def holds(slots: Slots, slot: Slot) -> bool:
    keys, values = slots.layer(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    ids = torch.from_numpy(slot.ids).float()
    return all(bool((cached[slot.place, 0, : len(ids), 0] == ids).all()) for cached in (keys, values))


def test_a_conversation_goes_on_in_its_own_slot() -> None:
    slots = made(3)
    first, other = used(slots, A[:50]), used(slots, B)
    again = slots.take(A)
    assert again is first
    assert (len(again.ids), holds(slots, again), len(other.ids)) == (50, True, 100)


def test_a_prompt_that_is_known_elsewhere_is_copied() -> None:
    slots = made(3)
    first = slots.take(A)
    assert first is not None
    compute(slots, first)  # it is in use
    second = slots.take(np.concatenate((A[:60], B)))
    assert second is not None
    assert second is not first
    assert (len(second.ids), holds(slots, second), holds(slots, first)) == (60, True, True)


def test_what_another_one_is_about_to_compute_is_waited_for() -> None:
    slots = made(3)
    first = slots.take(A)
    assert first is not None
    assert slots.take(A) is None
    assert slots.take(B) is not None
    compute(slots, first)
    second = slots.take(A)
    assert second is not None
    assert len(second.ids) == 99  # the last token's logits are wanted


def test_without_a_free_slot_there_is_none() -> None:
    slots = made(1)
    first = slots.take(A)
    assert first is not None
    assert slots.take(B) is None
    slots.give_back(first)
    assert slots.take(B) is first


def test_the_slot_that_was_used_longest_ago_is_given_up() -> None:
    slots = made(2)
    old, young = used(slots, A), used(slots, B)
    assert slots.take(np.full(30, 7, np.int32)) is old
    assert len(young.ids) == 100


def test_nothing_is_found_after_forgetting() -> None:
    slots = made(2)
    used(slots, A)
    slots.forget()
    again = slots.take(A)
    assert again is not None
    assert len(again.ids) == 0
    shown = torch.zeros(1, 1, 1, 1)
    assert not any(cached.any() for cached in slots.layer(0, shown, shown))
