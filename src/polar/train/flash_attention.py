"""Flash attention of a chunk to all that came before it, on CUDA.

Queries see the pieces of their context whole, and themselves causally where they are one path. Each is a call of an
attention kernel, and they are joined by their normalisers. Going backwards, each call is given the joint output and
normaliser, and so gives exactly its part of the gradient. What comes back to a piece goes straight to whose it is, and
no copy of a long one is kept.

cuDNN's kernel is the fastest on Hopper, by far, but needs a plan of its own for every pair of lengths, which takes the
processor 0.1 s, and which PyTorch keeps for good, in each thread. So lengths are made round: queries are filled up, and
of the context a round part has a call of its own. What is left of it, or all of it where it is short, goes before the
queries' own keys, and as many padding queries go before the queries, so that all of this is one path.

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

from polar.train import fusion

_aten = torch.ops.aten

LENGTH_MULTIPLE_TOKENS, FINE_LENGTH_MULTIPLE_TOKENS = 512, 128
"""Tokens that lengths are multiples of. The finer they are, the less is computed in vain, and the more plans are made:
for a large model, which computes for long, that is worth it. Below 128 the kernels are slower."""
_MIN_CONTEXT_TOKENS = 512
"""Tokens of a context that are worth a call of their own."""
_SHORT_CONTEXT_DIVISOR = 4
"""A context is short if it is no longer than such a part of the queries: 4 % more pairs are computed then, at most, and
a second call, its joining and its sum take longer."""


SUPPORTED_HEAD_WIDTHS = (64, 96, 128)
"""Of heads that the kernel takes."""


def supports(query: Tensor) -> bool:
    """Whether there is a kernel for such tensors."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in SUPPORTED_HEAD_WIDTHS


class KeyValuePiece(Struct):
    """Keys and values of [1, heads, tokens, width] that another chunk computed, and what takes the gradients of some
    of them (from which to which, of the keys, of the values)."""

    key: Tensor
    value: Tensor
    add_gradients: Callable[[int, int, Tensor, Tensor], None]


def attend_with_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Sequence[KeyValuePiece],
    scale: float,
    *,
    length_multiple: int,
    compiled: bool = False,
) -> Tensor:
    """`key` and `value` are those of the queries themselves. Lengths are multiples of `length_multiple`."""
    apply: Any = _ContextAttention.apply
    result: Tensor = apply(query, key, value, context, scale, length_multiple, compiled)
    return result


def round_context_length(context: int, length_multiple: int) -> int:
    """How much of a context of such a length can have calls of its own."""
    return 0 if context < _MIN_CONTEXT_TOKENS else context - context % length_multiple


def _round_context_coarsely(context: int, count: int, length_multiple: int) -> int:
    """How much of it has one, where what is left goes with the queries' own: one of eight lengths between two powers of
    two, so that pairs with the queries' lengths come up again. What is left is less than a quarter of the queries, or
    the length_multiple: so padding queries are few."""
    return round_context_length(
        context, max(length_multiple, min(1 << context.bit_length() >> 4, 1 << count.bit_length() >> 3))
    )


