"""One training step on a model with random weights: forward, backward, optimizer. Needs PyTorch and transformers.

The learning rate is zero: every step works on the same weights, so that builders' log-probabilities can be compared.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from benchmarks.client import BenchmarkError
from benchmarks.tree.groups import BUILDERS, BenchGroup, BuilderBatch
from polar.train.memory import OutOfMemoryRetrier
from polar.train.packing import Floats, PackedTrees, pack_trees
from polar.train.tree_model import TreeModel

_NOMINAL = {"H100": 989e12, "H200": 989e12}
"""FLOPs a second by the vendor's data sheets, bf16 without sparsity."""
_SIDE, _PRODUCTS = 8192, 20  # of the matrix products that the machine's peak is measured by

_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
}
_COMMON: dict[str, Any] = {"tie_word_embeddings": True, "rope_theta": 1e6, "max_position_embeddings": 262_144}
SHAPES = tuple(_SHAPES)


class StepTiming(Struct):
    seconds: float
    optimizer: float  # seconds of them
    memory: int | None  # most bytes of the device that were in use; None on the CPU
    logprobs: Floats  # of the batch's entries, in their order
    reserved: int | None = None  # most bytes that the allocator had, in use or not
    retries: int = 0  # how often memory ran out, and the step was computed again


def load_config(shape: str) -> Any:
    """One of SHAPES, or a model's folder."""
    if shape in _SHAPES:
        return Qwen3Config(**_SHAPES[shape], **_COMMON)
    try:
        return AutoConfig.from_pretrained(shape, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{shape} is none of {', '.join(SHAPES)}, and no model's folder: {error}") from error


def choose_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_dtype(where: torch.device) -> torch.dtype:
    return torch.bfloat16 if where.type == "cuda" else torch.float32


def describe_device(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"


def get_nominal_peak(where: torch.device) -> float | None:
    return next((rate for name, rate in _NOMINAL.items() if name in describe_device(where)), None)


def measure_peak(where: torch.device) -> float | None:
    """FLOPs a second of large matrix products in bf16, on random data; None on the CPU, where nobody asks."""
    if where.type != "cuda":
        return None
    left, right = (torch.randn(_SIDE, _SIDE, device=where, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    seconds = _time_on_device(where, lambda: [left @ right for _ in range(_PRODUCTS)])
    return 2 * _SIDE**3 * _PRODUCTS / seconds


class TrainingStepper:
    """A model, its optimizer, and steps of them."""

    def __init__(self, shape: str, where: torch.device, *, chunk_tokens: int | None, kept_tokens: int | None) -> None:
        self._where = where
        self._retries = OutOfMemoryRetrier(where)
        self._model = make_random_model(load_config(shape), where, choose_dtype(where))
        self._tree = TreeModel(self._model, chunk_tokens=chunk_tokens, kept_tokens=kept_tokens)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        self._failed = False
        self._one_layer = self._tree
        if where.type == "cuda":
            layer = load_config(shape)
            layer.num_hidden_layers, layer.layer_types = 1, None
            self._layer = make_random_model(type(layer)(**layer.to_dict()), where, choose_dtype(where))
            self._one_layer = TreeModel(
                self._layer,
                chunker=self._tree.chunker,
                attention_length_multiple=self._tree.attention_length_multiple,
            )

    def warm_up(self, batch: BuilderBatch) -> None:
        """One layer of the model computes the same batch, so that kernels are chosen and compiled for its lengths."""
        if self._where.type != "cuda":
            return
        packed = pack_trees(batch.trees)
        backward(self._one_layer, packed, torch.from_numpy(np.concatenate(batch.weights)).to(self._where))
        self._layer.zero_grad(set_to_none=True)

    @property
    def model(self) -> Any:
        return self._model

    def step(self, batch: BuilderBatch) -> StepTiming:
        """Packing is not timed: a trainer does it while another step runs."""
        packed = pack_trees(batch.trees)
        weights = torch.from_numpy(np.concatenate(batch.weights)).to(self._where)
        return self.timed(lambda: self._compute_within_memory(packed, weights))

    def _compute_within_memory(self, packed: PackedTrees, weights: Tensor) -> Tensor:
        """As a trainer does it."""
        return self._retries.run(
            "The step",
            lambda: backward(self._tree, packed, weights),
            discard=lambda: self._optimizer.zero_grad(set_to_none=True),
            reduce_memory=lambda: self._tree.reduce_memory(packed, training=True),
            advice=lambda: "Take a GPU with more of it.",
        )

    def timed(self, compute: Callable[[], Tensor]) -> StepTiming:
        """A step whose gradients somebody else computes; it returns log-probabilities."""
        logprobs: list[Tensor] = []
        retries = self._retries.count

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        if self._failed:
            self._optimizer.zero_grad(set_to_none=True)
            gc.collect()
        if self._where.type == "cuda":
            if self._failed:
                torch.cuda.empty_cache()  # else memory is left where it is, as in a training
            torch.cuda.reset_peak_memory_stats(self._where)
        self._failed = True
        computing = _time_on_device(self._where, lambda: logprobs.append(compute()))
        optimizer = _time_on_device(self._where, update)
        self._failed = False
        memory = reserved = None
        if self._where.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._where)
            reserved = torch.cuda.max_memory_reserved(self._where)
        told = logprobs[0].float().cpu().numpy()
        return StepTiming(computing + optimizer, optimizer, memory, told, reserved, self._retries.count - retries)


def make_random_model(shape: Any, where: torch.device, kind: torch.dtype) -> Any:
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    with where:
        return models.from_config(shape, dtype=kind).train()


def backward(model: TreeModel, packed: PackedTrees, weights: Tensor) -> Tensor:
    """A plain policy gradient."""
    return model.backward(packed, lambda index, logprobs: -(weights[index] * logprobs).sum())


def compute_gradient_differences(group: BenchGroup, where: torch.device, chunk_tokens: int) -> dict[str, float]:
    """By builder: how far its gradient is from that of the calls one at a time through the model as it is, in fp32,
    relative (L2). The model is tiny."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        model = make_random_model(load_config("tiny"), where, torch.float32)
        reference = _compute_gradient(model, lambda: _compute_one_by_one(model, BUILDERS["per_request"](group), where))
        # Small chunks: so that trees are cut, and some of them are computed twice.
        tree = TreeModel(model, chunk_tokens=chunk_tokens, kept_tokens=2 * chunk_tokens)
        return {
            name: _compute_difference(model, tree, build(group), reference, where) for name, build in BUILDERS.items()
        }
    finally:
        torch.set_float32_matmul_precision(before)


def _compute_difference(
    model: Any, tree: TreeModel, batch: BuilderBatch, reference: Tensor, where: torch.device
) -> float:
    weights = torch.from_numpy(np.concatenate(batch.weights)).to(where)
    gradient = _compute_gradient(model, lambda: backward(tree, pack_trees(batch.trees), weights))
    return float((gradient - reference).norm() / reference.norm())


def _compute_gradient(model: Any, compute: Callable[[], object]) -> Tensor:
    model.zero_grad(set_to_none=True)
    compute()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def _compute_one_by_one(model: Any, batch: BuilderBatch, where: torch.device) -> None:
    """Each sequence by itself, with nothing of ours between."""
    for tree, weights in zip(batch.trees, batch.weights, strict=True):
        ids = torch.from_numpy(tree.ids.astype(np.int64)).to(where)
        tokens = torch.from_numpy(tree.tokens).to(where)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, tokens - 1]
        logprobs = logits.log_softmax(-1).gather(1, ids[tokens, None])[:, 0]
        (-(torch.from_numpy(weights).to(where) * logprobs).sum()).backward()


def _time_on_device(where: torch.device, run: Callable[[], object]) -> float:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    started_at = time.perf_counter()
    run()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - started_at
