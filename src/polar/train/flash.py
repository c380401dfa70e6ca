"""Flash attention of a chunk to all that came before it, on CUDA.

Queries see the pieces of their context whole, and themselves causally where they are one path. Each is a call of an
attention kernel, and they are joined by their normalisers. Going backwards, each call is given the joint output and
normaliser, and so gives exactly its part of the gradient. So no piece is ever copied, and what comes back to one goes
straight to whose it is.

cuDNN's kernel is the fastest on Hopper, by far, but needs a plan of its own for every pair of lengths (0.14 s on an
H200). So lengths are made round: queries are filled up, and what is left of a piece goes to the other kernel.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten

QUERIES, KEYS = 512, 2048
"""What cuDNN's lengths are multiples of."""


def takes(query: Tensor) -> bool:
    """Whether there is a kernel for such tensors."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in (64, 96, 128)


class Piece(Struct):
    """Keys and values of [1, heads, tokens, width] that somebody else computed, and who is told the gradients of some
    of them (from which to which, of the keys, of the values)."""

    key: Tensor
    value: Tensor
    give_back: Callable[[int, int, Tensor, Tensor], None]


def joined_attention(query: Tensor, key: Tensor, value: Tensor, context: Sequence[Piece], scale: float) -> Tensor:
    """`key` and `value` are those of the queries themselves."""
    count = query.shape[2]
    fill = (0, 0, 0, -count % QUERIES)  # behind all others, where none of them looks
    filled = [functional.pad(tensor, fill) for tensor in (query, key, value)] if fill[-1] else (query, key, value)
    apply: Any = _Joined.apply
    result: Tensor = apply(*filled, context, scale)
    return result[:, :, :count]


def extended_attention(
    query: Tensor, out: Tensor, normaliser: Tensor, context: Sequence[Piece], scale: float
) -> Tensor:
    """`out` and `normaliser` ([1, heads, queries]) are what somebody else's attention says of other keys."""
    count = query.shape[2]
    fill = (0, 0, 0, -count % QUERIES)
    given = (query, out, normaliser[..., None])
    apply: Any = _Extended.apply
    result: Tensor = apply(*(functional.pad(tensor, fill) if fill[-1] else tensor for tensor in given), context, scale)
    return result[:, :, :count]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Sequence[Piece], scale: float) -> Tensor:
        out, normaliser, own = _forward(query, key, value, True, scale)
        out, normaliser, states = _with_context(query, out, normaliser, context, scale)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.context, ctx.scale, ctx.own, ctx.states = context, scale, own, states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = _backward(grad, query, key, value, out, normaliser, ctx.own, True, ctx.scale)
        for more in _back_to_context(grad, query, out, normaliser, ctx):
            dq = dq + more
        return dq, dk, dv, None, None


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, own: Tensor, own_normaliser: Tensor, context: Sequence[Piece], scale: float
    ) -> Tensor:
        out, normaliser, states = _with_context(query, own, own_normaliser, context, scale)
        ctx.save_for_backward(query, own, own_normaliser, out, normaliser)
        ctx.context, ctx.scale, ctx.states = context, scale, states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The joint output is a mean of the parts, weighed by their normalisers' shares."""
        query, own, own_normaliser, out, normaliser = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.zeros_like(query)
        for more in _back_to_context(grad, query, out, normaliser, ctx):
            dq = dq + more
        share = torch.exp(own_normaliser - normaliser)
        further = ((own.float() - out.float()) * grad.float()).sum(-1, keepdim=True)
        return dq, (grad * share).to(own.dtype), (share * further).to(own_normaliser.dtype), None, None


def _with_context(
    query: Tensor, out: Tensor, normaliser: Tensor, context: Sequence[Piece], scale: float
) -> tuple[Tensor, Tensor, list[Any]]:
    states = []
    for start, stop, piece in _round(context):
        more, other, state = _forward(query, piece.key[:, :, start:stop], piece.value[:, :, start:stop], False, scale)
        states.append(state)
        out, normaliser = _joined(out, normaliser, more, other)
    return out, normaliser, states


def _back_to_context(grad: Tensor, query: Tensor, out: Tensor, normaliser: Tensor, ctx: Any) -> Iterable[Tensor]:
    """Gradients of the queries, piece by piece; those of keys and values go where they belong."""
    for (start, stop, piece), state in zip(_round(ctx.context), ctx.states, strict=True):
        key, value = piece.key[:, :, start:stop], piece.value[:, :, start:stop]
        more, *theirs = _backward(grad, query, key, value, out, normaliser, state, False, ctx.scale)
        piece.give_back(start, stop, *theirs)
        yield more


def _round(context: Iterable[Piece]) -> Iterable[tuple[int, int, Piece]]:
    """The pieces in parts of a round length, and what is left of each."""
    for piece in context:
        length = piece.key.shape[2]
        edge = length - length % KEYS
        if edge:
            yield 0, edge, piece
        if edge < length:
            yield edge, length, piece


def _joined(one: Tensor, log_one: Tensor, other: Tensor, log_other: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(log_one, log_other)
    out = torch.lerp(one.float(), other.float(), torch.exp(log_other - both).float())
    return out.to(one.dtype), both


# The kernels. Normalisers are [1, heads, queries, 1], in fp32.


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Output, normaliser, and what the backward pass is to be given besides."""
    if key.shape[2] % KEYS and not causal:
        out, normaliser, *state = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return out, normaliser[..., None], state[:6]
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
    back: tuple[Tensor, Tensor, Tensor]
    if key.shape[2] % KEYS and not causal:
        back = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, normaliser[..., 0], *lengths, 0.0, causal, seed, offset, scale=scale
        )
    else:
        back = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, normaliser, seed, offset, None, *lengths, 0.0, causal, scale=scale
        )
    return back
