"""One row of a dump, whatever trainer it is of; what can be wrong with it, and what is before any model is asked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.records.exchange import TokenIds
from polar.records.trajectory import Mask, PolicyVersions

PROBLEM_KINDS = {
    "lengths": "ids, mask and log-probabilities do not fit together",
    "prompt_trained": "tokens of the prompt are trained",
    "padding_trained": "padding is trained",
    "not_in_vocabulary": "ids that the model does not have",
    "missing": "no log-probabilities: nothing says in which context its tokens were sampled",
    "not_finite": "log-probabilities that are missing, NaN or infinite",
    "sentinel": "log-probabilities that none can be: above 0, or far below what any model gives",
    "mask_shifted": "the mask stands beside the sampled tokens",
    "context_trained": "tokens that nobody sampled are trained",
    "shifted": "log-probabilities stand beside their tokens",
    "splice": "tokens stand in another context than they were sampled in",
    "prompt": "tokens were sampled behind another prompt, or by other weights than the other rows'",
    "temperature": "log-probabilities of another temperature",
    "truncated": "log-probabilities of a truncated distribution (top-p, top-k)",
    "weights": "log-probabilities of other weights, or of another precision",
    "stray": "single log-probabilities that are wrong",
    "repeated": "the same sampling is trained more than once",
}
"""What can be wrong. Of a row's problems the first one here is its verdict."""
_MIN_LOGPROB = -1000.0
"""No model gives less in fp32; -9999 and the like say that somebody had nothing to write."""
_MAX_LOGPROB = 1e-3
"""Rounding may lead above 0, but not further."""


class RowProblem(Struct, frozen=True):
    kind: str
    message: str
    position: int | None = None  # in the response
    turn: int | None = None  # of the model's turns, from 1 on


class RolloutRow(Struct):
    """Prompt and response, and arrays of the response. `problems` are those of its form."""

    number: int  # in the file, from 1 on
    ids: TokenIds
    prompt_length: int  # where the response begins
    mask: Mask
    logprobs: NDArray[np.float32] | None  # NaN where there is none
    rollout: str | None = None  # rows with the same one are parts of the same rollout
    versions: PolicyVersions | None = None  # policy versions, token by token
    skip: str | None = None  # why it can't be recomputed
    problems: list[RowProblem] = field(default_factory=list)

    @property
    def has_matching_lengths(self) -> bool:
        """Whether its arrays are as long as the response: else nobody knows which entry is whose."""
        length = len(self.ids) - self.prompt_length
        return len(self.mask) == length and (self.logprobs is None or len(self.logprobs) == length)

    @property
    def trained_positions(self) -> NDArray[np.int64]:
        """Positions in the response."""
        return np.flatnonzero(self.mask)


def split_turns(positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Runs of positions without a gap: what the model said without being interrupted."""
    if not len(positions):
        return []
    return np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)


def find_turn_number(position: int, turns: list[NDArray[np.int64]]) -> int:
    """From 1 on; a position between two turns belongs to the one before."""
    return max(1, sum(1 for turn in turns if turn[0] <= position))


class RawRow(Struct):
    """What a format has of a row, as it was read. A mask of None trains the whole response."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int] | None
    logprobs: Sequence[Any] | None
    rollout: str | None = None
    versions: Sequence[int] | None = None
    skip: str | None = None
    problems: list[RowProblem] = field(default_factory=list)


def build_row(number: int, raw: RawRow) -> RolloutRow:
    edge, length = len(raw.prompt), len(raw.response)
    ids = np.array([*raw.prompt, *raw.response], np.int32)
    problems = list(raw.problems)
    mask = np.ones(length, np.uint8) if raw.mask is None else np.array(raw.mask, np.int64)
    if len(mask) == edge + length and edge and mask[:edge].any():
        first = int(np.flatnonzero(mask)[0])
        said = f"The mask is one of the whole row, and trains {mask[:edge].sum()} tokens of the prompt, from {first} on"
        problems.append(RowProblem("prompt_trained", said))
        mask = mask[edge:]
    if len(mask) != length:
        problems.append(RowProblem("lengths", f"{len(mask)} entries of the mask for {length} tokens of the response"))
    elif ((mask != 0) & (mask != 1)).any():
        at = int(np.flatnonzero((mask != 0) & (mask != 1))[0])
        problems.append(RowProblem("lengths", f"An entry of the mask is {mask[at]}, neither 0 nor 1", at))
    logprobs = None if raw.logprobs is None else _to_logprob_array(raw.logprobs)
    if logprobs is not None and len(logprobs) != length:
        problems.append(RowProblem("lengths", f"{len(logprobs)} log-probabilities for {length} tokens of the response"))
    made = RolloutRow(
        number=number,
        ids=ids,
        prompt_length=edge,
        mask=mask.astype(np.uint8),
        logprobs=logprobs,
        rollout=raw.rollout,
        versions=None if raw.versions is None else np.array(raw.versions, np.int32),
        skip=raw.skip,
        problems=problems,
    )
    if made.has_matching_lengths:
        made.problems += _find_value_problems(made)
    return made


def find_usable_logprobs(row: RolloutRow) -> NDArray[np.bool_]:
    """Of the response's tokens: those with a log-probability that can be one."""
    if row.logprobs is None:
        return np.zeros(len(row.mask), np.bool_)
    with np.errstate(invalid="ignore"):
        return np.isfinite(row.logprobs) & (row.logprobs > _MIN_LOGPROB) & (row.logprobs < _MAX_LOGPROB)


def _find_value_problems(row: RolloutRow) -> list[RowProblem]:
    trained = row.trained_positions
    if not len(trained):
        return []
    if row.logprobs is None:
        return [RowProblem("missing", "There are no log-probabilities")]
    values = row.logprobs[trained]
    finite = np.isfinite(values)
    strange = finite & ((values <= _MIN_LOGPROB) | (values >= _MAX_LOGPROB))
    found = []
    for kind, wrong, what in (("not_finite", ~finite, "missing or not finite"), ("sentinel", strange, "impossible")):
        if wrong.any():
            at = int(trained[wrong][0])
            said = f"{wrong.sum()} of {len(trained)} log-probabilities are {what}, the first is {row.logprobs[at]:g}"
            found.append(RowProblem(kind, said, at, find_turn_number(at, split_turns(trained))))
    return found


def _to_logprob_array(values: Sequence[Any]) -> NDArray[np.float32]:
    """One a token. Some engines' APIs give a list of likely tokens for each, the sampled one first."""
    firsts = (value[0] if isinstance(value, (list, tuple)) and value else value for value in values)
    return np.array([np.nan if value is None else value for value in firsts], np.float32)
