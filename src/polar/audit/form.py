"""What is wrong with a row as it stands, before any model is asked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.audit.rows import Problem, Row, turn_of, turns

_LEAST = -1000.0
"""No model gives less in fp32; -9999 and the like say that somebody had nothing to write."""
_MOST = 1e-3
"""Rounding may lead above 0, but not further."""


class Fields(Struct):
    """What a format has of a row, as it was read. A mask of None trains the whole response."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int] | None
    logprobs: Sequence[Any] | None
    rollout: str | None = None
    versions: Sequence[int] | None = None
    skip: str | None = None
    problems: list[Problem] = field(default_factory=list)


def row(number: int, fields: Fields) -> Row:
    edge, length = len(fields.prompt), len(fields.response)
    ids = np.array([*fields.prompt, *fields.response], np.int32)
    problems = list(fields.problems)
    mask = np.ones(length, np.uint8) if fields.mask is None else np.array(fields.mask, np.int64)
    if len(mask) == edge + length and edge and mask[:edge].any():
        first = int(np.flatnonzero(mask)[0])
        said = f"The mask is one of the whole row, and trains {mask[:edge].sum()} tokens of the prompt, from {first} on"
        problems.append(Problem("prompt_trained", said))
        mask = mask[edge:]
    if len(mask) != length:
        problems.append(Problem("lengths", f"{len(mask)} entries of the mask for {length} tokens of the response"))
    elif ((mask != 0) & (mask != 1)).any():
        at = int(np.flatnonzero((mask != 0) & (mask != 1))[0])
        problems.append(Problem("lengths", f"An entry of the mask is {mask[at]}, neither 0 nor 1", at))
    logprobs = None if fields.logprobs is None else _numbers(fields.logprobs)
    if logprobs is not None and len(logprobs) != length:
        problems.append(Problem("lengths", f"{len(logprobs)} log-probabilities for {length} tokens of the response"))
    made = Row(
        number=number,
        ids=ids,
        edge=edge,
        mask=mask.astype(np.uint8),
        logprobs=logprobs,
        rollout=fields.rollout,
        versions=None if fields.versions is None else np.array(fields.versions, np.int32),
        skip=fields.skip,
        problems=problems,
    )
    if made.fits:
        made.problems += _values(made)
    return made


def usable(row: Row) -> NDArray[np.bool_]:
    """Of the response's tokens: those with a log-probability that can be one."""
    if row.logprobs is None:
        return np.zeros(len(row.mask), np.bool_)
    with np.errstate(invalid="ignore"):
        return np.isfinite(row.logprobs) & (row.logprobs > _LEAST) & (row.logprobs < _MOST)


def _values(row: Row) -> list[Problem]:
    trained = row.trained
    if not len(trained):
        return []
    if row.logprobs is None:
        return [Problem("missing", "There are no log-probabilities")]
    values = row.logprobs[trained]
    finite = np.isfinite(values)
    strange = finite & ((values <= _LEAST) | (values >= _MOST))
    found = []
    for kind, wrong, what in (("not_finite", ~finite, "missing or not finite"), ("sentinel", strange, "impossible")):
        if wrong.any():
            at = int(trained[wrong][0])
            said = f"{wrong.sum()} of {len(trained)} log-probabilities are {what}, the first is {row.logprobs[at]:g}"
            found.append(Problem(kind, said, at, turn_of(at, turns(trained))))
    return found


def _numbers(values: Sequence[Any]) -> NDArray[np.float32]:
    """One a token. Some engines' APIs give a list of likely tokens for each, the sampled one first."""
    firsts = (value[0] if isinstance(value, (list, tuple)) and value else value for value in values)
    return np.array([np.nan if value is None else value for value in firsts], np.float32)
