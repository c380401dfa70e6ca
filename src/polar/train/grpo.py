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
_EQUAL_RETURN_TOLERANCE = 1e-9
"""Returns that differ by less than this are the same: sums of the same numbers differ in their last bits."""


def compute_advantages(
    rewards: Sequence[float],
    turn_rewards: Sequence[Sequence[float]],
    *,
    baseline: Baseline = "mean",
    scale: bool = True,
) -> list[NDArray[np.float64]]:
    """The advantage of each turn of each session of a group, from the sessions' and their turns' rewards.

    `leave_one_out` compares a session with the others only, which multiplies the advantage by n / (n - 1). `scale`
    divides by the standard deviation of the sessions' returns from that turn on."""
    sessions, longest = len(rewards), max((len(session_turns) for session_turns in turn_rewards), default=0)
    turn_returns = np.zeros((sessions, longest))
    for row, session_turns in zip(turn_returns, turn_rewards, strict=True):
        row[: len(session_turns)] = session_turns
    returns = np.asarray(rewards, np.float64)[:, None] + np.cumsum(turn_returns[:, ::-1], axis=1)[:, ::-1]
    centered = returns - returns.mean(axis=0)
    centered[:, np.ptp(returns, axis=0) < _EQUAL_RETURN_TOLERANCE] = 0.0
    if scale:
        deviation = centered.std(axis=0)
        centered /= np.where(deviation > 0, deviation, 1.0)
    if baseline == "leave_one_out" and sessions > 1:
        centered *= sessions / (sessions - 1)
    return [row[: len(session_turns)] for row, session_turns in zip(centered, turn_rewards, strict=True)]


def compute_importance_weights(old_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """The truncated importance weight of each token."""
    return torch.exp(old_logprobs - behavior_logprobs).clamp(max=cap)


def compute_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    importance_weights: Tensor,
    coefficient: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The clipped loss, summed over tokens. `coefficient` is a token's advantage times its weight. Only `logprobs` has
    a gradient."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(importance_weights * torch.minimum(ratio * coefficient, clipped * coefficient)).sum()


def estimate_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The KL divergence from the reference at each token: never negative, and unbiased over samples of the policy."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1
