"""Attention over slots, as Hugging Face's models call it.

A pass of the model has the tokens of many sequences in one row: first one token each of those that are being sampled,
then pieces of prompts. The former attend together, in one product over their slots; the latter each by themselves. So
nobody's keys are multiplied with another one's queries, and nothing is copied: the slots between the first and the last
in question are read as they lie, where they are not too many.
"""

from importlib import import_module
from typing import Any

import torch
from msgspec import Struct
from torch.nn.functional import scaled_dot_product_attention

from polar.engines.embedded.slots import Slots
from polar.errors import ConfigError

NAME = "polar_slots"
_SPARSE = 4
"""So many times more slots than are asked for are read, rather than copied together."""


class Singles(Struct):
    """Sequences with one token in this pass."""

    slots: torch.Tensor  # theirs
    positions: torch.Tensor  # of the token in its sequence
    rows: slice | torch.Tensor  # the slots that are read
    inside: torch.Tensor  # where theirs are among these
    seen: torch.Tensor  # [rows, keys]
    at: torch.Tensor  # [rows, 1]: the positions, by row

    @property
    def longest(self) -> int:
        return self.seen.shape[1]


class Piece(Struct):
    """Tokens `start` to `stop` (exclusive) of the sequence in a slot."""

    slot: int
    start: int
    stop: int
    at: torch.Tensor  # [tokens, 1]: their positions
    seen: torch.Tensor  # [tokens, keys]


class Plan(Struct):
    """What stands where in a pass: the singles first, then the pieces in their order."""

    slots: Slots
    singles: Singles | None
    pieces: list[Piece]


def singles(slots: list[int], positions: list[int], device: Any) -> Singles | None:
    if not slots:
        return None
    first, last = min(slots), max(slots)
    places = torch.tensor(slots, device=device)
    rows: slice | torch.Tensor
    if last - first < _SPARSE * len(slots):
        rows, inside, count = slice(first, last + 1), places - first, last + 1 - first
    else:
        rows, inside, count = places, torch.arange(len(slots), device=device), len(slots)
    own = torch.tensor(positions, device=device)
    at = torch.zeros(count, 1, device=device, dtype=own.dtype)  # a row that is nobody's sees its first key
    at[inside, 0] = own
    seen = torch.arange(max(positions) + 1, device=device) <= at
    return Singles(places, own, rows, inside, seen, at)


def piece(slot: int, start: int, stop: int, device: Any) -> Piece:
    at = torch.arange(start, stop, device=device)[:, None]
    return Piece(slot, start, stop, at, torch.arange(stop, device=device) <= at)


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
    parts = []
    at = 0
    if (them := plan.singles) is not None:
        at = len(them.slots)
        keys[them.slots, :, them.positions] = key[0, :, :at].transpose(0, 1)
        values[them.slots, :, them.positions] = value[0, :, :at].transpose(0, 1)
        parts.append(_single(them, query[0, :, :at], keys, values, scaling, sliding_window))
    for piece in plan.pieces:
        end = at + piece.stop - piece.start
        keys[piece.slot, :, piece.start : piece.stop] = key[0, :, at:end]
        values[piece.slot, :, piece.start : piece.stop] = value[0, :, at:end]
        parts.append(_piece(piece, query[:, :, at:end], keys, values, scaling, sliding_window))
        at = end
    return torch.cat(parts)[None], None


def _single(
    them: Singles,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[tokens, heads, width]. The query heads that share a key's head are that one's queries."""
    heads, count, width = query.shape
    keys, values = keys[them.rows, :, : them.longest], values[them.rows, :, : them.longest]
    seen = them.seen
    if window is not None:
        seen = seen & (torch.arange(them.longest, device=query.device) > them.at - window)
    grouped = query.new_zeros(len(keys), keys.shape[1], heads // keys.shape[1], width)
    grouped[them.inside] = query.transpose(0, 1).reshape(count, *grouped.shape[1:])
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None], scale=scaling)
    return out[them.inside].reshape(count, heads, values.shape[-1])


def _piece(
    piece: Piece,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[tokens, heads, width]"""
    seen = piece.seen
    if window is not None:
        seen = seen & (torch.arange(piece.stop, device=query.device) > piece.at - window)
    keys, values = keys[piece.slot, None, :, : piece.stop], values[piece.slot, None, :, : piece.stop]
    out = scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)
