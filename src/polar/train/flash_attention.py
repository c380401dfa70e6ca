"""Flash attention of a chunk to all that came before it, on CUDA.

Queries attend to their whole context, and causally to the chunk's own keys if the chunk is one path. Each of the two is
one call of an attention kernel, and the outputs are merged by their log-sum-exps. In the backward pass each call gets
the merged output and log-sum-exp, and so returns exactly its part of the gradient. Gradients of a context go directly
to the chunk that owns it, and no copy of a long context is kept.

cuDNN's kernel is by far the fastest on Hopper. But it needs a plan for every pair of lengths, which takes 0.1 s of CPU
time and which PyTorch keeps forever, per thread. So lengths are rounded to multiples: queries are padded, and a rounded
part of the context gets the context call. The rest of the context (all of it, if it is short) is put in front of the
chunk's own keys, with as many padding queries in front of the queries, so that the causal call sees one path.

    call      keys                            queries
    context   the context's rounded part      own, padding
    causal    its rest, own, padding          padding for the rest, own, padding

Tensors are [1, heads, tokens, width], but are stored by tokens, as the projections around them need.
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
"""Tokens that lengths are multiples of. A finer multiple wastes less computation and needs more plans, which pays for a
large model. Below 128 the kernels are slower."""
_MIN_CONTEXT_TOKENS = 512
"""The shortest context that is worth a separate call."""
_SHORT_CONTEXT_DIVISOR = 4
"""A context is short if it has at most this fraction of the queries' tokens. Joining it to the causal call computes at
most 4 % more pairs, which is faster than a second call and the merge."""


SUPPORTED_HEAD_WIDTHS = (64, 96, 128)
"""Head widths that the kernel supports."""


def supports(query: Tensor) -> bool:
    """Whether the kernel supports such tensors."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in SUPPORTED_HEAD_WIDTHS


class KeyValuePiece(Struct):
    """Keys and values of [1, heads, tokens, width] that another chunk computed, and a callback for the gradients of a
    range of them: `add_gradients(start, stop, key_gradient, value_gradient)`."""

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
    """Attention of a one-path chunk to its context and, causally, to itself. `key` and `value` are the chunk's own.
    Lengths are rounded to multiples of `length_multiple`."""
    apply: Any = _ContextAttention.apply
    result: Tensor = apply(query, key, value, context, scale, length_multiple, compiled)
    return result


def round_context_length(context: int, length_multiple: int) -> int:
    """The largest multiple that a separate call of a context of this length can have; 0 if the context is too short."""
    return 0 if context < _MIN_CONTEXT_TOKENS else context - context % length_multiple


