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

from polar.engines.embedded.slots import Slots
from polar.errors import ConfigError

NAME = "polar_slots"
_SPARSE = 4
"""So many times more slots than are asked for are read, rather than copied together."""
_PADDED = 2
"""Pieces are padded to at most so many times their tokens, to attend together."""
_SCORES = 2**24
"""Queries times keys of pieces that attend together, at most: so large is their mask, once for each query head that
shares a key's."""
_ALIGNED = 8
"""Keys that a mask's rows are padded to: the kernels want it so, and would copy it in every layer."""


class Part(Struct):
    """Tokens `start` to `stop` (exclusive) of the sequence in a slot."""

    slot: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


class Together(Struct):
    """Parts that attend in one product, each in a row of its own."""

    tokens: slice  # theirs, in the pass
    rows: slice | torch.Tensor  # the slots that are read
    row: torch.Tensor  # of each token, among these
    column: torch.Tensor  # of each token, among its row's queries
    at: torch.Tensor  # [rows, queries]: the positions
    longest: int  # keys
    _biases: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def bias(self, shared: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[rows, 1, queries x shared, keys]: 0 for what is seen. The same in all layers of a kind."""
        if (shared, window) not in self._biases:
            length = -self.longest % _ALIGNED + self.longest
            keys = torch.arange(length, device=self.at.device)
            seen = keys <= self.at[:, :, None]
            if window is not None:
                seen &= keys > self.at[:, :, None] - window
            bias = torch.zeros(seen.shape, device=seen.device, dtype=dtype).masked_fill_(~seen, -torch.inf)
            rows, queries = self.at.shape
            if queries > 1:
                bias = bias[:, :, None].expand(-1, -1, shared, -1).reshape(rows, queries * shared, length)
            self._biases[shared, window] = bias[:, None, :, : self.longest]
        return self._biases[shared, window]


class Alone(Struct):
    """A part that attends by itself."""

    tokens: slice
    part: Part
    at: torch.Tensor  # [tokens, 1]: their positions
    seen: torch.Tensor  # [tokens, keys]


class Plan(Struct):
    """What stands where in a pass."""

    slots: Slots
    slot: torch.Tensor  # of each token
    position: torch.Tensor
    groups: list[Together | Alone]


def plan(slots: Slots, parts: Sequence[Part], device: torch.device, alone: bool) -> Plan:
    """Of a pass with these parts: those with a single token first, then others by their lengths. `alone`: the latter
    each by itself, for which a CPU has a kernel, and a GPU none that takes a mask and shared heads."""
    counts = [part.count for part in parts]
    positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    groups: list[Together | Alone] = []
    first = 0
    for group in _groups(parts, alone):
        tokens = slice(first, first := first + sum(part.count for part in group))
        if alone and group[0].count > 1:
            at = torch.arange(group[0].start, group[0].stop, device=device)[:, None]
            groups.append(Alone(tokens, group[0], at, torch.arange(group[0].stop, device=device) <= at))
        else:
            groups.append(_together(tokens, group, device))
    places = np.repeat([part.slot for part in parts], counts)
    return Plan(slots, torch.from_numpy(places).to(device), torch.from_numpy(positions).to(device), groups)


def _groups(parts: Sequence[Part], alone: bool) -> Iterator[list[Part]]:
    group: list[Part] = []
    tokens = longest = keys = 0
    for part in parts if alone else _bounded(parts):
        padded = (len(group) + 1) * max(longest, part.count)
        if group and (
            (alone and part.count > 1)
            or (part.count == 1) != (longest == 1)
            or padded > _PADDED * (tokens + part.count)
            or padded * max(keys, part.stop) > _SCORES
        ):
            yield group
            group, tokens, longest, keys = [], 0, 0, 0
        group.append(part)
        tokens, longest, keys = tokens + part.count, max(longest, part.count), max(keys, part.stop)
    yield group


def _bounded(parts: Sequence[Part]) -> Iterator[Part]:
    """The same tokens; of long parts behind much, some at a time."""
    for part in parts:
        most = max(1, _SCORES // part.stop)
        for start in range(part.start, part.stop, most):
            yield Part(part.slot, start, min(start + most, part.stop))


def _together(tokens: slice, parts: Sequence[Part], device: torch.device) -> Together:
    places = np.array([part.slot for part in parts])
    counts = [part.count for part in parts]
    queries = max(counts)
    first, last = int(places.min()), int(places.max())
    rows: slice | torch.Tensor
    apart = len(set(places.tolist())) == len(parts)  # else some are parts of the same sequence
    if apart and last - first < (_SPARSE if queries == 1 else 1) * len(parts):
        rows, own, count = slice(first, last + 1), places - first, last + 1 - first
    else:
        rows, own, count = torch.from_numpy(places).to(device), np.arange(len(parts)), len(parts)
    row = np.repeat(own, counts)
    column = np.concatenate([np.arange(count) for count in counts])
    at = np.zeros((count, queries), np.int64)  # what is nobody's sees its slot's first key
    at[row, column] = np.repeat([part.start for part in parts], counts) + column

    def there(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Together(tokens, rows, there(row), there(column), there(at), longest=max(part.stop for part in parts))


def register() -> None:
    """Under NAME, for `attn_implementation`."""
    transformers: Any = import_module("transformers")
    transformers.AttentionInterface.register(NAME, _attend)
    transformers.AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # a plan says who sees what


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: Plan | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, tokens, heads, width]"""
    if plan is None or any(others.get(name) is not None for name in ("softcap", "s_aux")):
        raise ConfigError("The embedded engine can't compute this model's attention: serve it with vLLM.")
    keys, values = plan.slots.layer(module.layer_idx, key, value)
    keys[plan.slot, :, plan.position] = key[0].transpose(0, 1)
    values[plan.slot, :, plan.position] = value[0].transpose(0, 1)
    parts = [
        _attend_together(group, query[0, :, group.tokens], keys, values, scaling, sliding_window)
        if isinstance(group, Together)
        else _attend_alone(group, query[:, :, group.tokens], keys, values, scaling, sliding_window)
        for group in plan.groups
    ]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[None], None


def _attend_together(
    group: Together,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[tokens, heads, width]. The query heads that share a key's head are that one's queries."""
    heads, count, width = query.shape
    keys, values = keys[group.rows, :, : group.longest], values[group.rows, :, : group.longest]
    rows, queries = group.at.shape
    shared = heads // keys.shape[1]
    padded = query.new_zeros(rows, queries, shared, keys.shape[1], width)
    padded[group.row, group.column] = query.view(keys.shape[1], shared, count, width).permute(2, 1, 0, 3)
    out = scaled_dot_product_attention(
        padded.view(rows, queries * shared, keys.shape[1], width).transpose(1, 2),
        keys,
        values,
        attn_mask=group.bias(shared, window, query.dtype),
        scale=scaling,
    )  # [rows, key heads, queries x shared, width]
    out = out.view(rows, keys.shape[1], queries, shared, -1)[group.row, :, group.column]
    return out.reshape(count, heads, -1)


def _attend_alone(
    group: Alone,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[tokens, heads, width]"""
    slot, length = group.part.slot, group.part.stop
    seen = group.seen
    if window is not None:
        seen = seen & (torch.arange(length, device=query.device) > group.at - window)
    keys, values = keys[slot, None, :, :length], values[slot, None, :, :length]
    out = scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)
