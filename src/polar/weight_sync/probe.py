"""Proves that an engine has the trainer's weights: the engine samples a few tokens, and the trainer's model computes
their log-probabilities. Both must agree within the tolerance of their arithmetic."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.engines.base import Engine, TokenPrompt
from polar.errors import EngineError
from polar.records.exchange import SENTINEL_LOGPROB
from polar.torch_runtime import run_on_compute_thread
from polar.types import Request, SamplingParams
from polar.weight_sync.base import WeightMismatchError

Scorer = Callable[[list[int], list[int]], Sequence[float]]
"""From prompt ids and sampled ids to the sampled tokens' log-probabilities at temperature 1."""

_PROMPT_COUNT, _PROMPT_TOKENS, _MAX_SAMPLED_TOKENS = 4, 16, 8
"""The number of prompts, the tokens of each, and the maximum of sampled tokens."""


class Tolerance(Struct, frozen=True):
    """How far two computations of the same log-probabilities may differ."""

    largest: float
    mean: float
    outliers: float = 0.0  # the share of tokens with the largest differences that is ignored


_TOLERANCES = {
    # In fp32 only the order of additions differs: 5e-5 was seen between vLLM and transformers.
    "float32": Tolerance(1e-3, 1e-4),
    # A logit of about 16 has steps of 1/64 in fp16 and of 1/8 in bf16, and each layer adds its own. The same bf16
    # weights through two kinds of attention were 0.07 apart in the mean, and one token in 1,500 by 1 to 10, wherever
    # behind such strange prompts a small step tips something over: up to 2 of the 32 tokens of a probe. Other weights
    # move all of them, and what is wrong at one place of every reply moves 4.
    "float16": Tolerance(0.2, 0.02, outliers=1 / 16),
    "bfloat16": Tolerance(1.0, 0.15, outliers=1 / 16),
}


def choose_tolerance(*dtypes: str) -> Tolerance:
    """The tolerance for the coarsest of these dtypes (torch's names). An unknown dtype counts as bfloat16, since a
    false alarm would end a run."""
    tolerances = [_TOLERANCES.get(dtype, _TOLERANCES["bfloat16"]) for dtype in dtypes]
    return max(tolerances, key=lambda tolerance: tolerance.largest)


class ProbeSample(Struct, frozen=True):
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


class Difference(Struct, frozen=True):
    """The differences between an engine's and the trainer's log-probabilities of the same tokens, without outliers."""

    tokens: int
    largest: float
    mean: float

    @classmethod
    def combine(cls, parts: "Sequence[Difference]") -> "Difference":
        tokens = sum(part.tokens for part in parts)
        mean = sum(part.mean * part.tokens for part in parts) / tokens
        return cls(tokens, max(part.largest for part in parts), mean)

    def is_within(self, tolerance: Tolerance) -> bool:
        return self.largest <= tolerance.largest and self.mean <= tolerance.mean


class Probe:
    def __init__(self, score: Scorer, vocab_size: int, tolerance: Tolerance) -> None:
        """Prompts are random ids of the vocabulary, always the same ones; their meaning does not matter."""
        self._score = score
        self.tolerance = tolerance
        random = np.random.default_rng(0)
        self._prompts: list[list[int]] = random.integers(0, vocab_size, (_PROMPT_COUNT, _PROMPT_TOKENS)).tolist()

    async def sample(self, engine: Engine) -> list[ProbeSample]:
        """Samples all prompts with the engine's current weights."""
        return list(await asyncio.gather(*(_sample(engine, prompt) for prompt in self._prompts)))

    async def check(self, url: str, samples: Sequence[ProbeSample]) -> Difference:
        """Compares what the engine at `url` sampled with the trainer's model. Raises WeightMismatchError."""
        difference = await self.measure_difference(samples)
        if not difference.is_within(self.tolerance):
            raise WeightMismatchError(
                f"{url} does not have the trainer's weights: log-probabilities differ by {difference.largest:.3g} at "
                f"most and {difference.mean:.3g} in the mean, and {self.tolerance.largest:g} and "
                f"{self.tolerance.mean:g} are allowed. See docs/weights.md."
            )
        return difference

    async def measure_difference(self, samples: Sequence[ProbeSample]) -> Difference:
        """Compares samples with the trainer's current model. The model runs in a thread and must not change
        meanwhile."""
        return await run_on_compute_thread(self._measure_difference, samples)

    def _measure_difference(self, samples: Sequence[ProbeSample]) -> Difference:
        by_sample = [
            np.abs(np.asarray(sample.logprobs, np.float64) - np.asarray(self._score(sample.prompt, sample.ids)))
            for sample in samples
        ]
        differences: NDArray[np.float64] = np.sort(np.concatenate(by_sample))
        if np.isfinite(differences).all():  # otherwise something is broken, and nothing is ignored
            differences = differences[: len(differences) - int(self.tolerance.outliers * len(differences))]
        differences[np.isnan(differences)] = math.inf
        return Difference(len(differences), float(differences.max()), float(differences.mean()))


async def _sample(engine: Engine, prompt: list[int]) -> ProbeSample:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=_MAX_SAMPLED_TOKENS)
    request = Request(model="", messages=[], sampling=sampling)
    ids: list[int] = []
    logprobs: list[float | None] = []
    text = ",".join(map(str, prompt)).encode()
    async for chunk in engine.generate(request, stream=False, prompt=TokenPrompt(np.array(prompt, np.int32), text)):
        ids += chunk.ids
        logprobs += chunk.logprobs or []
    if not ids or len(ids) != len(logprobs):
        raise EngineError(f"{engine.url} gave {len(logprobs)} log-probabilities for {len(ids)} tokens.")
    return ProbeSample(
        prompt, ids, [math.nan if value is None or value <= SENTINEL_LOGPROB else value for value in logprobs]
    )


def make_scorer(model: Any) -> Scorer:
    """Scores by a plain forward pass of a Hugging Face model."""
    import torch

    @torch.inference_mode()
    def score(prompt: list[int], sampled: list[int]) -> list[float]:
        training = model.training
        model.eval()  # no dropout
        try:
            ids = torch.tensor([prompt + sampled], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        finally:
            model.train(training)
        logprobs: list[float] = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return logprobs

    return score