def _round_context_coarsely(context: int, count: int, length_multiple: int) -> int:
    """The context call's length where the rest joins the causal call: one of eight lengths between two powers of two,
    so that pairs with the queries' lengths recur. The rest is shorter than a quarter of the queries or than the length
    multiple, so there are few padding queries."""
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
    """Merges attention to a context into `out` and `lse` ([1, heads, queries]), the output and log-sum-exp of attention
    to other keys. The context's length comes from `round_context_length`."""
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
        context_length, count = keys.shape[2], query.shape[2]
        split = (
            0
            if context_length <= count // _SHORT_CONTEXT_DIVISOR
            else _round_context_coarsely(context_length, count, length_multiple)
        )
        layout = _QueryLayout.build(context_length - split, count, length_multiple)
        padded_query = layout.pad(query)
        keys_and_values = _append_own(keys, key, split, layout), _append_own(values, value, split, layout)
        out, lse, ctx.state = _forward(padded_query[:, :, layout.causal_call], *keys_and_values, True, scale)
        out, lse = out[:, :, layout.queries], lse[:, :, layout.queries]
        if split:
            keys, values = keys[:, :, :split], values[:, :, :split]
            context_out, context_lse, ctx.whole_state = _forward(
                padded_query[:, :, layout.context_call], keys, values, False, scale
            )
            context_out, context_lse = context_out[:, :, :count], context_lse[:, :, :count]
            out, lse = _compile_if_enabled(_merge_outputs, compiled)(out, lse, context_out, context_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.split, ctx.layout, ctx.context, ctx.scale = split, layout, context, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        split, layout, scale = ctx.split, ctx.layout, ctx.scale
        keys, values = _gather_context(ctx.context, query)
        query, out, lse = layout.pad(query), layout.pad(out), functional.pad(lse, (0, 0, *layout.padding))
        grad = _match_layout(layout.pad(grad), out)  # padding has no gradient
        keys_and_values = _append_own(keys, key, split, layout), _append_own(values, value, split, layout)

        def backpropagate(
            query_slice: slice, key: Tensor, value: Tensor, state: Any, causal: bool
        ) -> tuple[Tensor, Tensor, Tensor]:
            tensors = grad[:, :, query_slice], query[:, :, query_slice], key, value, out[:, :, query_slice]
            return _backward(*tensors, lse[:, :, query_slice].contiguous(), state, causal, scale)

        dq, dk, dv = backpropagate(layout.causal_call, *keys_and_values, ctx.state, True)
        prefix, count = layout.queries.start, layout.queries.stop - layout.queries.start
        _add_context_gradients(ctx.context, split, dk[:, :, :prefix], dv[:, :, :prefix])
        dq = dq[:, :, layout.queries]
        if split:
            context_dq, *context_grads = backpropagate(
                layout.context_call, keys[:, :, :split], values[:, :, :split], ctx.whole_state, False
            )
            _add_context_gradients(ctx.context, 0, *context_grads)
            dq = dq + context_dq[:, :, :count]
        return dq, dk[:, :, layout.queries], dv[:, :, layout.queries], None, None, None, None


class _QueryLayout(Struct, frozen=True):
    """The layout of the queries in a padded tensor that is long enough for both calls."""

    queries: slice  # the real queries; in front of them is padding for the context's rest
    causal_call: slice  # the causal call's: padding for the rest, real, padding
    context_call: slice  # the context call's: real, padding
    padding: tuple[int, int]  # zeros in front and behind

    @classmethod
    def build(cls, rest: int, count: int, length_multiple: int) -> "_QueryLayout":
        stop = rest + count
        causal_stop, context_stop = stop + -stop % length_multiple, stop + -count % length_multiple
        return cls(
            slice(rest, stop),
            slice(0, causal_stop),
            slice(rest, context_stop),
            (rest, max(causal_stop, context_stop) - stop),
        )

    def pad(self, tensor: Tensor) -> Tensor:
        return _pad_tokens(tensor, *self.padding)


class _ContextExtension(torch.autograd.Function):
    """Only the kernels see padded tensors. Saved for the backward pass are tensors that live anyway, and the merged
    output."""

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
        context_out, context_lse, ctx.state = _forward(
            _pad_tokens(query, 0, ctx.fill), *_gather_context(context, query), False, scale
        )
        context_out, context_lse = context_out[:, :, :count], context_lse[:, :, :count]
        out, lse = _compile_if_enabled(_merge_outputs, compiled)(own, own_lse, context_out, context_lse)
        ctx.save_for_backward(query, own, own_lse, out, lse)
        ctx.context, ctx.scale, ctx.compiled = context, scale, compiled
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The merged output is the mean of both outputs, weighted by their shares of the log-sum-exp."""
        query, own, own_lse, out, lse = ctx.saved_tensors
        keys, values = _gather_context(ctx.context, query)
        padded_query, padded_out = _pad_tokens(query, 0, ctx.fill), _pad_tokens(out, 0, ctx.fill)
        padded_grad = _match_layout(_pad_tokens(grad, 0, ctx.fill), padded_out)
        padded_lse = functional.pad(lse, (0, 0, 0, ctx.fill)).contiguous()
        dq, *context_grads = _backward(
            padded_grad, padded_query, keys, values, padded_out, padded_lse, ctx.state, False, ctx.scale
        )
        _add_context_gradients(ctx.context, 0, *context_grads)
        own_grads = _compile_if_enabled(_split_gradient, ctx.compiled)(grad, own, own_lse, out, lse)
        return dq[:, :, : query.shape[2]], *own_grads, None, None, None, None


def _pad_tokens(tensor: Tensor, before: int, behind: int) -> Tensor:
    """Pads the token dimension with zeros."""
    if not before and not behind:
        return tensor
    return functional.pad(tensor.transpose(1, 2), (0, 0, 0, 0, before, behind)).transpose(1, 2)


def _match_layout(grad: Tensor, out: Tensor) -> Tensor:
    """Copies the gradient to the output's memory layout, if it has another one."""
    return grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)


