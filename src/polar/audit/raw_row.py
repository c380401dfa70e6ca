"""What is wrong with a row as it stands, before any model is asked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.audit.rows import RolloutRow, RowProblem, split_turns, turn_number

_MIN_LOGPROB = -1000.0
"""No model gives less in fp32; -9999 and the like say that somebody had nothing to write."""
_MAX_LOGPROB = 1e-3
"""Rounding may lead above 0, but not further."""


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
    logprobs = None if raw.logprobs is None else _logprob_array(raw.logprobs)
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


def usable_logprobs(row: RolloutRow) -> NDArray[np.bool_]:
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
            found.append(RowProblem(kind, said, at, turn_number(at, split_turns(trained))))
    return found


def _logprob_array(values: Sequence[Any]) -> NDArray[np.float32]:
    """One a token. Some engines' APIs give a list of likely tokens for each, the sampled one first."""
    firsts = (value[0] if isinstance(value, (list, tuple)) and value else value for value in values)
    return np.array([np.nan if value is None else value for value in firsts], np.float32)
