"""`weighted`: the mean of other evaluators' rewards, by weight. Each has a fresh runtime of its own.

A part that has no reward leaves the whole without one, for that part's reason. A `required` part that earns 0 makes it
all 0. Rewards of single turns are added up with the same weights.

Evidence of tampering is that of all parts together; a part that fails leaves that of the parts before it.
"""

import math
from typing import Any

from msgspec import Struct
from pydantic import Field

from polar.errors import ConfigError
from polar.evaluators import load_evaluator
from polar.evaluators.base import Evaluator, GraderError, GradingContext, parse_config
from polar.records.session import Verdict
from polar.records.task import EvaluatorRequest, RequestModel
from polar.runtimes.base import Runtime


class PartConfig(RequestModel):
    strategy: str
    config: dict[str, Any] = Field({}, description="of that evaluator")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    name: str | None = Field(None, description="[default: the strategy]")
    required: bool = False


class WeightedConfig(RequestModel):
    parts: list[PartConfig] = Field(min_length=1)


class _Part(Struct, frozen=True):
    name: str
    folder: str
    evaluator: Evaluator
    weight: float  # of all: they add up to 1
    required: bool


class Weighted:
    needs_fresh_runtime: bool

    def __init__(self, config: dict[str, Any]) -> None:
        parts = parse_config(WeightedConfig, config).parts
        total = sum(part.weight for part in parts)
        self._parts: list[_Part] = []
        for number, part in enumerate(parts):
            name = _make_unique(part.name or part.strategy, [other.name for other in self._parts])
            request = EvaluatorRequest(strategy=part.strategy, config=part.config)
            try:
                evaluator = load_evaluator(request)
            except ConfigError as error:
                raise ConfigError(f"config.parts.{number}: {error}") from error
            self._parts.append(_Part(name, f"part-{number}", evaluator, part.weight / total, part.required))
        self.needs_fresh_runtime = any(part.evaluator.needs_fresh_runtime for part in self._parts)
        self.private_paths = [path for part in self._parts for path in getattr(part.evaluator, "private_paths", ())]

    async def evaluate(self, work: GradingContext) -> Verdict:
        verdicts = [(part, await _evaluate_part(part, work)) for part in self._parts]
        detail = {part.name: _to_detail(verdict) for part, verdict in verdicts}
        evidence = list(dict.fromkeys(one for _, verdict in verdicts for one in verdict.evidence))
        for part, verdict in verdicts:
            if verdict.reward is None:
                return Verdict(reason=f"{part.name}: {verdict.reason}", detail=detail, evidence=evidence)
        weights = [part.weight for part, _ in verdicts]
        reward = _weighted_mean(weights, [verdict.reward or 0.0 for _, verdict in verdicts])
        exchanges = dict.fromkeys(exchange for _, verdict in verdicts for exchange in verdict.turn_rewards)
        turns = {
            exchange: _weighted_mean(weights, [verdict.turn_rewards.get(exchange, 0.0) for _, verdict in verdicts])
            for exchange in exchanges
        }
        if any(part.required and verdict.reward == 0 for part, verdict in verdicts):
            reward = 0.0
        return Verdict(reward, turn_rewards=turns, detail=detail, evidence=evidence)


def _weighted_mean(weights: list[float], values: list[float]) -> float:
    """The weights add up to 1 but for rounding, which must not lead out of the values' range, or to infinity."""
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return min(max(mean, min(values)), max(values))


async def _evaluate_part(part: _Part, work: GradingContext) -> Verdict:
    own = _PartContext(work, part.folder)
    try:
        verdict = await part.evaluator.evaluate(own)
    except GraderError as error:
        raise GraderError(f"{part.name}: {error}") from error
    work.evidence.extend(verdict.evidence)
    if verdict.reward is None and verdict.reason is None:
        raise GraderError(f"{part.name}: it gave neither a reward nor a reason.")
    if verdict.reward is not None and not math.isfinite(verdict.reward):
        raise GraderError(f"{part.name}: its reward is {verdict.reward}.")
    return verdict


class _PartContext:
    """The same work, with folders that no other part uses."""

    def __init__(self, work: GradingContext, folder: str) -> None:
        self.task = work.task
        self.session_id = work.session_id
        self.outcome = work.outcome
        self.agent_runtime = work.agent_runtime
        self.live = work.live
        self.initial_workspace = work.initial_workspace
        self.exchanges = work.exchanges
        self.judges = work.judges
        self.answer = work.answer
        self.evidence = work.evidence
        self.scratch = work.scratch / folder
        self.logs = work.logs / folder
        self._work = work
        self.scratch.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    async def create_fresh_runtime(self) -> Runtime:
        return await self._work.create_fresh_runtime()


def _make_unique(name: str, used: list[str]) -> str:
    number, unused = 1, name
    while unused in used:
        number += 1
        unused = f"{name} {number}"
    return unused


def _to_detail(verdict: Verdict) -> dict[str, Any]:
    earned = {"reward": verdict.reward} if verdict.reward is not None else {"reason": verdict.reason}
    return earned | verdict.detail
