"""One row: what was recorded of its tokens against what the model says of them, and what that means.

The first turn of a row is the measure. It stands behind the prompt that was sent, so it is off only if the policy was
another one, or the whole prompt. How much first turns differ is the noise: engines compute in bf16, and otherwise than
a forward pass does. A later turn that differs by more than that stands in a context that was put together afterwards.
"""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.audit.form import usable
from polar.audit.rows import Problem, Row, turn_of, turns

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

EXACT = 1e-4
"""What fp32 allows."""
_LIMIT = 5.0
"""A single token is off by so many standard deviations of the noise."""
_BREAK = 4.0
"""A turn's mean is, by so many of its own. A single token can't make it so."""
_SHIFTS = (1, -1, 2, -2, 3, -3)
_SURE = 1e-3
"""A token that is as likely as this comes near to 1 may have been recorded as 0."""
_BESIDE = 0.1
"""The share of the difference that may be left where log-probabilities are taken from the neighbour."""


class Noise(Struct, frozen=True):
    """How much tokens differ that are in order, in the mean; and the standard deviation."""

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def exact(self) -> bool:
        return _LIMIT * self.deviation <= EXACT

    @property
    def limit(self) -> float:
        """A token that differs by more is off."""
        return self.mean + max(EXACT, _LIMIT * self.deviation)

    def above(self, differences: Floats) -> float:
        """How far the mean of some tokens is above it, in standard deviations of such a mean. None counts for more than
        the limit, so that it takes several."""
        if not len(differences):
            return 0.0
        deviation = max(EXACT / _LIMIT, self.deviation)
        extra = np.minimum(differences, self.limit).mean() - self.mean
        return float(extra / deviation * np.sqrt(len(differences)))


class Compared(Struct):
    """Arrays are of the response; positions, in it. `context` is trained, though nobody sampled it: the recorded value
    is exactly 0, which is what stands where there is none, and the model says otherwise."""

    row: Row
    recorded: Floats
    recomputed: Floats
    context: Positions
    turns: list[Positions]  # of the trained tokens that can be compared

    @property
    def positions(self) -> Positions:
        return np.concatenate(self.turns) if self.turns else np.empty(0, np.int64)

    @property
    def first(self) -> Positions:
        return self.turns[0] if self.turns else np.empty(0, np.int64)

    def differences(self, positions: Positions) -> Floats:
        return np.abs(self.recorded[positions] - self.recomputed[positions])


def compare(row: Row, recomputed: Floats, version: int | None) -> Compared:
    """`recomputed` is NaN where the model could not be asked."""
    assert row.logprobs is not None
    recorded = row.logprobs.astype(np.float64)
    trained = row.mask == 1
    asked = trained & usable(row) & np.isfinite(recomputed)
    if version is not None and row.versions is not None:
        asked &= row.versions == version
    nobody = asked & (recorded == 0) & (recomputed < -_SURE)
    whole = turns(np.flatnonzero(trained & ~nobody))
    comparable = [turn[asked[turn]] for turn in whole]
    return Compared(row, recorded, recomputed, np.flatnonzero(nobody), [turn for turn in comparable if len(turn)])


def shift(compared: Compared) -> int | None:
    """By how much log-probabilities stand beside their tokens, if they do."""
    first = compared.first
    for by in (1, -1):
        inner = first[np.isin(first - by, first)]
        here = compared.differences(inner).mean() if len(inner) >= 3 else 0.0
        if here > EXACT and np.abs(compared.recorded[inner] - compared.recomputed[inner - by]).mean() < _BESIDE * here:
            return by
    return None


def problems(compared: Compared, noise: Noise) -> list[Problem]:
    """Of the mask, the context and single tokens; those of the policy are not of one row."""
    found = _of_the_mask(compared)
    if (by := shift(compared)) is not None:
        said = f"Log-probabilities stand {abs(by)} token {'behind' if by > 0 else 'before'} their own"
        return [*found, Problem("shifted", said, int(compared.first[0]), 1)]
    broken = _broken(compared, noise)
    off = compared.positions[compared.differences(compared.positions) > noise.limit]
    if broken is not None:
        found.append(_break(compared, broken, noise))
    elif len(off) and noise.exact:
        at, several = int(off[0]), len(off) > 1
        said = f"{len(off)} log-probabilit{'ies are' if several else 'y is'} off, and those behind it are not"
        found.append(Problem("stray", said, at, _turn(compared, at)))
    return found


def _broken(compared: Compared, noise: Noise) -> int | None:
    """The turn (from 0 on) from which on tokens are off: one that is by itself, or with all behind it."""
    alone = [noise.above(compared.differences(turn)) for turn in compared.turns]
    for index, value in enumerate(alone):
        if value > _BREAK:
            return index
    later = range(1, len(compared.turns))
    rest = {index: noise.above(compared.differences(np.concatenate(compared.turns[index:]))) for index in later}
    most = max(rest, key=rest.__getitem__, default=None)
    return most if most is not None and rest[most] > _BREAK else None


def _break(compared: Compared, index: int, noise: Noise) -> Problem:
    """At its first token that is off. In noise that may be a late one, and the turn is all that can be said."""
    turn = compared.turns[index]
    differences = compared.differences(turn)
    off = turn[differences > noise.limit]
    at = int(off[0]) if noise.exact and len(off) else int(turn[0])
    number = _turn(compared, at)
    said = (
        f"Turn {number} differs by {differences.mean():.3g} in the mean and {differences.max():.3g} at most, "
        f"from its {'first token' if at == turn[0] else f'token {at - int(turn[0])}'} on"
    )
    return Problem("prompt" if number == 1 else "splice", said, at, number)


def _turn(compared: Compared, position: int) -> int:
    sampled = compared.row.mask == 1
    sampled[compared.context] = False
    return turn_of(position, turns(np.flatnonzero(sampled)))


def _of_the_mask(compared: Compared) -> list[Problem]:
    """Where tokens that nobody sampled train; perhaps because the whole mask is shifted."""
    context, mask = compared.context, compared.row.mask
    if not len(context):
        return []
    at = int(context[0])
    sampled = (compared.recorded != 0).astype(np.uint8)
    for by in _SHIFTS:
        if np.array_equal(_moved(sampled, by), mask):
            side = "behind" if by > 0 else "before"
            said = f"The mask stands {abs(by)} tokens {side} the tokens that have log-probabilities"
            return [Problem("mask_shifted", said, at, _turn(compared, at))]
    said = f"{len(context)} tokens without a log-probability (0 is recorded) are trained"
    if not len(compared.first) or context[-1] < compared.first[0]:
        return [Problem("prompt_trained", f"{said}, all before the first that was sampled", at, 1)]
    return [Problem("context_trained", said, at, _turn(compared, at))]


def _moved(values: NDArray[np.uint8], by: int) -> NDArray[np.uint8]:
    moved = np.zeros_like(values)
    if by > 0:
        moved[by:] = values[:-by]
    else:
        moved[:by] = values[-by:]
    return moved
