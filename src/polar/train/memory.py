"""What to do about a device's memory: keep it in one piece, and compute again what it was too small for.

Nothing of a step is lost if memory runs out in it: its gradients are discarded, what it left in memory is released, and
it is computed again with less kept. Weights and optimizer are not touched before the gradient is whole.
"""

import gc
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from polar.errors import PolarError

log = logging.getLogger(__name__)

T = TypeVar("T")

_ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE_SEGMENTS = "expandable_segments:True"
_OUT_OF_MEMORY_PHRASES = ("out of memory", "alloc_failed", "can't allocate memory")
"""Of errors by CUDA, Triton and the compiler; by cuBLAS and cuDNN; by PyTorch on a CPU."""


class OutOfMemory(PolarError):
    """Something does not fit into memory, whatever is done about it."""


def enable_expandable_segments() -> None:
    """For a process that trains: chunks have all lengths, and what one leaves free in pieces is of use to the next only
    if the allocator can join it. PyTorch reads this when a GPU is used for the first time: call it before."""
    if not set(_ALLOCATOR_VARIABLES) & os.environ.keys():
        os.environ[_ALLOCATOR_VARIABLES[0]] = _EXPANDABLE_SEGMENTS


def release_fragmented_memory(device: torch.device, needed: float) -> None:
    """Between groups, for what needs so many bytes. Where the allocator can't join free memory (somebody has set it up
    otherwise), it keeps blocks as long as the last group wanted them, and cuts them up for small things that stay."""
    if device.type != "cuda" or any(_EXPANDABLE_SEGMENTS in os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES):
        return
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whoever says so: only PyTorch's allocator has an error of its own for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY_PHRASES)


def release_memory(device: torch.device) -> None:
    """What nobody refers to any more, also in a circle."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class OutOfMemoryRetrier:
    """Computes again what ran out of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.count = 0  # of all so far

    def run(
        self,
        description: str,
        compute: Callable[[], T],
        *,
        discard: Callable[[], None],
        keep_less: Callable[[], str | None],
        advice: Callable[[], str],
    ) -> T:
        """`discard` drops what a try that failed has left; `keep_less` has the next one take less memory, and says what
        is different, or that nothing can be. Then it raises OutOfMemory, with the advice."""
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # Not in the handler: the error holds on to the frames that it came from, and these to their tensors.
            discard()
            release_memory(self._device)
            different = keep_less()
            if different is None:
                short = f"{description} does not fit into memory, with as little kept as possible."
                raise OutOfMemory(f"{short} {advice()} ({reason})")
            self.count += 1
            log.warning("%s ran out of memory and is computed again, %s: %s", description, different, reason)
