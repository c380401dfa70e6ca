"""Parts of a model, compiled."""

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from polar.train import fusion
from polar.train.tree_model import TreeModel
from tests.unit.train import tiny

pytestmark = [  # of PyTorch's own compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def test_a_fused_model_leaves_others_of_its_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side: each rotates as it was made to, and both compute the same."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    compiled: list[str] = []  # functions that ran compiled

    def compile_dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            compiled.append(function.__name__)
            return function(*args, **options)

        return run

    monkeypatch.setattr(fusion, "compile_dynamic", compile_dynamic)
    monkeypatch.setattr(fusion, "_fuse_rotation", fusion._fuse_rotation.__wrapped__)  # what is fused here is not kept
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    fused: Any = tiny.model()
    plain: Any = tiny.model()
    plain.load_state_dict(fused.state_dict())
    ids = torch.arange(1, 8)[None]
    before = plain(ids).logits
    fusion.fuse_model(fused)
    fusion.fuse_model(fused)  # changes nothing more
    after = plain(ids).logits
    assert compiled == []
    found = fused(ids).logits
    assert compiled == ["apply_rotary_pos_emb"] * fused.config.num_hidden_layers
    assert torch.equal(before, after)
    assert torch.allclose(before, found, atol=1e-6)
    assert modeling_llama.apply_rotary_pos_emb is own
    assert not any("forward" in vars(module) for module in plain.modules())


def test_a_tree_model_leaves_others_of_its_class_alone() -> None:
    plain: Any = tiny.model()
    over_trees = type(plain)(plain.config)  # which they share until then
    ids = torch.arange(1, 8)[None]
    before, attention = plain(ids).logits, plain.config._attn_implementation
    TreeModel(over_trees)
    assert over_trees.config._attn_implementation != attention
    assert plain.config._attn_implementation == attention
    assert torch.equal(plain(ids).logits, before)


def test_decorators_of_a_forward_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies call the copy of what they wrap, and the original is as it was."""
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda x: x + 1)

    def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return 2 * function(*args, **options)

        return call

    @doubled
    def forward(x: int, *, offset: int = 3) -> int:
        return apply_rotary_pos_emb(x) + offset  # type: ignore[name-defined, no-any-return]  # noqa: F821

    changed = fusion._copy_with_globals(forward, {"apply_rotary_pos_emb": lambda x: x + 100})
    assert changed is not None
    assert (forward(0), changed(0), changed(0, offset=0)) == (8, 206, 200)
    assert (forward(0), changed.__name__) == (8, "forward")


async def test_a_fused_feed_forward_part_keeps_two_products() -> None:
    """Also where it is made in one context and computes in another, as a trainer does."""
    model: Any = tiny.model()
    await asyncio.to_thread(fusion.fuse_model, model)
    part, sizes, tokens = model.model.layers[0].mlp, model.config, 37
    kept: list[torch.Tensor] = []

    def compute() -> None:
        with fusion.use_compiler_settings(), tiny.kept_in(kept):
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
