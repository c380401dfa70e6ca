"""The whole file: were its log-probabilities given by this model, at this temperature?

First turns say so, as no merging of turns comes before them. Where most rows are off there already, it is not their
contexts. If one temperature explains it, it is that; if nothing less was recorded than the model gives, the
distribution was cut before sampling; otherwise the weights (or their precision) were others.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from polar.audit.contexts import EXACT, Compared, Floats, Noise
from polar.trajectory.teacher import Teacher

Kind = Literal["same", "temperature", "truncated", "weights"]

_ROWS, _TOKENS = 8, 8
"""How many rows a temperature is fitted to, and tokens of each."""
_GRID, _ROUNDS, _RANGE = 16, 6, (0.05, 5.0)
_EXPLAINED = 0.2
"""The share of the difference that may be left for a temperature to be the reason."""
_STRANGE = 5.0
"""A row whose first turn differs by so many times the middle one's does not count for the noise."""
_FEW, _MANY = 8, 0.25


class Policy(Struct, frozen=True):
    kind: Kind
    temperature: float
    noise: Noise

    def explains(self, row: Compared, tolerance: float) -> bool:
        """Whether this is what is wrong with a row, which was compared at this temperature."""
        if self.kind == "same" or not len(row.first):
            return False
        mean = float(row.differences(row.first).mean())
        return mean <= _most(self.noise) if self.kind == "temperature" else mean > tolerance

    @property
    def sentence(self) -> str | None:
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


def policy(rows: Sequence[Compared], tolerance: float, temperature: float, teacher: Teacher) -> Policy:
    judged = [row for row in rows if len(row.first)]
    off = [row for row in judged if row.differences(row.first).mean() > tolerance]
    if len(off) * 2 <= len(judged):
        fine = [row for row in judged if row.differences(row.first).mean() <= tolerance]
        return Policy("same", temperature, noise(fine))
    fitted = _fit(off, teacher)
    before, after = _left(off, np.array([temperature, fitted]), teacher)
    if after <= _EXPLAINED * before:
        return Policy("temperature", fitted, Noise())
    signed = np.concatenate([row.recorded[row.first] - row.recomputed[row.first] for row in off])
    cut = len(signed) >= _FEW and (signed > tolerance).mean() >= _MANY and not (signed < -tolerance).any()
    return Policy("truncated" if cut else "weights", temperature, noise(off))


def noise(rows: Sequence[Compared]) -> Noise:
    """Of first turns. Rows that are quite unlike the others do not count."""
    differences = [row.differences(row.first) for row in rows if len(row.first)]
    if not differences:
        return Noise()
    most = _STRANGE * float(np.median([values.mean() for values in differences])) + EXACT
    usual = np.concatenate([values for values in differences if values.mean() <= most])
    return Noise(float(usual.mean()), float(usual.std()))


def _most(noise: Noise) -> float:
    return _STRANGE * noise.mean + EXACT


def _fit(rows: Sequence[Compared], teacher: Teacher) -> float:
    """The temperature that fits best, on a grid that grows finer. A round one, if it does as well."""
    least, most = _RANGE
    best = 1.0
    for _ in range(_ROUNDS):
        grid = np.geomspace(least, most, _GRID)
        at = int(_left(rows, grid, teacher).argmin())
        best, least, most = float(grid[at]), float(grid[max(0, at - 1)]), float(grid[min(_GRID - 1, at + 1)])
    rounded = round(best, 2)
    exact, near = _left(rows, np.array([best, rounded or best]), teacher)
    return rounded if rounded and near <= 2 * exact + 1e-5 else best


def _left(rows: Sequence[Compared], temperatures: Floats, teacher: Teacher) -> Floats:
    """The mean difference of some tokens, at each temperature."""
    found = []
    for it in rows[:_ROWS]:
        positions = it.first[:_TOKENS]
        places = np.repeat(it.row.edge + positions, len(temperatures))
        scales = np.tile(temperatures, len(positions)).astype(np.float32)
        values = teacher.logprobs(it.row.ids, places, scales).reshape(len(positions), -1)
        found.append(np.abs(it.recorded[positions, None] - values))
    mean: Floats = np.concatenate(found).mean(axis=0)
    return mean
