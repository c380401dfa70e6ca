"""How much goes through a model at once, and how much of it is kept."""

import math
from typing import Any

import pytest
import torch

from polar.train import fusion, memory
from polar.train.flash_attention import FINE_LENGTH_MULTIPLE_TOKENS, LENGTH_MULTIPLE_TOKENS
from polar.train.packing import MemoryBudget
from tests.unit.train import tiny

pytestmark = [  # of PyTorch's own compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def model() -> torch.nn.Module:
    made: torch.nn.Module = tiny.model()
    return made


def _bytes(model: torch.nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())


def _fit(model: torch.nn.Module) -> tuple[int, MemoryBudget]:
    return memory.plan_memory(model, None, None, length_multiple=LENGTH_MULTIPLE_TOKENS, fused=False)


def test_what_is_kept_leaves_room_for_gradients_and_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module
) -> None:
    monkeypatch.setattr(memory, "_measure_free_bytes", lambda _: 3 * _bytes(model) + 10**9)
    chunk, budget = _fit(model)
    assert chunk == memory.DEFAULT_CHUNK_TOKENS["cpu"]
    model.requires_grad_(False)  # nothing of the kind will come
    more = _fit(model)[1]
    assert more.kept_tokens == pytest.approx(budget.kept_tokens * (3 * _bytes(model) + 10**9) / 10**9, rel=1e-3)
    assert more.max_bytes > budget.max_bytes


def test_little_memory_means_small_chunks(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    monkeypatch.setattr(memory, "_measure_free_bytes", lambda _: 0)
    chunk, budget = _fit(model)
    assert (chunk, budget.kept_tokens, budget.max_bytes) == (256, 256, 0)


@pytest.mark.slow
def test_fused_layers_keep_about_as_much_as_is_reckoned_with() -> None:
    whole: Any = tiny.model(hidden_size=128, intermediate_size=384)  # else small things count
    fusion.fuse_model(whole)
    sizes, tokens = whole.config, 61
    own = {parameter.untyped_storage().data_ptr() for parameter in whole.parameters()}
    kept: list[torch.Tensor] = []
    with fusion.use_compiler_settings(), tiny.kept_in(kept):
        whole.model(torch.arange(tokens)[None] % sizes.vocab_size, use_cache=False)
    bytes_ = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept if one.is_floating_point()
    }
    found = sum(size for place, size in bytes_.items() if place not in own) / tokens
    assert 0.8 < found / memory._estimate_activation_bytes(whole, fused=True) < 1


def test_what_is_not_compiled_takes_more(model: torch.nn.Module) -> None:
    kind: Any = model.config
    fused = memory._estimate_activation_bytes(model, fused=True)
    kind.num_experts = 8
    experts = memory._estimate_activation_bytes(model, fused=True)
    kind.num_experts = None
    model.to(torch.bfloat16)
    half = memory._estimate_activation_bytes(model, fused=True)
    next(iter(model.parameters())).requires_grad_(False)
    model.adapter = torch.nn.Linear(2, 2)  # as adapters are: in fp32
    assert half == fused / 2
    assert experts > 1.5 * fused
    assert memory._estimate_activation_bytes(model, fused=True) > 1.5 * half


def test_a_large_model_has_finer_lengths(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    assert memory.choose_length_multiple(model) == LENGTH_MULTIPLE_TOKENS
    monkeypatch.setattr(memory, "_LARGE_MODEL_PARAMETERS", sum(it.numel() for it in model.parameters()))
    assert memory.choose_length_multiple(model) == FINE_LENGTH_MULTIPLE_TOKENS
    kind: Any = model.config
    kind.num_experts = 8  # of which few compute
    assert memory.choose_length_multiple(model) == LENGTH_MULTIPLE_TOKENS


def test_who_says_is_heard(model: torch.nn.Module) -> None:
    chunk, budget = memory.plan_memory(model, 77, 0, length_multiple=LENGTH_MULTIPLE_TOKENS, fused=True)
    assert (chunk, budget.kept_tokens, budget.max_bytes) == (77, 0, math.inf)
