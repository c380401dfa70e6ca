"""How much goes through a model at once, and how much of it is kept."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from polar.train import fitting
from polar.train.flash import FINE, GRAIN
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


def test_what_is_kept_leaves_room_for_gradients_and_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module
) -> None:
    monkeypatch.setattr(fitting, "_free", lambda _: 3 * _bytes(model) + 10**9)
    chunk, kept = fitting.sizes(model, None, None, fused=False)
    assert chunk == fitting.CHUNK["cpu"]
    model.requires_grad_(False)  # nothing of the kind will come
    more = fitting.sizes(model, None, None, fused=False)[1]
    assert more == pytest.approx(kept * (3 * _bytes(model) + 10**9) / 10**9, rel=1e-3)


def test_little_memory_means_small_chunks(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    monkeypatch.setattr(fitting, "_free", lambda _: 0)
    assert fitting.sizes(model, None, None, fused=False) == (256, 256)


def test_rotations_are_compiled_where_attention_finds_them(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module
) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)  # is put back behind us
    fitting.fuse(model)
    compiled = modeling_llama.apply_rotary_pos_emb
    assert compiled is not own
    fitting.fuse(tiny.model())
    assert modeling_llama.apply_rotary_pos_emb is compiled


async def test_a_fused_feed_forward_part_keeps_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is made in one context and computes in another, as a trainer does."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    model: Any = tiny.model()
    await asyncio.to_thread(fitting.fuse, model)
    part, sizes, tokens = model.model.layers[0].mlp, model.config, 37
    kept: list[torch.Tensor] = []

    def compute() -> None:
        with fitting.compiling(), _kept_in(kept):
            part(torch.randn(1, tokens, sizes.hidden_size, requires_grad=True))

    await asyncio.to_thread(compute)
    assert sum(tensor.numel() == tokens * sizes.intermediate_size for tensor in kept) == 2


@contextmanager
def _kept_in(kept: list[torch.Tensor]) -> Iterator[None]:
    """What is kept for the backward pass."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def test_fused_layers_keep_about_as_much_as_is_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    whole: Any = tiny.model(hidden_size=128, intermediate_size=384)  # else small things count
    fitting.fuse(whole)
    sizes, tokens = whole.config, 61
    own = {parameter.untyped_storage().data_ptr() for parameter in whole.parameters()}
    kept: list[torch.Tensor] = []
    with fitting.compiling(), _kept_in(kept):
        whole.model(torch.arange(tokens)[None] % sizes.vocab_size, use_cache=False)
    bytes_ = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept if one.is_floating_point()
    }
    found = sum(size for place, size in bytes_.items() if place not in own) / tokens
    assert 0.8 < found / fitting._bytes(whole, fused=True) < 1


def test_what_is_not_compiled_takes_more(model: torch.nn.Module) -> None:
    kind: Any = model.config
    fused = fitting._bytes(model, fused=True)
    kind.num_experts = 8
    experts = fitting._bytes(model, fused=True)
    kind.num_experts = None
    model.to(torch.bfloat16)
    half = fitting._bytes(model, fused=True)
    next(iter(model.parameters())).requires_grad_(False)
    model.adapter = torch.nn.Linear(2, 2)  # as adapters are: in fp32
    assert half == fused / 2
    assert experts > 1.5 * fused
    assert fitting._bytes(model, fused=True) > 1.5 * half


def test_a_large_model_has_finer_lengths(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    assert fitting.grain(model) == GRAIN
    monkeypatch.setattr(fitting, "_LARGE", sum(it.numel() for it in model.parameters()))
    assert fitting.grain(model) == FINE
    kind: Any = model.config
    kind.num_experts = 8  # of which few compute
    assert fitting.grain(model) == GRAIN


def test_rotations_by_tokens_are_rotations() -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    rotate = fitting._by_tokens(apply_rotary_pos_emb)
    torch.manual_seed(0)
    query, key = (torch.randn(1, 5, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2))
    cosines, sines = torch.randn(2, 1, 5, 8)
    found, right = rotate(query, key, cosines, sines), apply_rotary_pos_emb(query, key, cosines, sines)
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert one.transpose(1, 2).is_contiguous()
    grads = [torch.autograd.grad(sum(one.square().sum() for one in some), (query, key)) for some in (found, right)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*grads, strict=True))
    by_tokens = rotate(query.transpose(1, 2), key.transpose(1, 2), cosines, sines, unsqueeze_dim=2)
    assert torch.allclose(by_tokens[0].transpose(1, 2), right[0], atol=1e-6)


def test_a_rotation_of_something_else_is_left_as_it_is() -> None:
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
        return x * cos.unsqueeze(unsqueeze_dim) + sin.unsqueeze(unsqueeze_dim)

    given = torch.randn(1, 4, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    assert torch.allclose(fitting._by_tokens(rotate)(*given), rotate(*given), atol=1e-6)


def test_who_says_is_heard(model: torch.nn.Module) -> None:
    assert fitting.sizes(model, 77, 0, fused=True) == (77, 0)
