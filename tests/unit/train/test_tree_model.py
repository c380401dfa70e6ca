"""Trees through a model against one sequence at a time: the same log-probabilities, and the same gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from polar.errors import ConfigError
from polar.records.trajectory import SessionPaths
from polar.train import packing, tree_model
from polar.train.packing import pack_trees
from polar.train.tree_model import TreeModel
from tests.unit.train.trees import KINDS, VOCABULARY, group, group_tree

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True))


def windowed() -> Any:
    """Its second layer sees the last eight tokens alone."""
    config = transformers.Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in config.layer_types  # type: ignore[operator]
    return transformers.Qwen3ForCausalLM(config)


def one_at_a_time(model: Any, sessions: list[SessionPaths], weights: dict[tuple[str, int], float]) -> dict[str, Tensor]:
    """Each call is a sequence of its own. Log-probabilities by call; gradients are left in the model."""
    model.zero_grad()
    found = {}
    for path in (path for session in sessions for path in session.paths):
        ids = torch.tensor([[*path.prompt.tolist(), *path.sampled.tolist()]])
        logits = model(ids, use_cache=False).logits[0, len(path.prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(path.sampled).long()[:, None])[:, 0]
        weight = torch.tensor([weights[path.exchange_id, place] for place in range(len(logprobs))])
        (weight * logprobs).sum().backward()
        found[path.exchange_id] = logprobs.detach()
    return found


def gradients(model: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(
    "sizes", [(None, None), (40, 10**6), (40, 0), (7, 21)], ids=["whole", "kept", "twice", "mixed"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [llama, qwen3, windowed])
def test_gradients_are_exact(make: Callable[[], Any], kind: str, sizes: tuple[int | None, int | None]) -> None:
    torch.manual_seed(1)
    model = make()
    sessions = group(kind)
    tree, entries = group_tree(sessions)
    drawn = torch.randn(len(entries))
    weights = dict(zip(entries, drawn.tolist(), strict=True))
    alone = one_at_a_time(model, sessions, weights)
    right = gradients(model)

    over_trees = TreeModel(model, chunk_tokens=sizes[0], kept_tokens=sizes[1])
    model.zero_grad()
    packed = pack_trees([tree])
    assert len(packed) < sum(len(path.prompt) + len(path.sampled) for session in sessions for path in session.paths)
    logprobs = over_trees.backward(packed, lambda index, logprobs: (drawn[index] * logprobs).sum())
    assert (gradients(model) - right).norm() / right.norm() < 1e-5
    expected = torch.stack([alone[exchange][place] for exchange, place in entries])
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(over_trees.compute_logprobs(packed), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "forked", "think_stripped"])
def test_gradients_are_exact_where_tokens_are_repeated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = group(kind)
    tree, entries = group_tree(sessions)
    torch.manual_seed(1)
    model = llama()
    drawn = torch.randn(len(entries))
    one_at_a_time(model, sessions, dict(zip(entries, drawn.tolist(), strict=True)))
    right = gradients(model)
    model.zero_grad()
    over_trees = TreeModel(model, chunk_tokens=16, kept_tokens=32)
    once = len(pack_trees([tree]))
    monkeypatch.setattr(packing, "_TINY_NODE_TOKENS", 20)  # the system's text
    monkeypatch.setattr(packing, "_LONG_BRANCH_TOKENS", 5)
    packed = pack_trees([tree])
    assert len(packed) > once
    over_trees.backward(packed, lambda at, found: (drawn[at] * found).sum())
    assert (gradients(model) - right).norm() / right.norm() < 1e-5


def test_frozen_layers_cost_no_backward_pass_and_change_no_gradient() -> None:
    torch.manual_seed(1)
    model = llama()
    sessions = group("linear")
    tree, entries = group_tree(sessions)
    weights = dict.fromkeys(entries, 1.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2." in name or "lm_head" in name)
    one_at_a_time(model, sessions, weights)
    right = gradients(model)
    model.zero_grad()
    TreeModel(model, chunk_tokens=16, kept_tokens=32).backward(pack_trees([tree]), lambda _, logprobs: logprobs.sum())
    assert (gradients(model) - right).norm() / right.norm() < 1e-5


def test_lora_trains_the_same() -> None:
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    sessions = group("forked")
    tree, entries = group_tree(sessions)
    one_at_a_time(model, sessions, dict.fromkeys(entries, 1.0))
    right = gradients(model)
    model.zero_grad()
    TreeModel(model, chunk_tokens=16, kept_tokens=32).backward(pack_trees([tree]), lambda _, logprobs: logprobs.sum())
    assert (gradients(model) - right).norm() / right.norm() < 1e-5


def test_dropout_is_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, attention_dropout=0.1)).train()
    with pytest.raises(ConfigError, match="dropout"):
        TreeModel(model)


def gemma2() -> Any:
    """Caps its scores."""
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SHAPE))


def granite() -> Any:
    """Scales its logits."""
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SHAPE | {"logits_scaling": 8.0}))


def falcon() -> Any:
    """Has an attention of its own, whatever it is told."""
    shape = {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**shape))


@pytest.mark.parametrize("make", [gemma2, granite, falcon])
def test_a_model_that_does_more_than_trees_know_of_is_refused_and_left_as_it_was(make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    model = make().eval()
    ids = torch.arange(1, 20)[None]
    before = model(ids).logits
    with pytest.raises(ConfigError):
        TreeModel(model)
    assert torch.equal(model(ids).logits, before)


def test_few_logits_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the same tokens were sampled."""
    monkeypatch.setattr(tree_model, "LOGIT_BATCH_TERMS", 8)
    model = llama()
    tree, _ = group_tree(group("linear"))
    tree.tokens, tree.temperature = np.repeat(tree.tokens, 5), np.repeat(tree.temperature, 5)
    over_trees = TreeModel(model)
    whole = over_trees.compute_logprobs(pack_trees([tree]))
    rows = []
    head = over_trees._head
    over_trees._head = lambda hidden: rows.append(len(hidden)) or head(hidden)  # type: ignore[func-returns-value]
    assert torch.allclose(over_trees.compute_logprobs(pack_trees([tree])), whole)
    assert max(rows) <= 8
    # Rows of one token may differ in their last bits: they are computed in batches of different sizes.
    assert torch.allclose(whole, whole.view(-1, 5)[:, :1].expand(-1, 5).flatten())
