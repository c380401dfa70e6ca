"""Tokens and log-probabilities of a model that isn't there, chosen so that mistakes with them show.

Ids *drift*: they decode to the text, but encoding that text again gives other ids for a share of the words (of those
that can be spelled in another way), as it does with a real model. Whoever re-tokenises a reply ends up with ids that
were never sampled.

Log-probabilities depend on the policy version and on every context id in order, and anyone can recompute them: a single
wrong, missing or moved id before a token changes the value. `expected_logprobs` is the check.
"""

from functools import lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from polar.records.exchange import TokenIds
from polar.records.experts import Experts
from polar.rendering.tokenizer import Tokenizer

Words = NDArray[np.uint64]

# The state is a polynomial in the ids, modulo 2**64 (which is what unsigned machine words compute):
#
#     state(n) = seed(version) * R**n + sum of (id[i] + 1) * R**(n - 1 - i)
#
# R is odd, so it has an inverse, and the states at all positions are one cumulative sum.
_MULTIPLIER = 0x9E3779B97F4A7C15
_MULTIPLIER_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)
_WORD_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """Spreads every bit of a 64-bit word over all of it (the finaliser of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD_MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD_MASK
    return value ^ (value >> 31)


def _mix_all(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


def _compute_seed(version: int) -> int:
    return _mix((version + 1) * _MULTIPLIER & _WORD_MASK)


@lru_cache(maxsize=8)
def _compute_powers(base: int, size: int) -> Words:
    powers = np.full(size, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _compute_powers_up_to(base: int, count: int) -> Words:
    """base**0 ... base**(count - 1); tables come in sizes of powers of two, so that there are few."""
    return _compute_powers(base, 1 << max(count - 1, 4095).bit_length())[:count]


def context_states(version: int, ids: TokenIds) -> Words:
    """The states before each id, and after the last one."""
    terms = (ids.astype(np.uint64) + np.uint64(1)) * _compute_powers_up_to(_MULTIPLIER_INVERSE, len(ids) + 1)[1:]
    sums = np.empty(len(ids) + 1, dtype=np.uint64)
    sums[0] = _compute_seed(version)
    np.cumsum(terms, dtype=np.uint64, out=sums[1:])
    sums[1:] += sums[0]
    states: Words = sums * _compute_powers_up_to(_MULTIPLIER, len(ids) + 1)
    return states


def route_experts(ids: TokenIds, experts: int) -> Experts:
    """Which experts each token but the last is routed to: two in each of two layers, by all that stands before it, too.
    The same whatever the version."""
    states = context_states(0, ids)[1:-1]
    found: Experts = (states[:, None, None] >> np.array([[8, 20], [32, 44]], np.uint64)) % np.uint64(experts)
    return found.astype(np.uint16)


def context_state(version: int, ids: TokenIds) -> int:
    """The state of a whole context under a policy version."""
    return int(context_states(version, ids)[-1])


def advance(state: int, id: int) -> int:
    return (state * _MULTIPLIER + id + 1) & _WORD_MASK


def change_version(state: int, length: int, old: int, new: int) -> int:
    """The state of the same context of `length` ids under another version."""
    return (state + (_compute_seed(new) - _compute_seed(old)) * pow(_MULTIPLIER, length, 1 << 64)) & _WORD_MASK


def logprob(state: int, token: int) -> float:
    """The log-probability of `token` after the context of `state`: a float32 in about [-6, -0.01], mostly near zero."""
    share = (_mix(state ^ (token + 1) * _MULTIPLIER_INVERSE & _WORD_MASK) >> 40) / (1 << 24)
    return float(np.float32(-0.01 - 6.0 * share * share))


def expected_logprobs(version: int, prompt_ids: TokenIds, sampled_ids: TokenIds) -> NDArray[np.float32]:
    """What the engine reports for `sampled_ids` after `prompt_ids`, all sampled under one version.

    Of a reply that spans versions, check each span with the tokens before it as its prompt.
    """
    context = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(sampled_ids, np.int32)])
    states = context_states(version, context)[len(prompt_ids) : -1]
    tokens = (context[len(prompt_ids) :].astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER_INVERSE)
    shares = (_mix_all(states ^ tokens) >> np.uint64(40)).astype(np.float64) / (1 << 24)
    return (-0.01 - 6.0 * shares * shares).astype(np.float32)


def rank_alternatives(state: int, token: int, count: int, vocabulary: int) -> list[tuple[int, float]]:
    """The sampled token, then other candidates at that place, most probable first: `count` in all."""
    others = {_mix(state + place) % vocabulary for place in range(count)} - {token}
    ranked = sorted(((other, logprob(state, other)) for other in others), key=lambda candidate: -candidate[1])
    return [(token, logprob(state, token)), *ranked][:count]


class DriftingEncoder:
    """Encodes what the model says into ids that drift."""

    def __init__(self, tokenizer: Tokenizer, drift: float = 0.1, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._drift = drift
        self._compute_seed = seed
        self._splits = lru_cache(maxsize=1 << 16)(self._find_splits)

    def encode(self, text: str, context: int, seed: int = 0) -> list[int]:
        """Ids that decode to `text`; equal for equal text, context state and seed. Control tokens and markup that the
        text spells are the tokens themselves, as a model writes them."""
        ids, words = self._tokenizer.encode_words(text)
        if self._drift <= 0:
            return ids
        random = Random(_mix(context ^ self._compute_seed * _MULTIPLIER ^ seed * _MULTIPLIER_INVERSE & _WORD_MASK))
        out: list[int] = []
        word: int | None = None
        drifts = False
        for id, its_word in zip(ids, words, strict=True):
            if its_word is None or its_word != word:
                word = its_word
                drifts = random.random() < self._drift
            if drifts and (splits := self._splits(id)):
                out += random.choice(splits)
                drifts = False  # one token a word
            else:
                out.append(id)
        return out

    def _find_splits(self, id: int) -> tuple[tuple[int, int], ...]:
        """The pairs of tokens that together spell this one."""
        token = self._tokenizer.id_to_token(id)
        if token is None or token in self._tokenizer.added_tokens:
            return ()
        pairs = (
            (self._tokenizer.token_to_id(token[:cut]), self._tokenizer.token_to_id(token[cut:]))
            for cut in range(1, len(token))
        )
        return tuple((left, right) for left, right in pairs if left is not None and right is not None)
