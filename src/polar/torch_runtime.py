"""Shared PyTorch utilities: the one compute thread of this process, and handling of memory errors.

Importing this module does not import PyTorch, so that programs without it can import its users.
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
"""In errors of CUDA, Triton and the compiler; of cuBLAS and cuDNN; of PyTorch on a CPU."""


async def run_on_compute_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Runs a function on the compute thread. PyTorch caches attention kernels' plans per thread and never frees them,
    so several threads would each build their own."""
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, partial(function, *args, **options))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out. Only PyTorch's allocator raises a specific type."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY_PHRASES)


def release_memory(device: "torch.device") -> None:
    """Releases unreferenced memory, including reference cycles."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
