"""Flash attention of a path to what came before it, on CUDA.

Queries see all of the context, and themselves causally. Those are two calls of an attention kernel, joined by their
normalisers; going backwards, each kernel is given the joint output and normaliser, and so gives exactly its part of the
gradient. Kernels that know such a mask themselves are slower than the two.
"""

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def joined_attention(query: Tensor, key: Tensor, value: Tensor, context: int, scale: float) -> Tensor:
    """The last keys are those of the queries themselves; the first `context` are seen by all of them."""
    result: Tensor = _Joined.apply(query, key, value, context, scale)
    return result


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: int, scale: float) -> Tensor:
        out, normaliser, seeds = _forward(query, key[:, :, context:], value[:, :, context:], True, scale)
        states = [seeds]
        if context:
            whole, other, seeds = _forward(query, key[:, :, :context], value[:, :, :context], False, scale)
            states.append(seeds)
            both = torch.logaddexp(normaliser, other)
            out = _weighted(out, normaliser - both, whole, other - both)
            normaliser = both
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.context, ctx.scale, ctx.states = context, scale, states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, normaliser = ctx.saved_tensors
        context, grad = ctx.context, grad.contiguous()
        dq, own_k, own_v = _backward(
            grad, query, key[:, :, context:], value[:, :, context:], out, normaliser, ctx.states[0], True, ctx.scale
        )
        if not context:
            return dq, own_k, own_v, None, None
        more, dk, dv = _backward(
            grad, query, key[:, :, :context], value[:, :, :context], out, normaliser, ctx.states[1], False, ctx.scale
        )
        return dq + more, torch.cat([dk, own_k], 2), torch.cat([dv, own_v], 2), None, None


@torch.compile(dynamic=True)
def _weighted(one: Tensor, log_one: Tensor, other: Tensor, log_other: Tensor) -> Tensor:
    joint = one.float() * log_one.exp() + other.float() * log_other.exp()
    return joint.to(one.dtype)


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Output, normaliser [1, heads, queries, 1], and what the backward pass is to be given besides."""
    out, normaliser, lengths_q, lengths_k, most_q, most_k, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, normaliser, (lengths_q, lengths_k, most_q, most_k, seed, offset)


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
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, normaliser, seed, offset, None,
        lengths_q, lengths_k, most_q, most_k, 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv
