"""Ids that drift, and log-probabilities that anyone can recompute."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.scripted import TOKENIZER_FOLDER, Play
from polar.engines.scripted.sampler import (
    DriftingEncoder,
    advance,
    change_version,
    context_state,
    expected_logprobs,
    logprob,
    rank_alternatives,
)
from polar.records.exchange import TokenIds
from polar.rendering.tokenizer import Tokenizer

TOKENS = Tokenizer.load(TOKENIZER_FOLDER)
TEXT = "<think>" + Play.random(3, 1, 300).turns[0].text + "</think>Done.<|im_end|>"


def array(*ids: int) -> TokenIds:
    return np.array(ids, dtype=np.int32)


def test_sampled_ids_decode_to_the_text_and_re_encode_to_others() -> None:
    canonical, words = TOKENS.encode_words(TEXT)
    more = 0
    for context in range(20):
        sampled = DriftingEncoder(TOKENS, drift=0.1).encode(TEXT, context)
        assert TOKENS.decode(sampled) == TEXT
        assert sampled != canonical
        more += len(sampled) - len(canonical)  # a word that drifts has one token more
    assert 0.07 < more / 20 / len(set(words)) < 0.11


def test_markup_and_control_tokens_stay_tokens() -> None:
    sampled = DriftingEncoder(TOKENS, drift=1.0).encode(TEXT, context=7)
    assert sampled[0] == TOKENS.added_tokens["<think>"]
    assert sampled[-1] == TOKENS.eos_id
    assert TOKENS.added_tokens["</think>"] in sampled


@given(st.text(), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_any_text_survives_any_drift(text: str, drift: float, context: int) -> None:
    assert TOKENS.decode(DriftingEncoder(TOKENS, drift).encode(text, context)) == text


def test_drift_follows_seed_and_context() -> None:
    sampler = DriftingEncoder(TOKENS, drift=0.3, seed=1)
    assert sampler.encode(TEXT, 5) == sampler.encode(TEXT, 5) == DriftingEncoder(TOKENS, 0.3, 1).encode(TEXT, 5)
    different = [
        sampler.encode(TEXT, 6),
        sampler.encode(TEXT, 5, seed=1),
        DriftingEncoder(TOKENS, 0.3, 2).encode(TEXT, 5),
    ]
    assert all(ids != sampler.encode(TEXT, 5) for ids in different)
    assert DriftingEncoder(TOKENS, drift=0).encode(TEXT, 5) == TOKENS.encode(TEXT)


@given(st.lists(st.integers(0, 200_000), max_size=40), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_state_is_the_same_whichever_way_it_is_reached(ids: list[int], version: int, other: int) -> None:
    state = context_state(version, array())
    for id in ids:
        state = advance(state, id)
    assert state == context_state(version, array(*ids))
    assert change_version(state, len(ids), version, other) == context_state(other, array(*ids))


def test_log_probabilities_one_by_one_and_all_at_once() -> None:
    random = np.random.default_rng(0)
    prompt, sampled = (random.integers(0, 4000, size).astype(np.int32) for size in (30_000, 500))
    state, singly = context_state(3, prompt), []
    for id in sampled.tolist():
        singly.append(logprob(state, id))
        state = advance(state, id)
    expected = expected_logprobs(3, prompt, sampled)
    assert expected.dtype == np.float32
    assert expected.tolist() == singly
    assert -6.02 < expected.min() < -5
    assert -0.05 < expected.max() < 0


@pytest.mark.parametrize(
    "prompt",
    [array(1, 2, 3, 4, 6), array(1, 2, 4, 3, 5), array(1, 2, 3, 4), array(0, 1, 2, 3, 4, 5), array(1, 2, 3, 4, 5, 0)],
    ids=["changed", "swapped", "missing", "added in front", "added behind"],
)
def test_any_change_of_the_context_changes_every_value(prompt: TokenIds) -> None:
    sampled = array(*range(50))
    right = expected_logprobs(0, array(1, 2, 3, 4, 5), sampled)
    assert (expected_logprobs(0, prompt, sampled) != right).all()


def test_versions_differ() -> None:
    values = [tuple(expected_logprobs(version, array(1), array(2, 3, 4)).tolist()) for version in range(100)]
    assert len(set(values)) == 100


def test_alternatives_begin_with_the_sampled_token() -> None:
    for count in (1, 2, 5):
        found = rank_alternatives(123, 42, count, 4000)
        assert found[0] == (42, logprob(123, 42))
        assert len({id for id, _ in found}) == len(found) <= count
        assert all(value == logprob(123, id) for id, value in found)
        assert [value for _, value in found[1:]] == sorted((value for _, value in found[1:]), reverse=True)
