"""How many tokens a machine holds on their way through a model."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from polar.train.flash import FINE, GRAIN

CHUNK = {"cuda": 16384, "cpu": 2048}
"""Tokens that go through at once. A large model's kernels take
0.23 s to launch (Qwen3-4B's shape), in which an H200 computes 3,500 tokens."""
_LARGE = 3 * 10**9
"""Parameters of a model for which plans for more lengths are worth it (flash.py)."""
_SHARE = {"cuda": 0.8, "cpu": 0.3}
"""Of the memory that is left: keys, values, their gradients and logits need some too."""


def sizes(model: Any, chunk_tokens: int | None, kept_tokens: int | None, *, fused: bool) -> tuple[int, int]:
    """How many tokens go through at once, and of how many activations are kept, where nobody says."""
    device = next(model.parameters()).device
    left = max(0, _free(device) - _to_come(model))
    room = max(256, int(_SHARE.get(device.type, 0.3) * left / _bytes(model, fused)))
    chunk = chunk_tokens or min(CHUNK.get(device.type, CHUNK["cuda"]), room)
    return chunk, kept_tokens if kept_tokens is not None else room


def grain(model: Any) -> int:
    """What lengths of flash attention's calls are multiples of."""
    large = sum(it.numel() for it in model.parameters()) >= _LARGE and not _experts(model.config.get_text_config())
    return FINE if large else GRAIN


def join_free_memory() -> None:
    """For a process that trains: chunks have all lengths, and what one leaves free in pieces is of use to the next only
    if the allocator can join it. PyTorch reads this when a GPU is used for the first time."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _bytes(model: Any, fused: bool) -> float:
    """Of a token's activations, about: what each layer's steps keep for the backward pass."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    size = next(model.parameters()).element_size()
    finer = any(it.element_size() > size for it in model.parameters() if it.requires_grad)
    if fused and not _experts(config) and not finer:
        # What goes into norms, and into attention and the feed-forward part; the latter's first two products. Queries
        # before and behind their rotation, and the output; keys likewise, and values.
        norms = sum(it.shape == (hidden,) for it in model.parameters()) // config.num_hidden_layers
        shared = getattr(config, "num_key_value_heads", None) or heads
        numbers = 1.05 * ((2 + max(2, norms)) * hidden + 2 * inner + 3 * (heads + shared) * width)
    else:
        # Adapters in fp32 have a copy of what goes into them; experts aren't compiled.
        numbers = 10 * hidden + (6 if _experts(config) else 4) * inner + 6 * heads * width
    layers = config.num_hidden_layers
    recurrent = (getattr(config, "layer_types", None) or []).count("linear_attention")
    more = (
        recurrent
        * getattr(config, "linear_num_value_heads", 0)
        * 4
        * (20 * getattr(config, "linear_value_head_dim", 0) + 384)
    )
    return float(layers * numbers * size + more)


def _experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _to_come(model: Any) -> int:
    """Gradients, and an optimizer's two means."""
    sizes: Iterable[int] = (it.numel() * it.element_size() for it in model.parameters() if it.requires_grad)
    return 3 * sum(sizes)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":") for line in lines)
        return min(1024 * int(fields["MemAvailable"].split()[0]), _free_of_container())
    except (OSError, KeyError):
        return 4 * 2**30  # not Linux: what most machines have


def _free_of_container() -> int:
    """A container sees the machine's memory, and may have less of it."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return 2**62 if limit == "max" else int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
