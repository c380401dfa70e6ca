"""Parts of a model, compiled."""

import asyncio
from typing import Any

import pytest
import torch

from polar.train import fusion
from tests.unit.train import tiny

pytestmark = [  # of PyTorch's own compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def test_rotations_are_compiled_where_attention_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)  # is put back behind us
    fusion.fuse_model(tiny.model())
    compiled = modeling_llama.apply_rotary_pos_emb
    assert compiled is not own
    fusion.fuse_model(tiny.model())
    assert modeling_llama.apply_rotary_pos_emb is compiled


async def test_a_fused_feed_forward_part_keeps_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is made in one context and computes in another, as a trainer does."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    model: Any = tiny.model()
    await asyncio.to_thread(fusion.fuse_model, model)
    part, sizes, tokens = model.model.layers[0].mlp, model.config, 37
    kept: list[torch.Tensor] = []

    def compute() -> None:
        with fusion.compiler_settings(), tiny.kept_in(kept):
            part(torch.randn(1, tokens, sizes.hidden_size, requires_grad=True))

    await asyncio.to_thread(compute)
    assert sum(tensor.numel() == tokens * sizes.intermediate_size for tensor in kept) == 2


@pytest.mark.slow
def test_rotations_by_tokens_are_rotations() -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    rotate = fusion._compile_rotation(apply_rotary_pos_emb)
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
    assert torch.allclose(fusion._compile_rotation(rotate)(*given), rotate(*given), atol=1e-6)