def extend_with_context(
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    context: Sequence[KeyValuePiece],
    scale: float,
    *,
    length_multiple: int,
    compiled: bool = False,
) -> Tensor:
    """`out` and `lse` ([1, heads, queries]) are another attention's output and normaliser over other keys. The context
    has a round length: see `round_context_length`."""
    apply: Any = _ContextExtension.apply
    result: Tensor = apply(query, out, lse[..., None], context, scale, length_multiple, compiled)
    return result


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Sequence[KeyValuePiece],
        scale: float,
        length_multiple: int,
        compiled: bool,
    ) -> Tensor:
        keys, values = _gather_context(context, query)
        before, count = keys.shape[2], query.shape[2]
        edge = (
            0 if before <= count // _SHORT_CONTEXT_DIVISOR else _round_context_coarsely(before, count, length_multiple)
        )
        laid = _QueryLayout.build(before - edge, count, length_multiple)
        filled = laid.pad(query)
        behind = _append_own(keys, key, edge, laid), _append_own(values, value, edge, laid)
        out, lse, ctx.state = _forward(filled[:, :, laid.causal_call], *behind, True, scale)
        out, lse = out[:, :, laid.queries], lse[:, :, laid.queries]
        if edge:
            keys, values = keys[:, :, :edge], values[:, :, :edge]
            more, other, ctx.whole_state = _forward(filled[:, :, laid.context_call], keys, values, False, scale)
            more, other = more[:, :, :count], other[:, :, :count]
            out, lse = _compile_if_enabled(_merge_outputs, compiled)(out, lse, more, other)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.edge, ctx.laid, ctx.context, ctx.scale = edge, laid, context, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        edge, laid, scale = ctx.edge, ctx.laid, ctx.scale
        keys, values = _gather_context(ctx.context, query)
        query, out, lse = laid.pad(query), laid.pad(out), functional.pad(lse, (0, 0, *laid.padding))
        grad = _match_layout(laid.pad(grad), out)  # padding has no gradient
        behind = _append_own(keys, key, edge, laid), _append_own(values, value, edge, laid)

        def back(asked: slice, key: Tensor, value: Tensor, state: Any, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            tensors = grad[:, :, asked], query[:, :, asked], key, value, out[:, :, asked]
            return _backward(*tensors, lse[:, :, asked].contiguous(), state, causal, scale)

        dq, dk, dv = back(laid.causal_call, *behind, ctx.state, True)
        rest, count = laid.queries.start, laid.queries.stop - laid.queries.start
        _add_context_gradients(ctx.context, edge, dk[:, :, :rest], dv[:, :, :rest])
        dq = dq[:, :, laid.queries]
        if edge:
            more, *theirs = back(laid.context_call, keys[:, :, :edge], values[:, :, :edge], ctx.whole_state, False)
            _add_context_gradients(ctx.context, 0, *theirs)
            dq = dq + more[:, :, :count]
        return dq, dk[:, :, laid.queries], dv[:, :, laid.queries], None, None, None, None


class _QueryLayout(Struct, frozen=True):
    """How queries lie in a tensor that is long enough for both calls."""

    queries: slice  # those that were asked for; before them are as many as are left of the context
    causal_call: slice  # of the causal call: those, own, and what fills it up
    context_call: slice  # of the call that sees the context's round part: own, and what fills that up
    padding: tuple[int, int]  # zeros before and behind

    @classmethod
    def build(cls, rest: int, count: int, length_multiple: int) -> "_QueryLayout":
        stop = rest + count
        path, asking = stop + -stop % length_multiple, stop + -count % length_multiple
        return cls(slice(rest, stop), slice(0, path), slice(rest, asking), (rest, max(path, asking) - stop))

    def pad(self, tensor: Tensor) -> Tensor:
        return _pad_tokens(tensor, *self.padding)


class _ContextExtension(torch.autograd.Function):
    """What is filled up goes to the kernels alone: kept is what others keep anyway, and the joint output."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        own: Tensor,
        own_lse: Tensor,
        context: Sequence[KeyValuePiece],
        scale: float,
        length_multiple: int,
        compiled: bool,
    ) -> Tensor:
        count = query.shape[2]
        ctx.fill = -count % length_multiple
        more, other, ctx.state = _forward(
            _pad_tokens(query, 0, ctx.fill), *_gather_context(context, query), False, scale
        )
        more, other = more[:, :, :count], other[:, :, :count]
        out, lse = _compile_if_enabled(_merge_outputs, compiled)(own, own_lse, more, other)
        ctx.save_for_backward(query, own, own_lse, out, lse)
        ctx.context, ctx.scale, ctx.compiled = context, scale, compiled
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The joint output is a mean of the parts, weighed by their normalisers' shares."""
        query, own, own_lse, out, lse = ctx.saved_tensors
        keys, values = _gather_context(ctx.context, query)
        asked, answered = _pad_tokens(query, 0, ctx.fill), _pad_tokens(out, 0, ctx.fill)
        back = _match_layout(_pad_tokens(grad, 0, ctx.fill), answered)
        log = functional.pad(lse, (0, 0, 0, ctx.fill)).contiguous()
        dq, *theirs = _backward(back, asked, keys, values, answered, log, ctx.state, False, ctx.scale)
        _add_context_gradients(ctx.context, 0, *theirs)
        parts = _compile_if_enabled(_split_gradient, ctx.compiled)(grad, own, own_lse, out, lse)
        return dq[:, :, : query.shape[2]], *parts, None, None, None, None


def _pad_tokens(tensor: Tensor, before: int, behind: int) -> Tensor:
    """With so many zeros before and behind its tokens."""
    if not before and not behind:
        return tensor
    return functional.pad(tensor.transpose(1, 2), (0, 0, 0, 0, before, behind)).transpose(1, 2)


def _match_layout(grad: Tensor, out: Tensor) -> Tensor:
    """As the output is in memory, which mostly it is already."""
    return grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)


