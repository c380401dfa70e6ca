"""Flash attention of a chunk to all that came before it, on CUDA.

Queries see the pieces of their context whole, and themselves causally where they are one path. Each is a call of an
attention kernel, and they are joined by their normalisers. Going backwards, each call is given the joint output and
normaliser, and so gives exactly its part of the gradient. What comes back to a piece goes straight to whose it is, and
no copy of a long one is kept.

cuDNN's kernel is the fastest on Hopper, by far, but needs a plan of its own for every pair of lengths (0.14 s on an
H200). So lengths are made round: queries are filled up, and what is left of the context goes to the other kernel.

A short context needs no call of its own: it goes before the queries' own keys, and as many queries that nobody asked
for go before the queries, so that all of it is one path.
"""

from collections.abc import Callable, Iterable, Sequence
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
"""A context is short if it is no longer than such a part of the queries: 4 % more is computed then, at most."""


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
    count = query.shape[2]
    before = sum(piece.key.shape[2] for piece in context)
    apply: Any
    if 0 < before <= count // SHORT:
        apply = _Behind.apply
        behind: Tensor = apply(query, key, value, context, scale)
        return behind
    fill = (0, 0, 0, -count % QUERIES)  # behind all others, where none of them looks
    filled = [functional.pad(tensor, fill) for tensor in (query, key, value)] if fill[-1] else (query, key, value)
    apply = _Joined.apply
    result: Tensor = apply(*filled, context, scale, _join(compiled))
    return result[:, :, :count]


def extended_attention(
    query: Tensor, out: Tensor, normaliser: Tensor, context: Sequence[Piece], scale: float, *, compiled: bool = False
) -> Tensor:
    """`out` and `normaliser` ([1, heads, queries]) are what somebody else's attention says of other keys."""
    count = query.shape[2]
    fill = (0, 0, 0, -count % QUERIES)
    given = (query, out, normaliser[..., None])
    filled = [functional.pad(tensor, fill) if fill[-1] else tensor for tensor in given]
    apply: Any = _Extended.apply
    result: Tensor = apply(*filled, context, scale, _join(compiled))
    return result[:, :, :count]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Sequence[Piece], scale: float, join: "Join"
    ) -> Tensor:
        out, normaliser, own = _forward(query, key, value, True, scale)
        out, normaliser, states = _with_context(query, out, normaliser, context, scale, join)
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
        return dq, dk, dv, None, None, None


class _Behind(torch.autograd.Function):
    """Of queries behind a short context."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Sequence[Piece], scale: float) -> Tensor:
        keys, values = _gathered(context, query)
        before, count = keys.shape[2], query.shape[2]
        fill = -(before + count) % QUERIES
        query = functional.pad(query, (0, 0, before, fill))
        key, value = (functional.pad(torch.cat(both, 2), (0, 0, 0, fill)) for both in ((keys, key), (values, value)))
        out, normaliser, state = _forward(query, key, value, True, scale)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.context, ctx.scale, ctx.state, ctx.before, ctx.fill = context, scale, state, before, fill
        return out[:, :, before : before + count]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        own = slice(ctx.before, query.shape[2] - ctx.fill)
        grad = functional.pad(grad, (0, 0, ctx.before, ctx.fill))  # nothing comes from where nobody asked
        dq, dk, dv = _backward(grad, query, key, value, out, normaliser, ctx.state, True, ctx.scale)
        _give_back(ctx.context, 0, dk[:, :, : ctx.before], dv[:, :, : ctx.before])
        return dq[:, :, own], dk[:, :, own], dv[:, :, own], None, None


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
        out, normaliser, states = _with_context(query, own, own_normaliser, context, scale, join)
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
        return dq, (grad * share).to(own.dtype), (share * further).to(own_normaliser.dtype), None, None, None


def _with_context(
    query: Tensor, out: Tensor, normaliser: Tensor, context: Sequence[Piece], scale: float, join: "Join"
) -> tuple[Tensor, Tensor, list[Any]]:
    """And what the backward pass needs of each part."""
    states = []
    key, value = _gathered(context, query)
    for start, stop in _parts(key.shape[2]):
        more, other, state = _forward(query, key[:, :, start:stop], value[:, :, start:stop], False, scale)
        states.append(state)
        out, normaliser = join(out, normaliser, more, other)
    return out, normaliser, states


def _back_to_context(grad: Tensor, query: Tensor, out: Tensor, normaliser: Tensor, ctx: Any) -> Iterable[Tensor]:
    """Gradients of the queries, part by part; those of keys and values go where they belong."""
    key, value = _gathered(ctx.context, query)
    for (start, stop), state in zip(_parts(key.shape[2]), ctx.states, strict=True):
        more, dk, dv = _backward(
            grad, query, key[:, :, start:stop], value[:, :, start:stop], out, normaliser, state, False, ctx.scale
        )
        _give_back(ctx.context, start, dk, dv)
        yield more


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


def _parts(length: int) -> Iterable[tuple[int, int]]:
    """One of a round length, and what is left."""
    edge = length - length % KEYS
    if edge:
        yield 0, edge
    if edge < length:
        yield edge, length


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
