"""Flash attention of a chunk to all that came before it, on CUDA.

Queries see the pieces of their context whole, and themselves causally where they are one path. Each is a call of an
attention kernel, and they are joined by their normalisers. Going backwards, each call is given the joint output and
normaliser, and so gives exactly its part of the gradient. What comes back to a piece goes straight to whose it is, and
no copy of a long one is kept.

cuDNN's kernel is the fastest on Hopper, by far, but needs a plan of its own for every pair of lengths, which takes the
processor 0.1 s, and which PyTorch keeps for good, in each thread. So lengths are made round: queries are filled up, and
of the context a round part has a call of its own. What is left of it, or all of it where it is short, goes before the
queries' own keys, and as many queries that nobody asked for go before the queries, so that all of this is one path.

    call     keys                      queries
    whole    the context's round part  own, fill
    causal   its rest, own, fill       as many as the rest, own, fill

Tensors are [1, heads, tokens, width], but lie in memory by tokens, as the projections before and behind want them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from polar.train import fusing

_aten = torch.ops.aten

GRAIN, FINE = 512, 128
"""Tokens that lengths are multiples of. The finer they are, the less is computed in vain, and the more plans are made:
for a large model, which computes for long, that is worth it. Below 128 the kernels are slower."""
_LEAST = 512
"""Tokens of a context that are worth a call of their own."""
_SHORT = 4
"""A context is short if it is no longer than such a part of the queries: 4 % more pairs are computed then, at most, and
a second call, its joining and its sum take longer."""


WIDTHS = (64, 96, 128)
"""Of heads that the kernel takes."""


def takes(query: Tensor) -> bool:
    """Whether there is a kernel for such tensors."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in WIDTHS


class Piece(Struct):
    """Keys and values of [1, heads, tokens, width] that somebody else computed, and who is told the gradients of some
    of them (from which to which, of the keys, of the values)."""

    key: Tensor
    value: Tensor
    give_back: Callable[[int, int, Tensor, Tensor], None]


def joined_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Sequence[Piece],
    scale: float,
    *,
    grain: int,
    compiled: bool = False,
) -> Tensor:
    """`key` and `value` are those of the queries themselves. Lengths are multiples of `grain`."""
    apply: Any = _Joined.apply
    result: Tensor = apply(query, key, value, context, scale, grain, compiled)
    return result


def round_part(context: int, grain: int) -> int:
    """How much of a context of such a length can have calls of its own."""
    return 0 if context < _LEAST else context - context % grain


def _coarse_part(context: int, count: int, grain: int) -> int:
    """How much of it has one, where what is left goes with the queries' own: one of eight lengths between two powers of
    two, so that pairs with the queries' lengths come up again. What is left is less than a quarter of the queries, or
    the grain: so the queries that nobody asked for are few."""
    return round_part(context, max(grain, min(1 << context.bit_length() >> 4, 1 << count.bit_length() >> 3)))