def _add_context_gradients(context: Sequence[KeyValuePiece], start: int, dk: Tensor, dv: Tensor) -> None:
    """To the pieces in which the context's tokens from `start` on lie."""
    at, stop = 0, start + dk.shape[2]
    for piece in context:
        low, high = max(start, at), min(stop, at + piece.key.shape[2])
        if low < high:
            here = slice(low - start, high - start)
            piece.add_gradients(low - at, high - at, dk[:, :, here], dv[:, :, here])
        at += piece.key.shape[2]


def _gather_context(context: Sequence[KeyValuePiece], query: Tensor) -> tuple[Tensor, Tensor]:
    """Its keys and values in a row: many small pieces would be many small calls. The backward pass gathers them again,
    since memory is scarcer than time."""
    if not context:
        return query[:, :, :0], query[:, :, :0]
    return _concatenate_tokens([piece.key for piece in context]), _concatenate_tokens(
        [piece.value for piece in context]
    )


def _append_own(theirs: Tensor, own: Tensor, edge: int, layout: _QueryLayout) -> Tensor:
    """Keys or values of a context from `edge` on, the queries' own, and zeros. (The backward pass makes them anew: the
    chunk's own are kept anyway.)"""
    row = _concatenate_tokens([theirs[:, :, edge:], own]) if edge < theirs.shape[2] else own
    return _pad_tokens(row, 0, layout.causal_call.stop - layout.queries.stop)


def _concatenate_tokens(tensors: Sequence[Tensor]) -> Tensor:
    """One behind the other."""
    return tensors[0] if len(tensors) == 1 else torch.cat([it.transpose(1, 2) for it in tensors], 1).transpose(1, 2)


_PairFunction = Callable[..., tuple[Tensor, Tensor]]


def _compile_if_enabled(function: _PairFunction, compiled: bool) -> _PairFunction:
    """Step by step all of it is read and written six times. The compiler must see tensors as they lie in memory, and as
    tensors of their own, since it makes a variant for each kind of part; but normalisers, which are small, lie by
    heads: the kernels want that."""
    if not compiled:
        return function

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        laid = (_as_own_storage(tensor.transpose(1, 2).contiguous()).detach() for tensor in tensors)
        one, other = fusion.compile_dynamic(function)(*laid)
        return one.transpose(1, 2), other.transpose(1, 2).contiguous()

    return call


def _merge_outputs(one: Tensor, log_one: Tensor, other: Tensor, log_other: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, each with its normaliser, as one."""
    both = torch.logaddexp(log_one, log_other)
    out = torch.lerp(one.float(), other.float(), torch.exp(log_other - both).float())
    return out.to(one.dtype), both


def _split_gradient(grad: Tensor, one: Tensor, log_one: Tensor, out: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """What comes back to one of two outputs that were joined, and to its normaliser."""
    share = torch.exp(log_one - both)
    further = ((one.float() - out.float()) * grad.float()).sum(-1, keepdim=True)
    return (grad * share).to(one.dtype), (share * further).to(log_one.dtype)


# The kernels. Normalisers are [1, heads, queries, 1], in fp32.


def _as_own_storage(tensor: Tensor) -> Tensor:
    """A batch of one. Its stride has no meaning, but would tell which tensor this is a part of; and plans go by strides
    as well."""
    return tensor.as_strided(tensor.shape, (tensor.numel(), *tensor.stride()[1:]))


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Output, normaliser, and what the backward pass is to be given besides."""
    query, key, value = _as_own_storage(query), _as_own_storage(key), _as_own_storage(value)
    out, lse, *state = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse, state[:6]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Any,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _as_own_storage(query), _as_own_storage(key), _as_own_storage(value)
    lengths_q, lengths_k, most_q, most_k, seed, offset = state
    lengths = lengths_q, lengths_k, most_q, most_k
    back: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, lse, seed, offset, None, *lengths, 0.0, causal, scale=scale
    )
    return back
