"""TRL's tree packing, on the model and the group that our builders are measured on.

Rows, positions and attention are TRL's own code: the module `packing` of its asynchronous GRPO trainer, which needs
none of what the trainer needs. The attention kernel that it fetches from a hub, FlashAttention 3, is taken from the
package `flash_attn_interface` where that is installed, else PyTorch's own FlashAttention 2 stands in. What its trainer
does around it is done here as there: gradient checkpointing, and logits only where a label is. Samples are merged
traces.
"""

import importlib.util
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.client import BenchmarkError
from benchmarks.tree.flops import Flops, ModelSizes, compute_flops
from benchmarks.tree.groups import BuilderBatch

NAME = "TRL"
_LABELS = 4096  # whose logits exist at the same time
_KEYS = 6_000_000  # tokens whose keys a row's attention may gather: more don't fit into 140 GB beside the rest
_NO_LABEL = -100

Kernel = Callable[..., Tensor]
"""As FlashAttention's `flash_attn_varlen_func`."""


class PackedRow(Struct):
    """One pass: some samples, as TRL packs them."""

    packed: dict[str, Tensor]
    weights: Tensor  # of its entries, as are:
    places: Tensor  # in the batch

    @property
    def tokens(self) -> int:
        return len(self.packed["input_ids"])

    def flops(self, sizes: ModelSizes) -> Flops:
        pairs = int(self.packed["position_ids"].sum()) + self.tokens
        return compute_flops(sizes, self.tokens, int((self.packed["shift_labels"] != _NO_LABEL).sum()), pairs)


class TrlPacking:
    def __init__(self, model: Any, kernel: tuple[str, Kernel] | None = None) -> None:
        """Raises BenchmarkError where TRL is not installed, or no kernel runs on the model's device."""
        self._model = model
        self._device = next(model.parameters()).device
        self.kernel, function = kernel or _choose_kernel(self._device)
        self._packing = _load_packing()
        setattr(self._packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=function))  # noqa: B010
        self._packing.register_tree_attention()

    def rows(self, merged: BuilderBatch) -> list[PackedRow]:
        """All samples in one row, or in as few as fit. One row has as many unique tokens as TRL's budget allows."""
        budget = max(merged.tokens, 1)
        while True:
            rows = self._pack_rows(merged, budget)
            most = max(len(row.packed["tree_kv_index"]) for row in rows)
            if most <= _KEYS or len(rows) == len(merged.trees):
                return rows
            budget = max(row.tokens for row in rows) // 2

    def _pack_rows(self, merged: BuilderBatch, budget: int) -> list[PackedRow]:
        samples = [_make_sample(tree.ids, tree.tokens) for tree in merged.trees]
        first = np.cumsum([0, *(len(tree.tokens) for tree in merged.trees)])
        made: list[tuple[Any, list[int]]] = []
        for number, sample in enumerate(samples):
            if not made or not made[-1][0].fits(sample, budget):
                made.append((self._packing.TreeRow(), []))
            row, numbers = made[-1]
            row.add(sample)
            numbers.append(number)
        return [
            PackedRow(
                packed=row.pack(),
                weights=torch.from_numpy(np.concatenate([merged.weights[it] for it in numbers])),
                places=torch.from_numpy(np.concatenate([np.arange(first[it], first[it + 1]) for it in numbers])),
            )
            for row, numbers in made
        ]

    def backward(self, rows: Sequence[PackedRow]) -> Tensor:
        """Adds the gradient of the batch's loss to the parameters'; returns its log-probabilities."""
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(self._packing.TREE_ATTENTION)
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            found = torch.zeros(sum(len(row.places) for row in rows), device=self._device)
            for row in rows:
                logprobs = self._compute_logprobs(
                    {name: tensor.to(self._device) for name, tensor in row.packed.items()}
                )
                found[row.places.to(self._device)] = logprobs.detach()
                torch.autograd.backward(-(row.weights.to(self._device) * logprobs).sum())
            return found
        finally:
            self._model.gradient_checkpointing_disable()
            self._model.set_attn_implementation(before)

    def _compute_logprobs(self, packed: dict[str, Tensor]) -> Tensor:
        longest_q, longest_k = packed["tree_max_seqlens"].tolist()
        hidden = self._model.model(
            input_ids=packed["input_ids"][None],
            position_ids=packed["position_ids"][None],
            use_cache=False,
            tree_kv_index=packed["tree_kv_index"],
            tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
            tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
            tree_max_seqlen_q=longest_q,
            tree_max_seqlen_k=longest_k,
        ).last_hidden_state[0]
        labels = packed["shift_labels"]
        asked = (labels != _NO_LABEL).nonzero()[:, 0]
        pieces = [
            checkpoint(self._select_logprobs, hidden[some], labels[some], use_reentrant=False)
            for some in torch.split(asked, _LABELS)
        ]
        everywhere = torch.zeros(len(labels), device=hidden.device).index_copy(0, asked, torch.cat(pieces))
        return everywhere[packed["token_index"]]

    def _select_logprobs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self._model.lm_head(hidden).float()
        chosen: Tensor = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1)
        return chosen


def get_version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of_package

    try:
        return of_package("trl")
    except PackageNotFoundError:
        return "unknown"


def _load_packing() -> ModuleType:
    """TRL's module by its file: importing it by name would import its trainers, too."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        raise BenchmarkError("TRL is not installed")
    file = Path(found.submodule_search_locations[0]) / "experimental" / "async_grpo" / "packing.py"
    spec: ModuleSpec | None = importlib.util.spec_from_file_location("polar_bench_trl_packing", file)
    if spec is None or spec.loader is None or not file.exists():
        raise BenchmarkError("this TRL has no tree packing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_sample(ids: Any, tokens: Any) -> dict[str, Any]:
    mask = np.zeros(len(ids), np.int64)
    mask[tokens] = 1
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "completion_mask": torch.from_numpy(mask),
        "old_log_probs": torch.zeros(len(ids)),
        "advantage": 1.0,
        "group_id": 0,
    }


def _choose_kernel(where: torch.device) -> tuple[str, Kernel]:
    if where.type != "cuda":
        raise BenchmarkError("its attention runs on CUDA only")
    if importlib.util.find_spec("flash_attn_interface") is not None:
        module: Any = importlib.import_module("flash_attn_interface")
        return "FlashAttention 3", module.flash_attn_varlen_func
    return "PyTorch's FlashAttention 2", _attend_with_pytorch


def _attend_with_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    if window_size != (-1, -1):
        raise BenchmarkError("PyTorch's kernel stands in for full attention only")
    result: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False, scale=softmax_scale
    )[0]
    return result
