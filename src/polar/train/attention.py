"""Attention along the paths of a tree.

The queries are a chunk's tokens. The keys are its context (the path to its first token) and the chunk itself. Query `q`
attends to key `k` of the chunk iff `k <= q < ends[k]`, and likewise to the context, whose tokens end where their
subtrees do. So one number per key describes the whole mask. A dense mask is built only on the CPU and for small chunks.

On CUDA, no mask is needed for the part of the context that the whole chunk attends to, nor for a chunk that is one path
(flash_attention.py). The rest uses FlexAttention, with a block mask computed from the keys' ends. On the CPU everything
is plain masked attention.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor
from torch.nn import functional

from polar.train.memory import to_device
from polar.train.packing import Chunk, PackedTrees

BLOCK_TOKENS = 128
"""Side length of FlexAttention's blocks, in tokens. FlexAttention needs at least that many queries."""
_MIN_HEAD_WIDTH = 16
"""The narrowest heads that FlexAttention supports."""
_KERNEL_OPTIONS: Any = {"BACKEND": "TRITON"}
"""Otherwise PyTorch may choose a kernel for single queries, which does not compile for varying lengths."""


class AttentionMask(Struct):
    """Which keys each query of a chunk attends to. Keys are the context's tokens, then the chunk's own. Queries and
    ends count from the chunk's first token."""

    queries: int
    context: int
    ends: Tensor  # int32, of each key
    depths: Tensor  # int32, of each key
    max_depth: int  # of them
    compiled: bool  # FlexAttention may be used
    masks: dict[int | None, Any] = field(default_factory=dict)  # by sliding window

    @classmethod
    def from_chunk(
        cls, packed: PackedTrees, chunk: Chunk, device: torch.device, *, compiled: bool, skip: int = 0
    ) -> "AttentionMask":
        """The mask of a chunk, without the first `skip` tokens of its context."""
        intervals = [*_skip_tokens(chunk.context, skip), (chunk.start, chunk.stop)]
        ends = np.concatenate([packed.subtree_ends[start:stop] for start, stop in intervals])
        depths = np.concatenate([packed.depths[start:stop] for start, stop in intervals])
        return cls(
            queries=len(chunk),
            context=chunk.context_length - skip,
            ends=to_device(np.minimum(ends - chunk.start, len(chunk)), device),
            depths=to_device(depths, device),
            max_depth=int(depths.max()),
            compiled=compiled,
        )

    def restrict_to_window(self, window: int | None) -> int | None:
        """The window, or None where every path is so short that the window hides nothing."""
        return window if window is not None and window <= self.max_depth else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Tensors of [1, heads, tokens, width]; `window` is how many tokens back a query sees, itself included."""
        window = self.restrict_to_window(window)
        if not self.supports_flex_attention(query):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=self._get_dense_mask(window), scale=scale, enable_gqa=True
            )
        return self.attend_with_lse(query, key, value, scale, window)[0]

    def supports_flex_attention(self, query: Tensor) -> bool:
        """Whether FlexAttention takes it."""
        return self.compiled and self.queries >= BLOCK_TOKENS and query.shape[-1] >= _MIN_HEAD_WIDTH

    def attend_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """FlexAttention's output, and the log-sum-exp of each head and query."""
        out, lse = _get_flex_attention()(query, key, value, self._get_block_mask(window), scale)
        return out, lse

    def _get_dense_mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            queries = torch.arange(self.queries, device=self.ends.device)[:, None]
            keys = torch.arange(-self.context, self.queries, device=self.ends.device)
            mask = (keys <= queries) & (queries < self.ends)
            if window is not None:
                mask &= self.depths[self.context :, None] - self.depths < window
            self.masks[window] = mask
        dense_mask: Tensor = self.masks[window]
        return dense_mask

    def _get_block_mask(self, window: int | None) -> Any:
        """FlexAttention's mask: which blocks are fully visible and which partially. It follows from each block's
        smallest and largest end, so no array of queries times keys is ever built."""
        if window not in self.masks:
            self.masks[window] = _build_block_mask(self, window)
        return self.masks[window]


@cache
def _get_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def flex(query: Tensor, key: Tensor, value: Tensor, blocks: Any, scale: float) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(
            query,
            key,
            value,
            block_mask=blocks,
            scale=scale,
            enable_gqa=True,
            kernel_options=_KERNEL_OPTIONS,
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None  # it was asked for
        return out, aux.lse

    return torch.compile(flex, dynamic=True)


def _skip_tokens(intervals: list[tuple[int, int]], skip: int) -> list[tuple[int, int]]:
    """The intervals without their first `skip` tokens."""
    remaining = []
    for start, stop in intervals:
        skipped_here = min(skip, stop - start)
        skip -= skipped_here
        if start + skipped_here < stop:
            remaining.append((start + skipped_here, stop))
    return remaining


def _build_block_mask(mask: AttentionMask, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    context, ends, depths = mask.context, mask.ends, mask.depths
    device = ends.device
    keys, queries = context + mask.queries, mask.queries
    pad = -keys % BLOCK_TOKENS
    lowest_ends = functional.pad(ends, (0, pad), value=2**31 - 1).view(-1, BLOCK_TOKENS).amin(1)
    highest_ends = functional.pad(ends, (0, pad), value=-(2**31)).view(-1, BLOCK_TOKENS).amax(1)
    first_key = torch.arange(0, keys, BLOCK_TOKENS, device=device) - context
    last_key = (first_key + BLOCK_TOKENS - 1).clamp(max=queries - 1)
    first_query = torch.arange(0, queries, BLOCK_TOKENS, device=device)[:, None]
    last_query = (first_query + BLOCK_TOKENS - 1).clamp(max=queries - 1)
    visible_blocks = (first_key <= last_query) & (highest_ends > first_query)
    full_blocks = (last_key <= first_query) & (lowest_ends > last_query)
    if window is not None:
        full_blocks = torch.zeros_like(full_blocks)

    offset = torch.full((), context, device=device)

    def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + offset) & (q < ends[k])

    max_distance = window or 0

    def visible_in_window(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(_batch, _head, q, k) & (depths[q + offset] - depths[k] < max_distance)

    return BlockMask.from_kv_blocks(
        *_list_blocks(visible_blocks & ~full_blocks),
        *_list_blocks(full_blocks),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=visible if window is None else visible_in_window,
        seq_lengths=(queries, keys),
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks, the number of set blocks, and the indices of all blocks, set ones first."""
    count = blocks.sum(1).to(torch.int32)
    block_indices = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], block_indices[None, None]
