"""One row of a dump, whatever trainer it is of; and what can be wrong with it."""

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.records.trajectory import Ids, Mask

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


class RowProblem(Struct, frozen=True):
    kind: str
    message: str
    position: int | None = None  # in the response
    turn: int | None = None  # of the model's turns, from 1 on


class RolloutRow(Struct):
    """Prompt and response, and arrays of the response. `problems` are those of its form."""

    number: int  # in the file, from 1 on
    ids: Ids
    prompt_length: int  # where the response begins
    mask: Mask
    logprobs: NDArray[np.float32] | None  # NaN where there is none
    rollout: str | None = None  # rows with the same one are parts of the same rollout
    versions: Ids | None = None  # policy versions, token by token
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


def turn_number(position: int, turns: list[NDArray[np.int64]]) -> int:
    """From 1 on; a position between two turns belongs to the one before."""
    return max(1, sum(1 for turn in turns if turn[0] <= position))
