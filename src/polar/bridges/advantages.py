"""Advantages over the sessions of a group, for trainers that would take each row for a sample of its own."""

from collections.abc import Sequence

import numpy as np

_EQUAL_REWARD_TOLERANCE = 1e-9
"""Rewards that differ by less than this are the same."""


def compute_session_advantages(
    rewards: Sequence[float], *, scale: bool = True, epsilon: float = 1e-6, ddof: int = 1
) -> list[float]:
    """One for each session: its reward less the group's mean; with `scale`, in units of the group's standard deviation
    (over n - `ddof`). Where all earned the same, advantages are 0."""
    values = np.asarray(rewards, np.float64)
    if len(values) < 2 or np.ptp(values) < _EQUAL_REWARD_TOLERANCE:
        return [0.0] * len(values)
    centered = values - values.mean()
    return list((centered / (centered.std(ddof=ddof) + epsilon) if scale else centered).tolist())
