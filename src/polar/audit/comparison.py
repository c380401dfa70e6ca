"""What was recorded of tokens against what the model says of them, and what that means for a row and for the file.

The first turn of a row is the measure. It stands behind the prompt that was sent, so it is off only if the policy was
another one, or the whole prompt. How much first turns differ is the noise: engines compute in bf16, and otherwise than
a forward pass does. A later turn that differs by more than that stands in a context that was put together afterwards.

Of the whole file: were its log-probabilities given by this model, at this temperature? First turns say so, as no
merging of turns comes before them. Where most rows are off there already, it is not their contexts. If one temperature
explains it, it is that; if nothing less was recorded than the model gives, the distribution was cut before sampling;
otherwise the weights (or their precision) were others.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.audit.rows import RolloutRow, RowProblem, find_turn_number, find_usable_logprobs, split_turns
from polar.trajectory.teacher import Teacher

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

EXACT_TOLERANCE = 1e-4
"""What fp32 allows."""
_OUTLIER_DEVIATIONS = 5.0
"""A single token is off by so many standard deviations of the noise."""
_BREAK_DEVIATIONS = 4.0
"""A turn's mean is, by so many of its own. A single token can't make it so."""
_MASK_SHIFTS = (1, -1, 2, -2, 3, -3)
_MIN_CERTAIN_GAP = 1e-3
"""A token that is as likely as this comes near to 1 may have been recorded as 0."""
_MAX_SHIFT_RESIDUAL = 0.1
"""The share of the difference that may be left where log-probabilities are taken from the neighbour."""
PolicyMatchKind = Literal["same", "temperature", "truncated", "weights"]

_FIT_ROWS, _FIT_TOKENS = 8, 8
"""How many rows a temperature is fitted to, and tokens of each."""
_GRID_POINTS, _GRID_ROUNDS, _TEMPERATURE_RANGE = 16, 6, (0.05, 5.0)
_MAX_FIT_RESIDUAL = 0.2
"""The share of the difference that may be left for a temperature to be the reason."""
_OUTLIER_FACTOR = 5.0
"""A row whose first turn differs by so many times the middle one's does not count for the noise."""
_MIN_TRUNCATION_TOKENS, _MIN_TRUNCATION_SHARE = 8, 0.25


class Noise(Struct, frozen=True):
    """How much tokens differ that are in order, in the mean; and the standard deviation."""

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def is_exact(self) -> bool:
        return _OUTLIER_DEVIATIONS * self.deviation <= EXACT_TOLERANCE

    @property
    def outlier_threshold(self) -> float:
        """A token that differs by more is off."""
        return self.mean + max(EXACT_TOLERANCE, _OUTLIER_DEVIATIONS * self.deviation)

    def compute_z_score(self, differences: Floats) -> float:
        """How far the mean of some tokens is above it, in standard deviations of such a mean. None counts for more than
        the limit, so that it takes several."""
        if not len(differences):
            return 0.0
        deviation = max(EXACT_TOLERANCE / _OUTLIER_DEVIATIONS, self.deviation)
        extra = np.minimum(differences, self.outlier_threshold).mean() - self.mean
        return float(extra / deviation * np.sqrt(len(differences)))


class ComparedRow(Struct):
    """Arrays are of the response; positions, in it. `context` is trained, though nobody sampled it: the recorded value
    is exactly 0, which is what stands where there is none, and the model says otherwise."""

    row: RolloutRow
    recorded: Floats
    recomputed: Floats
    trained_context: Positions
    turns: list[Positions]  # of the trained tokens that can be compared

    @property
    def positions(self) -> Positions:
        return np.concatenate(self.turns) if self.turns else np.empty(0, np.int64)

    @property
    def first_turn(self) -> Positions:
        return self.turns[0] if self.turns else np.empty(0, np.int64)

    def compute_differences(self, positions: Positions) -> Floats:
        return np.abs(self.recorded[positions] - self.recomputed[positions])


