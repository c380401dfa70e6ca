"""Group relative policy optimisation, as functions of numbers.

Advantages are over the sessions of a group. A session's return from turn j on is its reward plus the rewards of its
turns from j on (turns are its exchanges, in the order in which they were made; those without a reward of their own have
earned 0). What a token is given is the return from its own turn on, less what the group's sessions return from that
turn on, on average. A session that has ended by then has nothing to earn any more but its reward. Where no turn has a
reward, all of a session's tokens have one advantage: that of its reward.

The loss is decoupled. `old` is the trainer's own log-probability before the batch's first update, and `behaviour` the
one that the engine reported when it sampled: between them lie updates of the policy and the engine's own rounding. The
first is what the ratio is clipped against; the second is made good by an importance weight, which is bounded above.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Baseline = Literal["mean", "leave_one_out"]
_EQUAL = 1e-9
"""Returns that differ by less than this are the same: sums of the same numbers differ in their last bits."""


def advantages(
    rewards: Sequence[float], turns: Sequence[Sequence[float]], *, baseline: Baseline = "mean", scale: bool = True
) -> list[NDArray[np.float64]]:
    """Of a group: what each session earned, and each of its turns. An advantage for each turn of each session.

    `leave_one_out` compares a session with the others alone, which is the same but for a factor of n / (n - 1). With
    `scale` they are divided by the standard deviation of what the sessions return from that turn on."""
    sessions, longest = len(rewards), max((len(one) for one in turns), default=0)
    earned = np.zeros((sessions, longest))
    for row, one in zip(earned, turns, strict=True):
        row[: len(one)] = one
    returns = np.asarray(rewards, np.float64)[:, None] + np.cumsum(earned[:, ::-1], axis=1)[:, ::-1]
    centred = returns - returns.mean(axis=0)
    centred[:, np.ptp(returns, axis=0) < _EQUAL] = 0.0
    if scale:
        deviation = centred.std(axis=0)
        centred /= np.where(deviation > 0, deviation, 1.0)
    if baseline == "leave_one_out" and sessions > 1:
        centred *= sessions / (sessions - 1)
    return [row[: len(one)] for row, one in zip(centred, turns, strict=True)]


def importance(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """The truncated weight of each token."""
    return torch.exp(old - behaviour).clamp(max=cap)


def policy_loss(
    logprobs: Tensor, old: Tensor, importance: Tensor, coefficient: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """A sum. `coefficient` is a token's advantage times its weight; the gradient is that of `logprobs` alone."""
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(importance * torch.minimum(ratio * coefficient, clipped * coefficient)).sum()


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """From the reference, of each token: never negative, and right on average over samples of the policy."""
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1
