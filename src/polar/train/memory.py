"""A device's memory: how much of a batch fits into it, and what happens when it runs out.

    plan_memory ─► the tokens of a chunk, and a MemoryBudget for activations, keys and values
    OutOfMemoryRetrier ─► repeats a computation that ran out of memory, with fewer activations kept

A step survives running out of memory: its gradients are discarded, its memory is released, and it is computed again
with fewer activations kept. Weights and optimizer stay unchanged until the gradient is complete.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from polar.errors import PolarError
from polar.torch_runtime import is_out_of_memory, release_memory
from polar.train.flash_attention import FINE_LENGTH_MULTIPLE_TOKENS, LENGTH_MULTIPLE_TOKENS, SUPPORTED_HEAD_WIDTHS
from polar.train.logprobs import LOGIT_BATCH_TERMS
from polar.train.packing import MIN_CHUNK_TOKENS, MemoryBudget

log = logging.getLogger(__name__)

T = TypeVar("T")

_ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE_SEGMENTS = "expandable_segments:True"
DEFAULT_CHUNK_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of a chunk. A large model's kernels take 0.23 s to launch (Qwen3-4B's shape); an H200 computes 3,500 tokens in
that time."""
_LARGE_MODEL_PARAMETERS = 3 * 10**9
"""Models of at least this size use finer length multiples (flash_attention.py)."""
_ACTIVATION_MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.3}
"""The share of the free memory that activations may take."""
_TOTAL_MEMORY_SHARE = {"cuda": 0.87, "cpu": 0.35}
"""The share that activations, waiting keys and values, their gradients and their copies may take together. The rest is
for a layer's temporary tensors and for the allocator's fragmentation."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array without waiting for the device, so that the device never runs idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class OutOfMemoryError(PolarError):
    """A computation does not fit into memory even with the least memory kept."""


def enable_expandable_segments() -> None:
    """For a process that trains: chunks have all lengths, and what one leaves free in pieces is of use to the next only
    if the allocator can join it. PyTorch reads this when a GPU is used for the first time: call it before."""
    if not set(_ALLOCATOR_VARIABLES) & os.environ.keys():
        os.environ[_ALLOCATOR_VARIABLES[0]] = _EXPANDABLE_SEGMENTS


def release_fragmented_memory(device: torch.device, needed: float) -> None:
    """Between groups, for what needs so many bytes. Where the allocator can't join free memory (the environment sets it
    up otherwise), it keeps blocks as long as the last group wanted them, and cuts them up for small things that
    stay."""
    if device.type != "cuda" or any(_EXPANDABLE_SEGMENTS in os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES):
        return
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        torch.cuda.empty_cache()


class OutOfMemoryRetrier:
    """Runs a computation again, with less memory kept, when it runs out of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.count = 0  # of retries so far

    def run(
        self,
        description: str,
        compute: Callable[[], T],
        *,
        discard: Callable[[], None],
        reduce_memory: Callable[[], str | None],
        advice: Callable[[], str],
    ) -> T:
        """`discard` drops what a failed attempt left. `reduce_memory` makes the next attempt use less memory and
        returns a description of the change, or None if no less is possible; then OutOfMemoryError is raised, with the
        advice."""
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
            change = reduce_memory()
            if change is None:
                problem = f"{description} does not fit into memory, with as little kept as possible."
                raise OutOfMemoryError(f"{problem} {advice()} ({reason})")
            self.count += 1
            log.warning("%s ran out of memory and is computed again, %s: %s", description, change, reason)


# How much fits


def plan_memory(
    model: Any, chunk_tokens: int | None, kept_tokens: int | None, *, length_multiple: int, fused: bool
) -> tuple[int, MemoryBudget]:
    """The tokens of a chunk, and the memory budget. Numbers given as arguments are used whatever memory is free."""
    device = next(model.parameters()).device
    free_bytes = max(0, _measure_free_bytes(device) - _count_training_state_bytes(model))
    activations = _estimate_activation_bytes(model, fused)
    max_tokens = max(MIN_CHUNK_TOKENS, int(_ACTIVATION_MEMORY_SHARE.get(device.type, 0.3) * free_bytes / activations))
    chunk_size = chunk_tokens or min(DEFAULT_CHUNK_TOKENS.get(device.type, DEFAULT_CHUNK_TOKENS["cuda"]), max_tokens)
    max_bytes = _TOTAL_MEMORY_SHARE.get(device.type, 0.35) * free_bytes - _estimate_logit_bytes(model)
    budget = MemoryBudget(
        kept_tokens=max_tokens if kept_tokens is None else kept_tokens,
        max_bytes=max(0.0, max_bytes) if kept_tokens is None else math.inf,
        activation_bytes=activations,
        **_estimate_token_costs(model, length_multiple, fused),
    )
    return chunk_size, budget


