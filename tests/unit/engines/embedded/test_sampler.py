"""What is drawn is drawn with the probability that is reported."""

from collections import Counter
from math import exp

import pytest
import torch

from polar.engines.api_server.backend import SampledToken, SamplingOptions
from polar.engines.embedded.sampler import SamplingState, sample_tokens

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -torch.inf, 2.5])
DRAWS = 20_000


def drawn(**choosing: float) -> list[SampledToken]:
    torch.manual_seed(0)
    return sample_tokens(LOGITS.expand(DRAWS, -1), [SamplingState(SamplingOptions(**choosing))] * DRAWS, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choosing", "possible"),
    [
        ({}, {0, 1, 2, 3, 5}),
        ({"temperature": 2.0}, {0, 1, 2, 3, 5}),
        ({"top_k": 2}, {3, 5}),
        ({"top_p": 0.6}, {3, 5}),
        ({"min_p": 0.3}, {2, 3, 5}),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.7}, {3, 5}),
    ],
)
def test_frequencies_are_the_reported_probabilities(choosing: dict[str, float], possible: set[int]) -> None:
    tokens = drawn(**choosing)
    reported = {token.id: exp(token.logprob) for token in tokens}
    counts = Counter(token.id for token in tokens)
    assert reported.keys() == possible
    assert sum(reported.values()) == pytest.approx(1, abs=1e-5)
    for id, probability in reported.items():
        assert counts[id] / DRAWS == pytest.approx(probability, abs=0.015)
    assert {token.version for token in tokens} == {7}


def test_greedy_and_drawn_rows_stand_beside_each_other() -> None:
    rows = [SamplingState(SamplingOptions(temperature=temperature)) for temperature in (0.0, 5.0)] * 200
    tokens = sample_tokens(LOGITS.expand(len(rows), -1), rows, 0)
    assert {token.id for token in tokens[::2]} == {3}
    assert len({token.id for token in tokens[1::2]}) > 2


def test_a_seed_decides_whatever_stands_beside_it() -> None:
    def ids(beside: int) -> list[int]:
        rows = [
            SamplingState(SamplingOptions(seed=5), torch.Generator().manual_seed(5)),
            *[SamplingState(SamplingOptions())] * beside,
        ]
        return [sample_tokens(LOGITS.expand(len(rows), -1), rows, 0)[0].id for _ in range(20)]

    assert ids(0) == ids(3)