def extended_attention(
    query: Tensor,
    out: Tensor,
    normaliser: Tensor,
    context: Sequence[Piece],
    scale: float,
    *,
    grain: int,
    compiled: bool = False,
) -> Tensor:
    """`out` and `normaliser` ([1, heads, queries]) are what somebody else's attention says of other keys. The context
    has a round length: see `round_part`."""
    apply: Any = _Extended.apply
    result: Tensor = apply(query, out, normaliser[..., None], context, scale, grain, compiled)
    return result


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Sequence[Piece],
        scale: float,
        grain: int,
        compiled: bool,
    ) -> Tensor:
        keys, values = _gathered(context, query)
        before, count = keys.shape[2], query.shape[2]
        edge = 0 if before <= count // _SHORT else _coarse_part(before, count, grain)
        laid = _Layout.of(before - edge, count, grain)
        filled = laid.filled(query)
        behind = _behind(keys, key, edge, laid), _behind(values, value, edge, laid)
        out, normaliser, ctx.state = _forward(filled[:, :, laid.path], *behind, True, scale)
        out, normaliser = out[:, :, laid.own], normaliser[:, :, laid.own]
        if edge:
            keys, values = keys[:, :, :edge], values[:, :, :edge]
            more, other, ctx.whole_state = _forward(filled[:, :, laid.asking], keys, values, False, scale)
            more, other = more[:, :, :count], other[:, :, :count]
            out, normaliser = _fused(_joined, compiled)(out, normaliser, more, other)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.edge, ctx.laid, ctx.context, ctx.scale = edge, laid, context, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        edge, laid, scale = ctx.edge, ctx.laid, ctx.scale
        keys, values = _gathered(ctx.context, query)
        query, out, normaliser = laid.filled(query), laid.filled(out), functional.pad(normaliser, (0, 0, *laid.fill))
        grad = _laid_out(laid.filled(grad), out)  # nothing comes from where nobody asked
        behind = _behind(keys, key, edge, laid), _behind(values, value, edge, laid)

        def back(asked: slice, key: Tensor, value: Tensor, state: Any, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            tensors = grad[:, :, asked], query[:, :, asked], key, value, out[:, :, asked]
            return _backward(*tensors, normaliser[:, :, asked].contiguous(), state, causal, scale)

        dq, dk, dv = back(laid.path, *behind, ctx.state, True)
        rest, count = laid.own.start, laid.own.stop - laid.own.start
        _give_back(ctx.context, edge, dk[:, :, :rest], dv[:, :, :rest])
        dq = dq[:, :, laid.own]
        if edge:
            more, *theirs = back(laid.asking, keys[:, :, :edge], values[:, :, :edge], ctx.whole_state, False)
            _give_back(ctx.context, 0, *theirs)
            dq = dq + more[:, :, :count]
        return dq, dk[:, :, laid.own], dv[:, :, laid.own], None, None, None, None


class _Layout(Struct, frozen=True):
    """How queries lie in a tensor that is long enough for both calls."""

    own: slice  # those that were asked for; before them are as many as are left of the context
    path: slice  # of the causal call: those, own, and what fills it up
    asking: slice  # of the call that sees the context's round part: own, and what fills that up
    fill: tuple[int, int]  # zeros before and behind

    @classmethod
    def of(cls, rest: int, count: int, grain: int) -> "_Layout":
        stop = rest + count
        path, asking = stop + -stop % grain, stop + -count % grain
        return cls(slice(rest, stop), slice(0, path), slice(rest, asking), (rest, max(path, asking) - stop))

    def filled(self, tensor: Tensor) -> Tensor:
        return _filled(tensor, *self.fill)


class _Extended(torch.autograd.Function):
    """What is filled up goes to the kernels alone: kept is what others keep anyway, and the joint output."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        own: Tensor,
        own_normaliser: Tensor,
        context: Sequence[Piece],
        scale: float,
        grain: int,
        compiled: bool,
    ) -> Tensor:
        count = query.shape[2]
        ctx.fill = -count % grain
        more, other, ctx.state = _forward(_filled(query, 0, ctx.fill), *_gathered(context, query), False, scale)
        more, other = more[:, :, :count], other[:, :, :count]
        out, normaliser = _fused(_joined, compiled)(own, own_normaliser, more, other)
        ctx.save_for_backward(query, own, own_normaliser, out, normaliser)
        ctx.context, ctx.scale, ctx.compiled = context, scale, compiled
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The joint output is a mean of the parts, weighed by their normalisers' shares."""
        query, own, own_normaliser, out, normaliser = ctx.saved_tensors
        keys, values = _gathered(ctx.context, query)
        asked, answered = _filled(query, 0, ctx.fill), _filled(out, 0, ctx.fill)
        back = _laid_out(_filled(grad, 0, ctx.fill), answered)
        log = functional.pad(normaliser, (0, 0, 0, ctx.fill)).contiguous()
        dq, *theirs = _backward(back, asked, keys, values, answered, log, ctx.state, False, ctx.scale)
        _give_back(ctx.context, 0, *theirs)
        parts = _fused(_parted, ctx.compiled)(grad, own, own_normaliser, out, normaliser)
        return dq[:, :, : query.shape[2]], *parts, None, None, None, None


def _filled(tensor: Tensor, before: int, behind: int) -> Tensor:
    """With so many zeros before and behind its tokens."""
    if not before and not behind:
        return tensor
    return functional.pad(tensor.transpose(1, 2), (0, 0, 0, 0, before, behind)).transpose(1, 2)


def _laid_out(grad: Tensor, out: Tensor) -> Tensor:
    """As the output is in memory, which mostly it is already."""
    return grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)


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
    return _row([piece.key for piece in context]), _row([piece.value for piece in context])


def _behind(theirs: Tensor, own: Tensor, edge: int, laid: _Layout) -> Tensor:
    """Keys or values of a context from `edge` on, the queries' own, and zeros. (The backward pass makes them anew: the
    chunk's own are kept anyway.)"""
    row = _row([theirs[:, :, edge:], own]) if edge < theirs.shape[2] else own
    return _filled(row, 0, laid.path.stop - laid.own.stop)


def _row(tensors: Sequence[Tensor]) -> Tensor:
    """One behind the other."""
    return tensors[0] if len(tensors) == 1 else torch.cat([it.transpose(1, 2) for it in tensors], 1).transpose(1, 2)


_Both = Callable[..., tuple[Tensor, Tensor]]


def _fused(function: _Both, compiled: bool) -> _Both:
    """Step by step all of it is read and written six times. The compiler must see tensors as they lie in memory, and as
    tensors of their own, since it makes a variant for each kind of part; but normalisers, which are small, lie by
    heads: the kernels want that."""
    if not compiled:
        return function

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        laid = (_by_itself(tensor.transpose(1, 2).contiguous()).detach() for tensor in tensors)
        one, other = fusing.compiled(function)(*laid)
        return one.transpose(1, 2), other.transpose(1, 2).contiguous()

    return call


def _joined(one: Tensor, log_one: Tensor, other: Tensor, log_other: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, each with its normaliser, as one."""
    both = torch.logaddexp(log_one, log_other)
    out = torch.lerp(one.float(), other.float(), torch.exp(log_other - both).float())
    return out.to(one.dtype), both


def _parted(grad: Tensor, one: Tensor, log_one: Tensor, out: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """What comes back to one of two outputs that were joined, and to its normaliser."""
    share = torch.exp(log_one - both)
    further = ((one.float() - out.float()) * grad.float()).sum(-1, keepdim=True)
    return (grad * share).to(one.dtype), (share * further).to(log_one.dtype)


# The kernels. Normalisers are [1, heads, queries, 1], in fp32.


def _by_itself(tensor: Tensor) -> Tensor:
    """A batch of one. Its stride has no meaning, but would tell which tensor this is a part of; and plans go by strides
    as well."""
    return tensor.as_strided(tensor.shape, (tensor.numel(), *tensor.stride()[1:]))


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Output, normaliser, and what the backward pass is to be given besides."""
    query, key, value = _by_itself(query), _by_itself(key), _by_itself(value)
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
    query, key, value = _by_itself(query), _by_itself(key), _by_itself(value)
    lengths_q, lengths_k, most_q, most_k, seed, offset = state
    lengths = lengths_q, lengths_k, most_q, most_k
    back: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, normaliser, seed, offset, None, *lengths, 0.0, causal, scale=scale
    )
    return back
