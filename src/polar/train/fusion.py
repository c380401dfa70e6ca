"""Chains of small steps as one, by PyTorch's compiler: on a GPU each step by itself reads and writes everything."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config

_MAX_COMPILED_VARIANTS = 64
"""Of a compiled function."""
_ROTATION_FUNCTION = "apply_rotary_pos_emb"
_HEAD_DIMENSION_ARGUMENT = "unsqueeze_dim"
"""Its argument that says where heads are among the dimensions: 1, as attention wants it, or 2."""
_COMPILED_MARKER = "_compiled_by_polar"


@cache
def compile_dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    """For tensors of all lengths."""
    return torch.compile(function, dynamic=True)


@contextmanager
def compiler_settings() -> Iterator[None]:
    """What the compiler is to know wherever something fused runs: PyTorch keeps such settings by context, and a trainer
    is made in another one than it computes in."""
    more = max(torch._dynamo.config.recompile_limit, _MAX_COMPILED_VARIANTS)
    with (
        # All modules of a class share one function: each width, rank, type and gradient mode of theirs compiles it once
        # more. Beyond a limit (8, as PyTorch has it) it silently runs uncompiled again, and takes twice the memory.
        torch._dynamo.config.patch(recompile_limit=more),
        # Else what goes into a feed-forward part's last product is kept beside the two that it is made of in no time.
        torch._functorch.config.patch(ban_recompute_materialized_backward=False),
    ):
        yield


def fuse_model(model: Any) -> None:
    """Norms, feed-forward parts and rotations are chains of small steps, each of which reads and writes all
    activations: compiled they are one, and keep half as much for the backward pass."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True)
    # Rotations of queries and keys are a function that attention finds among its module's names. So whatever else uses
    # it in this process has it compiled from now on.
    for kind in {type(module) for module in model.modules()}:
        names = getattr(inspect.unwrap(kind.forward), "__globals__", {})
        rotate = names.get(_ROTATION_FUNCTION)
        if rotate is not None and not hasattr(rotate, _COMPILED_MARKER):
            names[_ROTATION_FUNCTION] = _compile_rotation(rotate)
            setattr(names[_ROTATION_FUNCTION], _COMPILED_MARKER, True)


def _compile_rotation(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled. Queries and keys of [1, heads, tokens, width] lie in memory by tokens: the compiler must see them so,
    or their gradients are copied, there and back."""
    fused = compile_dynamic(rotate)
    names = list(inspect.signature(rotate).parameters)
    if names[:4] != ["q", "k", "cos", "sin"] or _HEAD_DIMENSION_ARGUMENT not in names:
        return fused

    @wraps(rotate)
    def rotated(q: Any, k: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        if len(args) > 2 or options.get(_HEAD_DIMENSION_ARGUMENT, 1) != 1:  # more than cosines and sines by place
            found: tuple[Any, Any] = fused(q, k, *args, **options)
            return found
        q, k = fused(q.transpose(1, 2), k.transpose(1, 2), *args, **{**options, _HEAD_DIMENSION_ARGUMENT: 2})
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotated
