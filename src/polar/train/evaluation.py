"""Held-out tasks through the same service, under names of their own: what is sampled for them is never trained on."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from polar.client.async_client import AsyncClient
from polar.records.task import TaskRequest
from polar.train.rollouts import merge_sampling
from polar.train.settings import EvaluationSettings, RolloutSettings


class EvaluationResult(Struct):
    """`reward` is the mean over sessions that have one."""

    step: int
    reward: float | None
    sessions: int
    reasons: dict[str, int] = field(default_factory=dict)  # of sessions that have none
    rewards: dict[str, list[float]] = field(default_factory=dict)  # by task


class Evaluation:
    def __init__(
        self,
        client: AsyncClient,
        tasks: Sequence[TaskRequest],
        settings: EvaluationSettings,
        rollout: RolloutSettings,
        *,
        name: str,
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._settings = settings
        self._rollout = rollout
        self._name = name

    def is_due(self, step: int, last: int) -> bool:
        if not self._tasks:
            return False
        return step in (0, last) or (self._settings.every is not None and step % self._settings.every == 0)

    async def run(self, step: int) -> EvaluationResult:
        """All of them, before whatever else is queued."""
        changes: dict[str, Any] = {}
        if self._settings.temperature is not None:
            changes["temperature"] = self._settings.temperature
        names = {f"{self._name}/held-out/{step}/{task.task_id}": task for task in self._tasks}
        tasks = [
            task.model_copy(
                update={
                    "task_id": name,
                    "run": self._rollout.run,
                    "num_samples": self._settings.samples,
                    "sampling": merge_sampling(task, self._rollout, **changes),
                    "dispatch_priority": min(task.dispatch_priority + 1, 100),
                    "max_lag": 0,  # an engine that came back with other weights is not what is measured
                    "on_stale": "cancel",
                }
            )
            for name, task in names.items()
        ]
        await self._client.submit(tasks)
        rewards: dict[str, list[float]] = {task.task_id: [] for task in self._tasks}
        reasons: Counter[str] = Counter()
        async for ended in self._client.as_completed(names):
            for result in ended.results:
                if result.reward is None:
                    reasons[result.reason or "not_evaluated"] += 1
                else:
                    rewards[names[ended.task_id].task_id].append(result.reward)
        earned = [reward for one in rewards.values() for reward in one]
        mean = sum(earned) / len(earned) if earned else None
        return EvaluationResult(step, mean, len(earned) + reasons.total(), dict(reasons), rewards)
