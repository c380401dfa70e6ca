"""What all that computes with PyTorch in this process shares: one thread, and what to do where memory ends.

It does not import PyTorch by itself, so that programs without it can use what imports this.
"""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")

_EXECUTOR = ThreadPoolExecutor(1, thread_name_prefix="computing")
_OUT_OF_MEMORY_PHRASES = ("out of memory", "alloc_failed", "can't allocate memory")
"""Of errors by CUDA, Triton and the compiler; by cuBLAS and cuDNN; by PyTorch on a CPU."""


async def run_on_compute_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Runs what computes on a model. PyTorch keeps the plans of attention's kernels by thread and frees none: in
    several threads, each would be made again and again."""
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, partial(function, *args, **options))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whatever raised the error: only PyTorch's allocator has a type of its own for it."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY_PHRASES)


def release_memory(device: "torch.device") -> None:
    """Releases what is not referred to any more, reference cycles included."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
