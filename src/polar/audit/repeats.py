"""Samplings that are trained more than once: the same token, in the same context, with the same log-probability.

Two samples of a group may say the same by chance. So rows that do not call themselves parts of one rollout are believed
where what they share was likely enough.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polar.audit.raw_row import usable_logprobs
from polar.audit.rows import RolloutRow, RowProblem, split_turns, turn_number

_MAX_CHANCE_LOGPROB = -20.0
"""The log-probability below which nobody says the same twice."""


def find_repeats(rows: Sequence[RolloutRow]) -> dict[int, RowProblem]:
    """By the numbers of rows that repeat an earlier one."""
    factors = np.random.default_rng(0).integers(0, 2**63, max((len(row.ids) for row in rows), default=0), np.uint64)
    first: dict[bytes, RolloutRow] = {}
    found: dict[int, RowProblem] = {}
    for row in rows:
        if not row.has_matching_lengths:
            continue
        positions = np.flatnonzero((row.mask == 1) & usable_logprobs(row))
        shared: dict[int, tuple[RolloutRow, list[int]]] = {}
        for position, key in zip(positions.tolist(), _sampling_keys(row, positions, factors), strict=True):
            earlier = first.setdefault(key, row)
            if earlier is not row:
                shared.setdefault(earlier.number, (earlier, []))[1].append(position)
        for other, same in shared.values():
            if row.number not in found and _is_same_sampling(row, other, same):
                said = f"{len(same)} of its tokens are trained in row {other.number} too, sampled once"
                found[row.number] = RowProblem(
                    "repeated", said, same[0], turn_number(same[0], split_turns(row.trained_positions))
                )
    return found


def _is_same_sampling(row: RolloutRow, other: RolloutRow, positions: list[int]) -> bool:
    assert row.logprobs is not None
    together = row.rollout is not None and row.rollout == other.rollout
    return together or float(row.logprobs[positions].sum()) < _MAX_CHANCE_LOGPROB


def _sampling_keys(row: RolloutRow, positions: NDArray[np.int64], factors: NDArray[np.uint64]) -> list[bytes]:
    """Of each token: a number for it and all that stands before it (a sum modulo 2**64), and its log-probability."""
    if row.logprobs is None:
        return []
    odd = factors[: len(row.ids)] * np.uint64(2) + np.uint64(1)
    prefixes = np.cumsum((row.ids.astype(np.uint64) + np.uint64(1)) * odd, dtype=np.uint64)[
        row.prompt_length + positions
    ]
    values = row.logprobs[positions].view(np.uint32).astype(np.uint64)
    return [pair.tobytes() for pair in np.stack([prefixes, values], axis=1)]
