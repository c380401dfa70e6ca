"""What the sessions of `make bench-pipeline` do: long-tailed runs, slow INIT, slow evaluation.

Times are the quantiles of log-normal distributions, in an order that is drawn: however few sessions there are, they
have the whole tail. A longer session has more turns, each a model call and then a tool.
"""

import math
import random
from statistics import NormalDist

from msgspec import Struct

from benchmarks.pipeline.engine import TOKEN_SECONDS

_RUN_SIGMA = 0.99  # p99 is 10 times p50
_GRADING_SIGMA = 0.3
_TURN_SECONDS = 0.75  # on average


class WorkloadTurn(Struct, frozen=True, array_like=True):
    tokens: int  # that the model says
    tool_seconds: float


class WorkloadSession(Struct, frozen=True):
    number: int
    turns: tuple[WorkloadTurn, ...]
    grading_seconds: float

    @property
    def seconds(self) -> float:
        """Of its run, were the engine its own."""
        return sum(turn.tokens * TOKEN_SECONDS + turn.tool_seconds for turn in self.turns)


def make_sessions(count: int, *, run: float, tools: float, grading: float, seed: int) -> list[WorkloadSession]:
    """`run` and `grading` are medians in seconds, `tools` is the share of tools in a run."""
    rng = random.Random(seed)
    runs = _compute_quantiles(count, run, _RUN_SIGMA)
    gradings = _compute_quantiles(count, grading, _GRADING_SIGMA)
    rng.shuffle(runs)
    rng.shuffle(gradings)
    return [WorkloadSession(number, _make_turns(runs[number], tools, rng), gradings[number]) for number in range(count)]


def _compute_quantiles(count: int, median: float, sigma: float) -> list[float]:
    normal = NormalDist(math.log(median), sigma)
    return [math.exp(normal.inv_cdf((number + 0.5) / count)) for number in range(count)]


def _make_turns(seconds: float, tools: float, rng: random.Random) -> tuple[WorkloadTurn, ...]:
    """Turns that differ, and take so many seconds together."""
    weights = [rng.uniform(0.5, 1.5) for _ in range(max(1, round(seconds / _TURN_SECONDS)))]
    each = [seconds * weight / sum(weights) for weight in weights]
    return tuple(WorkloadTurn(max(1, round(part * (1 - tools) / TOKEN_SECONDS)), part * tools) for part in each)
