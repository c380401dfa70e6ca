"""Teacher forcing against a plain forward pass over each call, on small models with random weights. Without torch only
what needs none is tested."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.errors import ConfigError
from polar.records.exchange import Exchange, VersionSpan
from polar.records.trajectory import SessionPaths
from polar.trajectory.builders import prefix_merging, prefix_tree
from polar.trajectory.teacher import LogprobComparison, LogprobConditions, Teacher, logprob_conditions
from polar.types import SamplingParams
from tests.unit.trajectory.test_verify import paths_of, row

VOCABULARY = 64


@pytest.mark.parametrize(
    ("kind", "sampling", "expected"),
    [
        ("raw", SamplingParams(temperature=0.5, top_p=0.9), LogprobConditions(1.0)),
        ("processed", SamplingParams(temperature=0.5), LogprobConditions(0.5)),
        ("processed", SamplingParams(temperature=0.0), LogprobConditions(1.0)),
        ("processed", SamplingParams(top_p=1.0, top_k=-1, repetition_penalty=1.0), LogprobConditions(1.0)),
        ("processed", SamplingParams(temperature=0.5, top_p=0.9), LogprobConditions(skip_reason="top_p")),
        ("processed", SamplingParams(logit_bias={"5": 1.0}), LogprobConditions(skip_reason="logit_bias")),
        ("none", SamplingParams(), LogprobConditions(skip_reason="no_logprobs")),
    ],
)
def test_how_logits_became_log_probabilities(kind: str, sampling: SamplingParams, expected: LogprobConditions) -> None:
    exchange = row("s", 0, [1], [2], logprob_kind=kind, sampling=sampling)
    assert logprob_conditions(exchange) == expected
    assert logprob_conditions(exchange, images=True).skip_reason == "images"


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails now
    with pytest.raises(ConfigError, match=r"pip install 'polar-rl\[verify\]'"):
        Teacher.load(tmp_path)


@pytest.fixture(scope="module", params=["plain", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.5,  # so that the distributions are far from even
    }
    if request.param == "plain":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**size, sliding_window=8))  # type: ignore[assignment]
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def forced(folder: Path, exchange: Exchange, temperature: float) -> np.ndarray:
    """One call by itself, in one forward pass."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    ids = torch.from_numpy(np.concatenate((exchange.prompt_ids, exchange.sampled_ids)).astype(np.int64))
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    edge = len(exchange.prompt_ids)
    logprobs = torch.log_softmax(logits, -1)[edge - 1 : -1].gather(1, ids[edge:, None])[:, 0]
    return logprobs.numpy().astype(np.float32)


@pytest.fixture(scope="module")
def calls(folder: Path) -> list[Exchange]:
    """A conversation of more than one piece, a fork of it, a second sample of its first turn, and another agent."""
    chance = np.random.default_rng(0)
    contexts = {0: chance.integers(0, VOCABULARY, 700).tolist(), 3: [5, 6, 7]}
    calls: list[Exchange] = []
    for seq, parent in enumerate((None, 0, 0, None, 1, 0)):
        if parent is None:
            prompt = contexts[seq]
        elif seq == 5:
            prompt = contexts[0]
        else:
            before = calls[parent]
            prompt = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist(), *chance.integers(0, VOCABULARY, 9)]  # type: ignore[union-attr]
        temperature = 0.5 if seq == 1 else 1.0
        call = row("s", seq, prompt, chance.integers(0, VOCABULARY, 12), logprob_kind="processed")
        call.sampling = SamplingParams(temperature=temperature)
        call.versions = [VersionSpan(seq, 0, 12)]
        call.logprobs = forced(folder, call, temperature)
        calls.append(call)
    return calls


def compared(folder: Path, calls: list[Exchange], **options: Any) -> tuple[LogprobComparison, Teacher]:
    teacher, result = Teacher.load(folder), LogprobComparison()
    teacher.num_computed_tokens = 0
    known = {call.exchange_id: logprob_conditions(call) for call in calls}
    teacher.compare(prefix_merging(SessionPaths("s", paths_of(calls))).traces, known, result, **options)
    return result, teacher


def test_all_of_a_session_is_recomputed_exactly_and_shared_prefixes_once(folder: Path, calls: list[Exchange]) -> None:
    result, teacher = compared(folder, calls)
    assert result.tokens == 12 * len(calls)
    assert result.largest < 2e-5
    assert not result.skipped
    if folder.name.startswith("plain"):
        # All unique tokens once but for each branch's last, after which nothing is asked for; where a branch begins
        # with a token that trains, the one before it is looked at again.
        unique = prefix_tree([SessionPaths("s", paths_of(calls))]).tokens.unique
        assert unique - 4 <= teacher.num_computed_tokens <= unique + 4


def test_a_number_that_is_not_the_models_is_found(folder: Path, calls: list[Exchange]) -> None:
    call = calls[4]
    assert call.logprobs is not None
    assert call.sampled_ids is not None
    was, call.logprobs = call.logprobs, call.logprobs.copy()
    call.logprobs[7] -= 0.25
    try:
        result, _ = compared(folder, calls)
    finally:
        call.logprobs = was
    assert result.largest == pytest.approx(0.25, abs=1e-4)
    assert result.mean == pytest.approx(0.25 / 72, abs=1e-4)
    worst = result.worst
    assert worst is not None
    assert (worst.exchange_id, worst.position, worst.policy_version) == (call.exchange_id, 7, 4)
    assert worst.recorded == pytest.approx(worst.recomputed - 0.25, abs=1e-4)
    assert worst.before[-7:] == call.sampled_ids[:7].tolist()
    assert (worst.id, worst.after) == (call.sampled_ids[7], call.sampled_ids[8:12].tolist())


def test_one_version_alone_and_what_cannot_be_compared(folder: Path, calls: list[Exchange]) -> None:
    result, _ = compared(folder, calls, policy_version=2)
    assert (result.tokens, dict(result.skipped)) == (12, {"other_version": 60})
    strange = row("s", 9, [1, VOCABULARY], [2, 3])
    result, _ = compared(folder, [strange])
    assert (result.tokens, dict(result.skipped)) == (0, {"not_in_vocabulary": 2})


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no model"):
        Teacher.load(tmp_path)