def compare(row: RolloutRow, recomputed: Floats, version: int | None) -> ComparedRow:
    """`recomputed` is NaN where the model could not be asked."""
    assert row.logprobs is not None
    recorded = row.logprobs.astype(np.float64)
    trained = row.mask == 1
    asked = trained & find_usable_logprobs(row) & np.isfinite(recomputed)
    if version is not None and row.versions is not None:
        asked &= row.versions == version
    unsampled = asked & (recorded == 0) & (recomputed < -_MIN_CERTAIN_GAP)
    whole = split_turns(np.flatnonzero(trained & ~unsampled))
    comparable = [turn[asked[turn]] for turn in whole]
    return ComparedRow(row, recorded, recomputed, np.flatnonzero(unsampled), [turn for turn in comparable if len(turn)])


def find_shift(compared: ComparedRow) -> int | None:
    """By how much log-probabilities stand beside their tokens, if they do."""
    first = compared.first_turn
    for by in (1, -1):
        inner = first[np.isin(first - by, first)]
        here = compared.compute_differences(inner).mean() if len(inner) >= 3 else 0.0
        if (
            here > EXACT_TOLERANCE
            and np.abs(compared.recorded[inner] - compared.recomputed[inner - by]).mean() < _MAX_SHIFT_RESIDUAL * here
        ):
            return by
    return None


def find_problems(compared: ComparedRow, noise: Noise) -> list[RowProblem]:
    """Of the mask, the context and single tokens; those of the policy are not of one row."""
    found = _find_mask_problems(compared)
    if (by := find_shift(compared)) is not None:
        said = f"Log-probabilities stand {abs(by)} token {'behind' if by > 0 else 'before'} their own"
        return [*found, RowProblem("shifted", said, int(compared.first_turn[0]), 1)]
    broken = _find_broken_turn(compared, noise)
    off = compared.positions[compared.compute_differences(compared.positions) > noise.outlier_threshold]
    if broken is not None:
        found.append(_make_break_problem(compared, broken, noise))
    elif len(off) and noise.is_exact:
        at, several = int(off[0]), len(off) > 1
        said = f"{len(off)} log-probabilit{'ies are' if several else 'y is'} off, and those behind it are not"
        found.append(RowProblem("stray", said, at, _find_turn(compared, at)))
    return found


def _find_broken_turn(compared: ComparedRow, noise: Noise) -> int | None:
    """The turn (from 0 on) from which on tokens are off: one that is by itself, or with all behind it."""
    alone = [noise.compute_z_score(compared.compute_differences(turn)) for turn in compared.turns]
    for index, value in enumerate(alone):
        if value > _BREAK_DEVIATIONS:
            return index
    later = range(1, len(compared.turns))
    rest = {
        index: noise.compute_z_score(compared.compute_differences(np.concatenate(compared.turns[index:])))
        for index in later
    }
    most = max(rest, key=rest.__getitem__, default=None)
    return most if most is not None and rest[most] > _BREAK_DEVIATIONS else None


def _make_break_problem(compared: ComparedRow, index: int, noise: Noise) -> RowProblem:
    """At its first token that is off. In noise that may be a late one, and the turn is all that can be said."""
    turn = compared.turns[index]
    differences = compared.compute_differences(turn)
    off = turn[differences > noise.outlier_threshold]
    at = int(off[0]) if noise.is_exact and len(off) else int(turn[0])
    number = _find_turn(compared, at)
    said = (
        f"Turn {number} differs by {differences.mean():.3g} in the mean and {differences.max():.3g} at most, "
        f"from its {'first token' if at == turn[0] else f'token {at - int(turn[0])}'} on"
    )
    return RowProblem("prompt" if number == 1 else "splice", said, at, number)


def _find_turn(compared: ComparedRow, position: int) -> int:
    sampled = compared.row.mask == 1
    sampled[compared.trained_context] = False
    return find_turn_number(position, split_turns(np.flatnonzero(sampled)))


