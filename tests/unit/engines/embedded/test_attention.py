"""Sequences that attend together see what each sees by itself."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines.embedded import attention
from polar.engines.embedded.attention import GroupedParts, SinglePart, SlotPart
from polar.engines.embedded.kv_cache import KVCache

CPU = torch.device("cpu")
HEADS, SHARED, WIDTH, LENGTH, COUNT = 2, 3, 8, 48, 9


@st.composite
def passes(draw: st.DrawFn) -> list[SlotPart]:
    """Each in a slot of its own, singles first, then by lengths."""
    slots = draw(st.permutations(range(COUNT)))
    bounds = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 18)), min_size=1, max_size=COUNT))
    parts = [SlotPart(slot, start, start + count) for slot, (start, count) in zip(slots, bounds, strict=False)]
    return sorted(parts, key=lambda part: part.count)


def attend(parts: Sequence[SlotPart], *, alone: bool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """And the keys that are there then."""
    torch.manual_seed(0)
    slots = KVCache(COUNT, LENGTH)
    shown = torch.zeros(1, HEADS, 1, WIDTH)
    for cached in slots.get_layer(0, shown, shown):
        cached.copy_(torch.randn(cached.shape))
    tokens = sum(part.count for part in parts)
    query = torch.randn(1, HEADS * SHARED, tokens, WIDTH)
    key, value = torch.randn(2, 1, HEADS, tokens, WIDTH)
    out, _ = attention._attend(
        SimpleNamespace(layer_idx=0),
        *(query, key, value, None),
        scaling=0.3,
        sliding_window=window,
        plan=attention.build_plan(slots, parts, CPU, alone),
    )
    return out, slots.get_layer(0, shown, shown)[0]


@settings(deadline=None)  # its first call starts PyTorch's threads
@given(parts=passes(), window=st.sampled_from([None, 5]))
def test_together_they_see_what_each_sees_alone(parts: list[SlotPart], window: int | None) -> None:
    together, keys = attend(parts, alone=False, window=window)
    alone, keys_alone = attend(parts, alone=True, window=window)
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(keys, keys_alone)
    one_by_one = torch.cat([attend_one(parts, number, window) for number in range(len(parts))])
    torch.testing.assert_close(together[0], one_by_one)


def attend_one(parts: Sequence[SlotPart], number: int, window: int | None) -> torch.Tensor:
    """Written down plainly."""
    _, keys = attend(parts, alone=True, window=window)
    torch.manual_seed(0)
    values = [torch.randn(keys.shape), torch.randn(keys.shape)][1]
    tokens = sum(part.count for part in parts)
    query = torch.randn(1, HEADS * SHARED, tokens, WIDTH)
    _, value = torch.randn(2, 1, HEADS, tokens, WIDTH)
    part, first = parts[number], sum(part.count for part in parts[:number])
    values[part.slot, :, part.start : part.stop] = value[0, :, first : first + part.count]
    out = torch.empty(part.count, HEADS * SHARED, WIDTH)
    for place in range(part.count):
        position = part.start + place
        low = 0 if window is None else max(0, position + 1 - window)
        for head in range(HEADS * SHARED):
            its_keys, its_values = (it[part.slot, head // SHARED, low : position + 1] for it in (keys, values))
            weights = (0.3 * its_keys @ query[0, head, first + place]).softmax(0)
            out[place, head] = weights @ its_values
    return out


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([1, 1, 1], [3]),
        ([1, 1, 5, 6, 7], [2, 3]),
        ([5, 6, 40], [2, 1]),  # the long one would have the others padded to its length
        ([1, 30], [1, 1]),
        ([7], [1]),
    ],
)
def test_pieces_of_like_lengths_go_together(counts: list[int], groups: list[int]) -> None:
    parts = [SlotPart(slot, 0, count) for slot, count in enumerate(counts)]
    plan = attention.build_plan(KVCache(COUNT, 64), parts, CPU, separate=False)
    edges = [0]
    for count in groups:
        edges.append(edges[-1] + count)
    expected = [slice(sum(counts[:low]), sum(counts[:high])) for low, high in pairwise(edges)]
    assert [group.tokens for group in plan.groups] == expected
    assert all(isinstance(group, GroupedParts) for group in plan.groups)
    each = attention.build_plan(KVCache(COUNT, 64), parts, CPU, separate=True).groups
    singles = counts.count(1)
    assert [isinstance(group, SinglePart) for group in each] == [False] * bool(singles) + [True] * (
        len(counts) - singles
    )


def test_a_mask_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more sequences, of a long piece, and of a piece behind much."""
    monkeypatch.setattr(attention, "_MAX_GROUP_SCORES", 4 * 20 * 20)

    def masks(parts: Sequence[SlotPart]) -> list[int]:
        groups = attention.build_plan(KVCache(COUNT, 128), parts, CPU, separate=False).groups
        assert [group.tokens.start for group in groups[1:]] == [group.tokens.stop for group in groups[:-1]]
        return [group.positions.numel() * group.key_count for group in groups if isinstance(group, GroupedParts)]

    for parts in ([SlotPart(slot, 0, 20) for slot in range(8)], [SlotPart(0, 0, 100)], [SlotPart(0, 80, 100)]):
        assert 1 < len(masks(parts)) < 8
        assert max(masks(parts)) <= attention._MAX_GROUP_SCORES


@given(parts=passes(), scores=st.integers(1, 400))
@settings(deadline=None)
def test_some_at_a_time_see_what_all_see(parts: list[SlotPart], scores: int) -> None:
    whole, _ = attend(parts, alone=True, window=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_MAX_GROUP_SCORES", scores)
        some, _ = attend(parts, alone=False, window=None)
    torch.testing.assert_close(some, whole)
