"""Attention over slots, as Hugging Face's models call it.

A pass of the model has the tokens of many sequences in one row: first one token each of those that are being sampled,
then pieces of prompts. The former attend together, in one product over their slots; on a GPU, where every call costs
more than what it computes, so do pieces of about the same length. So nobody's keys are multiplied with another one's
queries, and where slots lie side by side, or each piece goes by itself, nothing is copied.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from polar.engines.embedded.kv_cache import KVCache
from polar.errors import ConfigError

ATTENTION_NAME = "polar_slots"
_MAX_READ_FACTOR = 4
"""So many times more slots than are asked for are read, rather than copied together."""
_MAX_PADDING_FACTOR = 2
"""Pieces are padded to at most so many times their tokens, to attend together."""
_MAX_GROUP_SCORES = 2**24
"""Queries times keys of pieces that attend together, at most: so large is their mask, once for each query head that
shares a key's."""
_MASK_ALIGNMENT_KEYS = 8
"""Keys that a mask's rows are padded to: the kernels want it so, and would copy it in every layer."""


class SlotPart(Struct):
    """Tokens `start` to `stop` (exclusive) of the sequence in a slot."""

    slot: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


class GroupedParts(Struct):
    """Parts that attend in one product, each in a row of its own."""

    tokens: slice  # theirs, in the pass
    rows: slice | torch.Tensor  # the slots that are read
    row: torch.Tensor  # of each token, among these
    column: torch.Tensor  # of each token, among its row's queries
    positions: torch.Tensor  # [rows, queries]: the positions
    key_count: int  # keys
    _biases: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def get_bias(self, shared: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[rows, 1, queries x shared, keys]: 0 for what is seen. The same in all layers of a kind."""
        if (shared, window) not in self._biases:
            length = -self.key_count % _MASK_ALIGNMENT_KEYS + self.key_count
            keys = torch.arange(length, device=self.positions.device)
            seen = keys <= self.positions[:, :, None]
            if window is not None:
                seen &= keys > self.positions[:, :, None] - window
            bias = torch.zeros(seen.shape, device=seen.device, dtype=dtype).masked_fill_(~seen, -torch.inf)
            rows, queries = self.positions.shape
            if queries > 1:
                bias = bias[:, :, None].expand(-1, -1, shared, -1).reshape(rows, queries * shared, length)
            self._biases[shared, window] = bias[:, None, :, : self.key_count]
        return self._biases[shared, window]


class SinglePart(Struct):
    """A part that attends by itself."""

    tokens: slice
    part: SlotPart
    positions: torch.Tensor  # [tokens, 1]: their positions
    visible: torch.Tensor  # [tokens, keys]


class AttentionPlan(Struct):
    """What stands where in a pass."""

    slots: KVCache
    slot_indices: torch.Tensor  # of each token
    positions: torch.Tensor
    groups: list[GroupedParts | SinglePart]


def build_plan(slots: KVCache, parts: Sequence[SlotPart], device: torch.device, separate: bool) -> AttentionPlan:
    """Of a pass with these parts: those with a single token first, then others by their lengths. `separate`: the latter
    each by itself, for which a CPU has a kernel, and a GPU none that takes a mask and shared heads."""
    counts = [part.count for part in parts]
    positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    groups: list[GroupedParts | SinglePart] = []
    first = 0
    for group in _group_parts(parts, separate):
        tokens = slice(first, first := first + sum(part.count for part in group))
        if separate and group[0].count > 1:
            at = torch.arange(group[0].start, group[0].stop, device=device)[:, None]
            groups.append(SinglePart(tokens, group[0], at, torch.arange(group[0].stop, device=device) <= at))
        else:
            groups.append(_build_group(tokens, group, device))
    places = np.repeat([part.slot for part in parts], counts)
    return AttentionPlan(slots, torch.from_numpy(places).to(device), torch.from_numpy(positions).to(device), groups)


def _group_parts(parts: Sequence[SlotPart], separate: bool) -> Iterator[list[SlotPart]]:
    group: list[SlotPart] = []
    tokens = longest = keys = 0
    for part in parts if separate else _split_long_parts(parts):
        padded = (len(group) + 1) * max(longest, part.count)
        if group and (
            (separate and part.count > 1)
            or (part.count == 1) != (longest == 1)
            or padded > _MAX_PADDING_FACTOR * (tokens + part.count)
            or padded * max(keys, part.stop) > _MAX_GROUP_SCORES
        ):
            yield group
            group, tokens, longest, keys = [], 0, 0, 0
        group.append(part)
        tokens, longest, keys = tokens + part.count, max(longest, part.count), max(keys, part.stop)
    yield group


def _split_long_parts(parts: Sequence[SlotPart]) -> Iterator[SlotPart]:
    """The same tokens; of long parts behind much, some at a time."""
    for part in parts:
        most = max(1, _MAX_GROUP_SCORES // part.stop)
        for start in range(part.start, part.stop, most):
            yield SlotPart(part.slot, start, min(start + most, part.stop))


def _build_group(tokens: slice, parts: Sequence[SlotPart], device: torch.device) -> GroupedParts:
    places = np.array([part.slot for part in parts])
    counts = [part.count for part in parts]
    queries = max(counts)
    first, last = int(places.min()), int(places.max())
    rows: slice | torch.Tensor
    apart = len(set(places.tolist())) == len(parts)  # else some are parts of the same sequence
    if apart and last - first < (_MAX_READ_FACTOR if queries == 1 else 1) * len(parts):
        rows, own, count = slice(first, last + 1), places - first, last + 1 - first
    else:
        rows, own, count = torch.from_numpy(places).to(device), np.arange(len(parts)), len(parts)
    row = np.repeat(own, counts)
    column = np.concatenate([np.arange(count) for count in counts])
    at = np.zeros((count, queries), np.int64)  # what is nobody's sees its slot's first key
    at[row, column] = np.repeat([part.start for part in parts], counts) + column

    def there(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return GroupedParts(tokens, rows, there(row), there(column), there(at), key_count=max(part.stop for part in parts))


def register_attention() -> None:
    """Under ATTENTION_NAME, for `attn_implementation`."""
    transformers: Any = import_module("transformers")
    transformers.AttentionInterface.register(ATTENTION_NAME, _attend)
    transformers.AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)  # a plan says who sees what


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: AttentionPlan | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, tokens, heads, width]"""
    if plan is None or any(others.get(name) is not None for name in ("softcap", "s_aux")):
        raise ConfigError("The embedded engine can't compute this model's attention: serve it with vLLM.")
    keys, values = plan.slots.get_layer(module.layer_idx, key, value)
    keys[plan.slot_indices, :, plan.positions] = key[0].transpose(0, 1)
    values[plan.slot_indices, :, plan.positions] = value[0].transpose(0, 1)
    parts = [
        _attend_grouped(group, query[0, :, group.tokens], keys, values, scaling, sliding_window)
        if isinstance(group, GroupedParts)
        else _attend_single(group, query[:, :, group.tokens], keys, values, scaling, sliding_window)
        for group in plan.groups
    ]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[None], None


def _attend_grouped(
    group: GroupedParts,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[tokens, heads, width]. The query heads that share a key's head are that one's queries."""
    heads, count, width = query.shape
    keys, values = keys[group.rows, :, : group.key_count], values[group.rows, :, : group.key_count]
    rows, queries = group.positions.shape
    shared = heads // keys.shape[1]
    padded = query.new_zeros(rows, queries, shared, keys.shape[1], width)
    padded[group.row, group.column] = query.view(keys.shape[1], shared, count, width).permute(2, 1, 0, 3)
    out = scaled_dot_product_attention(
        padded.view(rows, queries * shared, keys.shape[1], width).transpose(1, 2),
        keys,
        values,
        attn_mask=group.get_bias(shared, window, query.dtype),
        scale=scaling,
    )  # [rows, key heads, queries x shared, width]
    out = out.view(rows, keys.shape[1], queries, shared, -1)[group.row, :, group.column]
    return out.reshape(count, heads, -1)


def _attend_single(
    group: SinglePart,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[tokens, heads, width]"""
    slot, length = group.part.slot, group.part.stop
    seen = group.visible
    if window is not None:
        seen = seen & (torch.arange(length, device=query.device) > group.positions - window)
    keys, values = keys[slot, None, :, :length], values[slot, None, :, :length]
    out = scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)
