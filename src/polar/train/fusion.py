"""Fuses chains of small operations with PyTorch's compiler: unfused, each one reads and writes whole tensors on a GPU.

Only the given model instance is patched. The library's functions stay unchanged, so that a fused and an unfused model
can run in one process.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, update_wrapper, wraps
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config

_MAX_COMPILED_VARIANTS = 64
"""Variants per compiled function."""
_ROTATION_FUNCTION = "apply_rotary_pos_emb"
_HEAD_DIMENSION_ARGUMENT = "unsqueeze_dim"
"""The argument that names the dimension of the heads: 1, as attention needs it, or 2."""


@cache
def compile_dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for tensors of all lengths."""
    return torch.compile(function, dynamic=True)


@contextmanager
def use_compiler_settings() -> Iterator[None]:
    """The compiler settings that fused functions need. PyTorch keeps such settings per thread context, and a trainer is
    created in another one than it computes in."""
    limit = max(torch._dynamo.config.recompile_limit, _MAX_COMPILED_VARIANTS)
    with (
        # All modules of a class share one function: each width, rank, type and gradient mode of theirs compiles it once
        # more. Beyond a limit (8, as PyTorch has it) it silently runs uncompiled again, and takes twice the memory.
        torch._dynamo.config.patch(recompile_limit=limit),
        # Else what goes into a feed-forward part's last product is kept beside the two that it is made of in no time.
        torch._functorch.config.patch(ban_recompute_materialized_backward=False),
    ):
        yield


def fuse_model(model: Any) -> None:
    """Norms, feed-forward parts and rotations are chains of small steps, each of which reads and writes all
    activations. Compiled they are one, and keep half as much for the backward pass. Nothing but this model changes:
    others of the same classes run as before."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True)
        elif "forward" not in vars(module):  # else it is fused already, or replaced by another library
            fused = _fuse_rotation(type(module).forward)
            if fused is not None:
                module.forward = MethodType(fused, module)


@cache
def _fuse_rotation(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A module's `forward` with its rotation of queries and keys compiled; None where it has none. The rotation is a
    function that attention finds among its module's globals, which are everybody's: so this is a copy of `forward` with
    globals of its own."""
    inner = inspect.unwrap(forward)
    if not isinstance(inner, FunctionType) or _ROTATION_FUNCTION not in inner.__code__.co_names:
        return None
    rotate = inner.__globals__.get(_ROTATION_FUNCTION)
    return None if rotate is None else _copy_with_globals(forward, {_ROTATION_FUNCTION: _compile_rotation(rotate)})


def _copy_with_globals(function: Any, changes: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A copy of a function for which some globals are others. Its decorators are copied with it; None where one of them
    does not hold what it wraps in its closure."""
    scope, closure = function.__globals__, function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        scope = {**scope, **changes}
    else:
        inner = _copy_with_globals(wrapped, changes)
        held = [cell.cell_contents is wrapped for cell in closure or ()]
        if inner is None or not any(held):
            return None
        closure = tuple(CellType(inner) if holds else cell for cell, holds in zip(closure, held, strict=True))
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    if wrapped is None:
        del copy.__wrapped__  # type: ignore[attr-defined]  # it wraps nothing
    else:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


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