def _add_context_gradients(context: Sequence[KeyValuePiece], start: int, dk: Tensor, dv: Tensor) -> None:
    """Adds gradients of the context's tokens from `start` on to the pieces that hold them."""
    offset, stop = 0, start + dk.shape[2]
    for piece in context:
        low, high = max(start, offset), min(stop, offset + piece.key.shape[2])
        if low < high:
            interval = slice(low - start, high - start)
            piece.add_gradients(low - offset, high - offset, dk[:, :, interval], dv[:, :, interval])
        offset += piece.key.shape[2]


def _gather_context(context: Sequence[KeyValuePiece], query: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenates the context's keys and values: many small pieces would mean many small calls. The backward pass
    gathers them again, since memory is scarcer than time."""
    if not context:
        return query[:, :, :0], query[:, :, :0]
    return _concatenate_tokens([piece.key for piece in context]), _concatenate_tokens(
        [piece.value for piece in context]
    )


def _append_own(context_tensor: Tensor, own: Tensor, split: int, layout: _QueryLayout) -> Tensor:
    """Keys or values of a context from `edge` on, the queries' own, and zeros. (The backward pass builds them again:
    the chunk's own are kept anyway.)"""
    tensor = _concatenate_tokens([context_tensor[:, :, split:], own]) if split < context_tensor.shape[2] else own
    return _pad_tokens(tensor, 0, layout.causal_call.stop - layout.queries.stop)


def _concatenate_tokens(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates along the token dimension."""
    return (
        tensors[0]
        if len(tensors) == 1
        else torch.cat([tensor.transpose(1, 2) for tensor in tensors], 1).transpose(1, 2)
    )


_PairFunction = Callable[..., tuple[Tensor, Tensor]]


def _compile_if_enabled(function: _PairFunction, compiled: bool) -> _PairFunction:
    """Step by step all of it is read and written six times. The compiler must see tensors as they lie in memory, and as
    tensors of their own, since it makes a variant for each kind of part; but normalisers, which are small, lie by
    heads: the kernels want that."""
    if not compiled:
        return function

    def run_compiled(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        transposed = (_as_own_storage(tensor.transpose(1, 2).contiguous()).detach() for tensor in tensors)
        first, second = fusion.compile_dynamic(function)(*transposed)
        return first.transpose(1, 2), second.transpose(1, 2).contiguous()

    return run_compiled


def _merge_outputs(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two attention outputs over different keys into the output over all keys."""
    lse = torch.logaddexp(first_lse, second_lse)
    out = torch.lerp(first.float(), second.float(), torch.exp(second_lse - lse).float())
    return out.to(first.dtype), lse


def _split_gradient(
    grad: Tensor, own: Tensor, own_lse: Tensor, out: Tensor, merged_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of one of two merged outputs and of its log-sum-exp."""
    share = torch.exp(own_lse - merged_lse)
    lse_grad = ((own.float() - out.float()) * grad.float()).sum(-1, keepdim=True)
    return (grad * share).to(own.dtype), (share * lse_grad).to(own_lse.dtype)


# The kernels. Log-sum-exps are [1, heads, queries, 1], in fp32.


def _as_own_storage(tensor: Tensor) -> Tensor:
    """A batch of one. Its stride has no meaning, but would tell which tensor this is a part of; and plans go by strides
    as well."""
    return tensor.as_strided(tensor.shape, (tensor.numel(), *tensor.stride()[1:]))


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Output, log-sum-exp, and the state that the backward kernel needs."""
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
    lengths_q, lengths_k, max_q, max_k, seed, offset = state
    lengths = lengths_q, lengths_k, max_q, max_k
    grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, lse, seed, offset, None, *lengths, 0.0, causal, scale=scale
    )
    return grads
