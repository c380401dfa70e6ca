"""Flash attention of a chunk to all that came before it, on CUDA.

Queries see the pieces of their context whole, and themselves causally where they are one path. Each is a call of an
attention kernel, and they are joined by their normalisers. Going backwards, each call is given the joint output and
normaliser, and so gives exactly its part of the gradient. What comes back to a piece goes straight to whose it is, and
no copy of a long one is kept.

cuDNN's kernel is the fastest on Hopper, by far, but needs a plan of its own for every pair of lengths (0.14 s on an
H200). So lengths are made round: queries are filled up, and of the context a round part has a call of its own. What is
left of it, or all of it where it is short, goes before the queries' own keys, and as many queries that nobody asked for
go before the queries, so that all of this is one path.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten

QUERIES, KEYS = 512, 512
"""What cuDNN's lengths are multiples of."""
SHORT = 4
"""A context is short if it is no longer than such a part of the queries: 4 % more is computed then, at most. (What is
left of a longer one is less than KEYS, and so many more queries see all of it: that shows only where few are asked.)"""


def takes(query: Tensor) -> bool:
    """Whether there is a kernel for such tensors."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in (64, 96, 128)


class Piece(Struct):
    """Keys and values of [1, heads, tokens, width] that somebody else computed, and who is told the gradients of some
    of them (from which to which, of the keys, of the values)."""

    key: Tensor
    value: Tensor
    give_back: Callable[[int, int, Tensor, Tensor], None]


def joined_attention(
    query: Tensor, key: Tensor, value: Tensor, context: Sequence[Piece], scale: float, *, compiled: bool = False
) -> Tensor:
    """`key` and `value` are those of the queries themselves."""
    apply: Any = _Joined.apply
    result: Tensor = apply(query, key, value, context, scale, _join(compiled))
    return result


def round_part(context: int) -> int:
    """How much of a context of such a length can have calls of its own."""
    return context - context % KEYS


def extended_attention(
    query: Tensor, out: Tensor, normaliser: Tensor, context: Sequence[Piece], scale: float, *, compiled: bool = False
) -> Tensor:
    """`out` and `normaliser` ([1, heads, queries]) are what somebody else's attention says of other keys. The context
    has a round length: see `round_part`."""
    count = query.shape[2]
    filled = [_filled(tensor, 0, -count % QUERIES) for tensor in (query, out, normaliser[..., None])]
    apply: Any = _Extended.apply
    result: Tensor = apply(*filled, context, scale, _join(compiled))
    return result[:, :, :count]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Sequence[Piece], scale: float, join: "Join"
    ) -> Tensor:
        keys, values = _gathered(context, query)
        before, count = keys.shape[2], query.shape[2]
        edge = 0 if before <= count // SHORT else round_part(before)
        rest = before - edge
        # Behind all others none of them looks.
        ctx.edge, ctx.own, fill = edge, slice(rest, rest + count), -(rest + count) % QUERIES
        query = _filled(query, rest, fill)
        key, value = (
            _filled(torch.cat([theirs[:, :, edge:], own], 2) if rest else own, 0, fill)
            for theirs, own in ((keys, key), (values, value))
        )
        out, normaliser, ctx.state = _forward(query, key, value, True, scale)
        if edge:
            more, other, ctx.whole_state = _forward(query, keys[:, :, :edge], values[:, :, :edge], False, scale)
            out, normaliser = join(out, normaliser, more, other)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.context, ctx.scale = context, scale
        return out[:, :, ctx.own]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        # Nothing comes from where nobody asked.
        grad = _filled(grad, ctx.own.start, query.shape[2] - ctx.own.stop).contiguous()
        dq, dk, dv = _backward(grad, query, key, value, out, normaliser, ctx.state, True, ctx.scale)
        _give_back(ctx.context, ctx.edge, dk[:, :, : ctx.own.start], dv[:, :, : ctx.own.start])
        if ctx.edge:
            keys, values = (tensor[:, :, : ctx.edge] for tensor in _gathered(ctx.context, query))
            more, *theirs = _backward(grad, query, keys, values, out, normaliser, ctx.whole_state, False, ctx.scale)
            _give_back(ctx.context, 0, *theirs)
            dq = dq + more
        return dq[:, :, ctx.own], dk[:, :, ctx.own], dv[:, :, ctx.own], None, None, None


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        own: Tensor,
        own_normaliser: Tensor,
        context: Sequence[Piece],
        scale: float,
        join: "Join",
    ) -> Tensor:
        more, other, ctx.state = _forward(query, *_gathered(context, query), False, scale)
        out, normaliser = join(own, own_normaliser, more, other)
        ctx.save_for_backward(query, own, own_normaliser, out, normaliser)
        ctx.context, ctx.scale = context, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The joint output is a mean of the parts, weighed by their normalisers' shares."""
        query, own, own_normaliser, out, normaliser = ctx.saved_tensors
        grad = grad.contiguous()
        keys, values = _gathered(ctx.context, query)
        dq, *theirs = _backward(grad, query, keys, values, out, normaliser, ctx.state, False, ctx.scale)
        _give_back(ctx.context, 0, *theirs)
        share = torch.exp(own_normaliser - normaliser)
        further = ((own.float() - out.float()) * grad.float()).sum(-1, keepdim=True)
        return dq, (grad * share).to(own.dtype), (share * further).to(own_normaliser.dtype), None, None, None


def _filled(tensor: Tensor, before: int, behind: int) -> Tensor:
    """With so many zeros before and behind its tokens."""
    return functional.pad(tensor, (0, 0, before, behind)) if before or behind else tensor


def _give_back(context: Sequence[Piece], start: int, dk: Tensor, dv: Tensor) -> None:
    """To the pieces in which the context's tokens from `start` on lie."""
    at, stop = 0, start + dk.shape[2]
    for piece in context:
        low, high = max(start, at), min(stop, at + piece.key.shape[2])
        if low < high:
            here = slice(low - start, high - start)
            piece.give_back(low - at, high - at, dk[:, :, here], dv[:, :, here])
        at += piece.key.shape[2]


def _gathered(context: Sequence[Piece], query: Tensor) -> tuple[Tensor, Tensor]:
    """Its keys and values in a row: many small pieces would be many small calls. The backward pass gathers them again,
    since memory is scarcer than time."""
    if not context:
        return query[:, :, :0], query[:, :, :0]
    if len(context) == 1:
        return context[0].key, context[0].value
    return torch.cat([piece.key for piece in context], 2), torch.cat([piece.value for piece in context], 2)


Join = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Two outputs, each with its normaliser, as one."""


def _join(compiled: bool) -> Join:
    """Step by step it reads and writes everything six times."""
    return _compiled_join() if compiled else _joined


@cache
def _compiled_join() -> Join:
    return torch.compile(_joined, dynamic=True)


def _joined(one: Tensor, log_one: Tensor, other: Tensor, log_other: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(log_one, log_other)
    out = torch.lerp(one.float(), other.float(), torch.exp(log_other - both).float())
    return out.to(one.dtype), both


# The kernels. Normalisers are [1, heads, queries, 1], in fp32.


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Output, normaliser, and what the backward pass is to be given besides."""
    out, normaliser, *state = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, normaliser, state[:6]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    state: Any,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths_q, lengths_k, most_q, most_k, seed, offset = state
    lengths = lengths_q, lengths_k, most_q, most_k
    back: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, normaliser, seed, offset, None, *lengths, 0.0, causal, scale=scale
    )
    return back
