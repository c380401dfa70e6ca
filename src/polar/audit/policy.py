"""The whole file: were its log-probabilities given by this model, at this temperature?

First turns say so, as no merging of turns comes before them. Where most rows are off there already, it is not their
contexts. If one temperature explains it, it is that; if nothing less was recorded than the model gives, the
distribution was cut before sampling; otherwise the weights (or their precision) were others.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from polar.audit.contexts import EXACT_TOLERANCE, ComparedRow, Floats, Noise
from polar.trajectory.teacher import Teacher

PolicyMatchKind = Literal["same", "temperature", "truncated", "weights"]

_FIT_ROWS, _FIT_TOKENS = 8, 8
"""How many rows a temperature is fitted to, and tokens of each."""
_GRID_POINTS, _GRID_ROUNDS, _TEMPERATURE_RANGE = 16, 6, (0.05, 5.0)
_MAX_FIT_RESIDUAL = 0.2
"""The share of the difference that may be left for a temperature to be the reason."""
_OUTLIER_FACTOR = 5.0
"""A row whose first turn differs by so many times the middle one's does not count for the noise."""
_MIN_TRUNCATION_TOKENS, _MIN_TRUNCATION_SHARE = 8, 0.25


class PolicyMatch(Struct, frozen=True):
    kind: PolicyMatchKind
    temperature: float
    noise: Noise

    def explains(self, row: ComparedRow, tolerance: float) -> bool:
        """Whether this is what is wrong with a row, which was compared at this temperature."""
        if self.kind == "same" or not len(row.first_turn):
            return False
        mean = float(row.differences(row.first_turn).mean())
        return mean <= _outlier_limit(self.noise) if self.kind == "temperature" else mean > tolerance

    @property
    def description(self) -> str | None:
        if self.kind == "temperature":
            return (
                f"The log-probabilities are those of temperature {self.temperature:.3g}: if the trainer divides by the "
                f"same, pass --temperature {self.temperature:.3g}; otherwise its ratios are wrong on every token."
            )
        if self.kind == "truncated":
            return (
                f"The recorded log-probabilities are never below the model's, and {self.noise.mean:.3g} above them in "
                f"the mean: the distribution was cut before sampling (top-p, top-k, min-p), which trainers don't do."
            )
        if self.kind == "weights":
            return (
                f"First turns differ by {self.noise.mean:.3g} in the mean already: these are log-probabilities of "
                f"other weights (an older policy, another model), or of another precision (bf16: --tolerance 0.1)."
            )
        return None


def match_policy(rows: Sequence[ComparedRow], tolerance: float, temperature: float, teacher: Teacher) -> PolicyMatch:
    judged = [row for row in rows if len(row.first_turn)]
    off = [row for row in judged if row.differences(row.first_turn).mean() > tolerance]
    if len(off) * 2 <= len(judged):
        fine = [row for row in judged if row.differences(row.first_turn).mean() <= tolerance]
        return PolicyMatch("same", temperature, measure_noise(fine))
    fitted = _fit_temperature(off, teacher)
    before, after = _mean_residuals(off, np.array([temperature, fitted]), teacher)
    if after <= _MAX_FIT_RESIDUAL * before:
        return PolicyMatch("temperature", fitted, Noise())
    signed = np.concatenate([row.recorded[row.first_turn] - row.recomputed[row.first_turn] for row in off])
    cut = (
        len(signed) >= _MIN_TRUNCATION_TOKENS
        and (signed > tolerance).mean() >= _MIN_TRUNCATION_SHARE
        and not (signed < -tolerance).any()
    )
    return PolicyMatch("truncated" if cut else "weights", temperature, measure_noise(off))


def measure_noise(rows: Sequence[ComparedRow]) -> Noise:
    """Of first turns. Rows that are quite unlike the others do not count."""
    differences = [row.differences(row.first_turn) for row in rows if len(row.first_turn)]
    if not differences:
        return Noise()
    most = _OUTLIER_FACTOR * float(np.median([values.mean() for values in differences])) + EXACT_TOLERANCE
    usual = np.concatenate([values for values in differences if values.mean() <= most])
    return Noise(float(usual.mean()), float(usual.std()))


def _outlier_limit(noise: Noise) -> float:
    return _OUTLIER_FACTOR * noise.mean + EXACT_TOLERANCE


def _fit_temperature(rows: Sequence[ComparedRow], teacher: Teacher) -> float:
    """The temperature that fits best, on a grid that grows finer. A round one, if it does as well."""
    least, most = _TEMPERATURE_RANGE
    best = 1.0
    for _ in range(_GRID_ROUNDS):
        grid = np.geomspace(least, most, _GRID_POINTS)
        at = int(_mean_residuals(rows, grid, teacher).argmin())
        best, least, most = float(grid[at]), float(grid[max(0, at - 1)]), float(grid[min(_GRID_POINTS - 1, at + 1)])
    rounded = round(best, 2)
    exact, near = _mean_residuals(rows, np.array([best, rounded or best]), teacher)
    return rounded if rounded and near <= 2 * exact + 1e-5 else best


def _mean_residuals(rows: Sequence[ComparedRow], temperatures: Floats, teacher: Teacher) -> Floats:
    """The mean difference of some tokens, at each temperature."""
    found = []
    for it in rows[:_FIT_ROWS]:
        positions = it.first_turn[:_FIT_TOKENS]
        places = np.repeat(it.row.prompt_length + positions, len(temperatures))
        scales = np.tile(temperatures, len(positions)).astype(np.float32)
        values = teacher.logprobs(it.row.ids, places, scales).reshape(len(positions), -1)
        found.append(np.abs(it.recorded[positions, None] - values))
    mean: Floats = np.concatenate(found).mean(axis=0)
    return mean
