"""How much goes through a model at once, and how much of it is kept."""

from typing import Any

import pytest
import torch

from polar.train import fitting
from polar.train.flash import GRAIN
from tests.unit.train import tiny


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
def test_a_fused_feed_forward_part_keeps_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(config, "ban_recompute_materialized_backward", True)  # is put back behind us
    model: Any = tiny.model()
    fitting.fuse(model)
    part, sizes = model.model.layers[0].mlp, model.config
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    tokens = 37
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        part(torch.randn(1, tokens, sizes.hidden_size, requires_grad=True))
    wide = [tensor for tensor in kept if tensor.numel() == tokens * sizes.intermediate_size]
    assert len(wide) == 2


def test_a_large_model_has_lengths_as_they_are(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    assert fitting.grain(model) == GRAIN
    monkeypatch.setattr(fitting, "_LARGE", sum(it.numel() for it in model.parameters()))
    assert fitting.grain(model) == 1


def test_who_says_is_heard(model: torch.nn.Module) -> None:
    assert fitting.sizes(model, 77, 0, fused=True) == (77, 0)
