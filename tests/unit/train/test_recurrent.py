"""Trees through models with recurrent layers, against one sequence at a time: the same gradients.

The rule of a gated delta net is fp32 inside, whatever the model's type: so 1e-5 is about rounding, and the models are
made such that it is small, while layers still remember what was many tokens ago."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from polar.errors import ConfigError
from polar.records.trajectory import ROOT
from polar.train.packing import TokenTree, pack_trees
from polar.train.tree_model import TreeModel
from tests.selection import leave_to_slow
from tests.unit.train.trees import VOCABULARY, before

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.05,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def qwen3_5() -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SHAPE))


def qwen3_5_moe() -> Any:
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**SHAPE, **EXPERTS))


def qwen3_next() -> Any:
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SHAPE, **EXPERTS))


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    model = make()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # some heads forget slowly, some at once
            parameter.data.copy_(torch.tensor([0.01, 0.1, 1, 8]).log())
    return model


def random_tree(seed: int, longest: int = 70) -> TokenTree:
    """With two roots, nodes shorter than the convolution, and one that is, usually, longer than the rule's block."""
    rng = np.random.default_rng(seed)
    parents = [ROOT, ROOT, *(int(rng.integers(0, node)) for node in range(2, 9))]
    return tree_of(parents, [11, 1, longest, 2, *rng.integers(0, longest // 4, 5).tolist()], rng)


def nested_tree() -> TokenTree:
    """A fork behind a fork, and long branches: later chunks go on from two memories of the first, two from the same."""
    return tree_of([ROOT, 0, 1, 1, 0, 0], [6, 5, 7, 20, 36, 40], np.random.default_rng(0))


def tree_of(parents: list[int], lengths: list[int], rng: np.random.Generator) -> TokenTree:
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    ids = rng.integers(0, VOCABULARY, starts[-1]).astype(np.int32)
    tree = TokenTree(ids, starts, np.array(parents, np.int32), np.empty(0, np.int64), np.empty(0, np.float32))
    tree.tokens = rng.choice([token for token in range(len(ids)) if before(tree, token)], 8)
    tree.temperature = rng.choice([0.7, 1.0], 8).astype(np.float32)
    return tree


def one_at_a_time(model: Any, trees: list[TokenTree], weights: Tensor) -> Tensor:
    """Each entry is a sequence of its own; gradients are left in the model."""
    model.zero_grad()
    found = []
    for tree in trees:
        for token, temperature in zip(tree.tokens, tree.temperature, strict=True):
            ids = torch.from_numpy(tree.ids[before(tree, token)]).long()
            logits = model(ids[None], use_cache=False).logits[0, -1] / float(temperature)
            logprob = logits.log_softmax(-1)[int(tree.ids[token])]
            (weights[len(found)] * logprob).backward()
            found.append(logprob.detach())
    return torch.stack(found)


def gradients(model: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("make", leave_to_slow([qwen3_5, qwen3_5_moe, qwen3_next], but=[qwen3_5_moe]))
def test_gradients_are_exact(make: Callable[[], Any]) -> None:
    model = made(make)
    trees = [random_tree(1), nested_tree()]
    weights = torch.randn(sum(len(tree.tokens) for tree in trees))
    expected = one_at_a_time(model, trees, weights)
    right = gradients(model)

    packed = pack_trees(trees)
    for chunk_tokens, kept_tokens in [(10_000, 10_000), (64, 10_000), (64, 0), (17, 30)]:
        over_trees = TreeModel(model, chunk_tokens=chunk_tokens, kept_tokens=kept_tokens)
        model.zero_grad()
        logprobs = over_trees.backward(packed, lambda index, logprobs: (weights[index] * logprobs).sum())
        assert apart(gradients(model), right) < 1e-5, (chunk_tokens, kept_tokens)
        assert torch.allclose(logprobs, expected, atol=1e-5)
        assert torch.allclose(over_trees.compute_logprobs(packed), expected, atol=1e-5)


def test_tokens_one_by_one() -> None:
    """Every token a chunk of its own: windows come from several chunks back."""
    model = made(qwen3_5)
    tree = random_tree(3, longest=16)
    weights = torch.randn(len(tree.tokens))
    one_at_a_time(model, [tree], weights)
    right = gradients(model)
    model.zero_grad()
    TreeModel(model, chunk_tokens=1, kept_tokens=9).backward(
        pack_trees([tree]), lambda index, logprobs: (weights[index] * logprobs).sum()
    )
    assert apart(gradients(model), right) < 1e-5


@pytest.mark.parametrize("trained", ["layers.1.", "layers.2.linear_attn.conv1d", "layers.0.linear_attn.A_log"])
def test_where_a_part_is_trained_its_gradient_is_the_same(trained: str) -> None:
    model = made(qwen3_5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    tree = random_tree(4)
    one_at_a_time(model, [tree], torch.ones(len(tree.tokens)))
    right = gradients(model)
    model.zero_grad()
    TreeModel(model, chunk_tokens=17, kept_tokens=40).backward(pack_trees([tree]), lambda _, logprobs: logprobs.sum())
    assert apart(gradients(model), right) < 1e-4  # a few numbers, of many that cancel out


def test_without_a_tree_the_layers_are_as_they_were() -> None:
    """Also those of a copy, which must not run with the weights of the model that it was copied from."""
    model = made(qwen3_5)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        TreeModel(model)
        model.set_attn_implementation("sdpa")
        copy = deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copy(ids).logits, expected)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("MambaForCausalLM", {}),
        ("RwkvForCausalLM", {"attention_hidden_size": 32}),
        ("MiniMaxForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}),
    ],
)
def test_other_recurrent_layers_are_refused(model: str, config: dict[str, Any]) -> None:
    kind = getattr(transformers, model)
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="prefix_merging"):
        TreeModel(kind(kind.config_class(**small, **config)))
