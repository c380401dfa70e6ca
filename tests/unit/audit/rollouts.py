"""Rollouts of several turns, sampled from a small model with random weights, as rows of a dump, whole or spoilt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from polar.audit.rows import RawRow, RolloutRow, build_row
from polar.trajectory.teacher import Teacher
from tests.unit.train import tiny

VOCABULARY = 64


def small(seed: int = 0) -> Any:
    return tiny.model(seed, vocab_size=VOCABULARY, initializer_range=0.5)


def teacher(model: Any) -> Teacher:
    return Teacher(model, torch)


class Policy:
    """Who samples: a model, at a temperature."""

    def __init__(self, model: Any, temperature: float = 1.0, seed: int = 0, top_k: int | None = None) -> None:
        self.model = model
        self.temperature = temperature
        self.top_k = top_k
        self.chance = np.random.default_rng(seed)

    def context(self, length: int) -> list[int]:
        return self.chance.integers(0, VOCABULARY, length).tolist()

    def say(self, before: Sequence[int], length: int) -> tuple[list[int], list[float]]:
        """What is sampled behind some tokens, and its log-probabilities."""
        ids, logprobs = list(before), []
        for _ in range(length):
            with torch.inference_mode():
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].double() / self.temperature
            if self.top_k is not None:
                logits = logits.where(logits >= logits.topk(self.top_k).values[-1], -torch.inf)
            values = torch.log_softmax(logits, -1)
            one = int(self.chance.choice(VOCABULARY, p=values.exp().numpy() / values.exp().sum().item()))
            ids.append(one)
            logprobs.append(float(values[one].float()))
        return ids[len(before) :], logprobs


def fields(policy: Policy, turns: int = 3, *, spliced: int | None = None, length: int = 6, **more: Any) -> RawRow:
    """A rollout. From turn `spliced` on (counted from 1), the model saw another context than stands in the row: a token
    of what came before was another one, as when a turn is tokenised anew."""
    prompt = policy.context(9)
    seen: list[int] = list(prompt)
    made = RawRow(prompt, [], [], [], **more)
    response, mask, logprobs = [], [], []
    for turn in range(1, turns + 1):
        if turn > 1:
            between = policy.context(4)
            seen += between
            response += between
            mask += [0] * len(between)
            logprobs += [0.0] * len(between)
        if turn == spliced:
            at = len(seen) - 1 - int(policy.chance.integers(0, 8))
            seen[at] = (seen[at] + 1 + int(policy.chance.integers(0, VOCABULARY - 1))) % VOCABULARY
        said, values = policy.say(seen, length)
        seen += said
        response += said
        mask += [1] * len(said)
        logprobs += values
    made.response, made.mask, made.logprobs = response, mask, logprobs
    return made


def rows(made: Sequence[RawRow]) -> list[RolloutRow]:
    return [build_row(number, one) for number, one in enumerate(made, 1)]