def _estimate_token_costs(model: Any, length_multiple: int, fused: bool) -> dict[str, Any]:
    """The other costs per token, as fields of `MemoryBudget`."""
    config = model.config.get_text_config()
    parameter = next(model.parameters())
    heads, width = config.num_attention_heads, _get_head_width(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layer_types = getattr(config, "layer_types", None) or []
    recurrent = layer_types.count("linear_attention")
    layers = config.num_hidden_layers - recurrent
    values_per_token = layers * 2 * kv_heads * width
    uses_flash_attention = (
        parameter.is_cuda and parameter.dtype in (torch.bfloat16, torch.float16) and width in SUPPORTED_HEAD_WIDTHS
    )
    # Not compiled, a mask and shared keys leave PyTorch's plainest kernel on a GPU, which works in fp32.
    writes_scores = parameter.is_cuda and not fused and kv_heads != heads
    return {
        "kv_bytes": float(values_per_token * parameter.element_size()),
        "kv_gradient_bytes": float(values_per_token * 4),
        "branching_bytes": float(layers * heads * width * parameter.element_size()),
        "score_bytes": 4.0 * layers * heads if writes_scores else 0.0,
        "recurrent_state_bytes": 2.0 * recurrent * _estimate_recurrent_state_bytes(config, parameter.element_size())
        if recurrent
        else 0.0,
        "length_multiple": length_multiple if uses_flash_attention else None,
        "splits_context": uses_flash_attention and fused,
        "windowed_share": layer_types.count("sliding_attention") / layers if layers else 0.0,
    }


def _estimate_recurrent_state_bytes(config: Any, size: int) -> int:
    """Bytes of one recurrent layer's state after a token: its matrix, in fp32, and its convolution's last inputs."""
    value_heads, value_width = config.linear_num_value_heads, config.linear_value_head_dim
    key_width = config.linear_key_head_dim
    channels = 2 * config.linear_num_key_heads * key_width + value_heads * value_width
    state: int = value_heads * key_width * value_width * 4
    return state + int((config.linear_conv_kernel_dim - 1) * channels * size)


def _estimate_logit_bytes(model: Any) -> float:
    """Bytes of the logits of LOGIT_BATCH_TERMS terms and of their gradients, in fp32 at worst."""
    return 2.0 * 4 * LOGIT_BATCH_TERMS * int(model.config.get_text_config().vocab_size)


def choose_length_multiple(model: Any) -> int:
    """The number that the lengths of flash attention's calls are multiples of."""
    is_large = sum(
        parameter.numel() for parameter in model.parameters()
    ) >= _LARGE_MODEL_PARAMETERS and not _has_experts(model.config.get_text_config())
    return FINE_LENGTH_MULTIPLE_TOKENS if is_large else LENGTH_MULTIPLE_TOKENS


def _estimate_activation_bytes(model: Any, fused: bool) -> float:
    """Approximate bytes that all layers keep for the backward pass of one token."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = _get_head_width(config)
    hidden, feed_forward = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    size = next(model.parameters()).element_size()
    has_wider_parameters = any(
        parameter.element_size() > size for parameter in model.parameters() if parameter.requires_grad
    )
    if fused and not _has_experts(config) and not has_wider_parameters:
        # What goes into norms, and into attention and the feed-forward part; the latter's first two products. Queries
        # before and behind their rotation, and the output; keys likewise, and values.
        norms = sum(parameter.shape == (hidden,) for parameter in model.parameters()) // config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        values_per_token = 1.05 * ((2 + max(2, norms)) * hidden + 2 * feed_forward + 3 * (heads + kv_heads) * width)
    else:
        # Adapters in fp32 have a copy of what goes into them; experts aren't compiled.
        values_per_token = 10 * hidden + (6 if _has_experts(config) else 4) * feed_forward + 6 * heads * width
    layers = config.num_hidden_layers
    recurrent = (getattr(config, "layer_types", None) or []).count("linear_attention")
    recurrent_bytes = (
        recurrent
        * getattr(config, "linear_num_value_heads", 0)
        * 4
        * (20 * getattr(config, "linear_value_head_dim", 0) + 384)
    )
    return float(layers * values_per_token * size + recurrent_bytes)


def _get_head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _count_training_state_bytes(model: Any) -> int:
    """Bytes of the gradients and of the optimizer's two moments."""
    sizes: Iterable[int] = (
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.requires_grad
    )
    return 3 * sum(sizes)


def _measure_free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":") for line in lines)
        return min(1024 * int(fields["MemAvailable"].split()[0]), _measure_free_container_bytes())
    except (OSError, KeyError):
        return 4 * 2**30  # not Linux: assume a common size


def _measure_free_container_bytes() -> int:
    """The cgroup's limit: a container may use less than the machine's memory."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return 2**62 if limit == "max" else int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