def _find_mask_problems(compared: ComparedRow) -> list[RowProblem]:
    """Where tokens that nobody sampled train; perhaps because the whole mask is shifted."""
    context, mask = compared.trained_context, compared.row.mask
    if not len(context):
        return []
    at = int(context[0])
    sampled = (compared.recorded != 0).astype(np.uint8)
    for by in _MASK_SHIFTS:
        if np.array_equal(_shift_mask(sampled, by), mask):
            side = "behind" if by > 0 else "before"
            said = f"The mask stands {abs(by)} tokens {side} the tokens that have log-probabilities"
            return [RowProblem("mask_shifted", said, at, _find_turn(compared, at))]
    said = f"{len(context)} tokens without a log-probability (0 is recorded) are trained"
    if not len(compared.first_turn) or context[-1] < compared.first_turn[0]:
        return [RowProblem("prompt_trained", f"{said}, all before the first that was sampled", at, 1)]
    return [RowProblem("context_trained", said, at, _find_turn(compared, at))]


def _shift_mask(values: NDArray[np.uint8], by: int) -> NDArray[np.uint8]:
    moved = np.zeros_like(values)
    if by > 0:
        moved[by:] = values[:-by]
    else:
        moved[:by] = values[-by:]
    return moved


class PolicyMatch(Struct, frozen=True):
    kind: PolicyMatchKind
    temperature: float
    noise: Noise

    def explains(self, row: ComparedRow, tolerance: float) -> bool:
        """Whether this is what is wrong with a row, which was compared at this temperature."""
        if self.kind == "same" or not len(row.first_turn):
            return False
        mean = float(row.compute_differences(row.first_turn).mean())
        return mean <= _compute_outlier_limit(self.noise) if self.kind == "temperature" else mean > tolerance

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
    off = [row for row in judged if row.compute_differences(row.first_turn).mean() > tolerance]
    if len(off) * 2 <= len(judged):
        fine = [row for row in judged if row.compute_differences(row.first_turn).mean() <= tolerance]
        return PolicyMatch("same", temperature, measure_noise(fine))
    fitted = _fit_temperature(off, teacher)
    before, after = _compute_mean_residuals(off, np.array([temperature, fitted]), teacher)
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
    differences = [row.compute_differences(row.first_turn) for row in rows if len(row.first_turn)]
    if not differences:
        return Noise()
    most = _OUTLIER_FACTOR * float(np.median([values.mean() for values in differences])) + EXACT_TOLERANCE
    usual = np.concatenate([values for values in differences if values.mean() <= most])
    return Noise(float(usual.mean()), float(usual.std()))


def _compute_outlier_limit(noise: Noise) -> float:
    return _OUTLIER_FACTOR * noise.mean + EXACT_TOLERANCE


def _fit_temperature(rows: Sequence[ComparedRow], teacher: Teacher) -> float:
    """The temperature that fits best, on a grid that grows finer. A round one, if it does as well."""
    least, most = _TEMPERATURE_RANGE
    best = 1.0
    for _ in range(_GRID_ROUNDS):
        grid = np.geomspace(least, most, _GRID_POINTS)
        at = int(_compute_mean_residuals(rows, grid, teacher).argmin())
        best, least, most = float(grid[at]), float(grid[max(0, at - 1)]), float(grid[min(_GRID_POINTS - 1, at + 1)])
    rounded = round(best, 2)
    exact, near = _compute_mean_residuals(rows, np.array([best, rounded or best]), teacher)
    return rounded if rounded and near <= 2 * exact + 1e-5 else best


def _compute_mean_residuals(rows: Sequence[ComparedRow], temperatures: Floats, teacher: Teacher) -> Floats:
    """The mean difference of some tokens, at each temperature."""
    found = []
    for it in rows[:_FIT_ROWS]:
        positions = it.first_turn[:_FIT_TOKENS]
        places = np.repeat(it.row.prompt_length + positions, len(temperatures))
        scales = np.tile(temperatures, len(positions)).astype(np.float32)
        values = teacher.compute_logprobs(it.row.ids, places, scales).reshape(len(positions), -1)
        found.append(np.abs(it.recorded[positions, None] - values))
    mean: Floats = np.concatenate(found).mean(axis=0)
    return mean
