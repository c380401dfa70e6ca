"""Submits tasks to the rollout service and reads groups back: training tasks, and held-out tasks.

Training groups are submitted ahead of time and read in the order in which they finish.

The order of tasks and their ids at the service depend only on the seed. So a restarted process submits the same ids
again, and nothing runs twice. A group is settled once it was trained on or dropped. The number of unsettled groups in
flight is a step's worth, plus one for each of the `max_lag` steps that sampling may be ahead.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from msgspec import Struct, field

from polar.client.async_client import AsyncClient
from polar.config import SamplingOverrides
from polar.records.task import TaskRequest
from polar.train import groups
from polar.train.groups import RolloutGroup
from polar.train.settings import EvaluationSettings, RolloutSettings
from polar.trajectory.checker import SessionChecker
from polar.trajectory.session import TREE_BUILDER

_GROUPS_PER_PAGE = 8  # groups read per request


class SettledGroups(Struct):
    """The indices of settled groups: all below `floor`, and some others."""

    floor: int = 0
    others: list[int] = []

    def add(self, indices: Iterable[int]) -> None:
        known = {*self.others, *(index for index in indices if index >= self.floor)}
        while self.floor in known:
            known.remove(self.floor)
            self.floor += 1
        self.others = sorted(known)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and (index < self.floor or index in self.others)

    def __len__(self) -> int:
        return self.floor + len(self.others)


class TaskOrder:
    """Maps group indices to tasks. Each epoch has all tasks, in its own random order."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names = names
        self._seed = seed
        self._epochs: dict[int, list[str]] = {}

    def get_epoch_and_task(self, index: int) -> tuple[int, str]:
        epoch, place = divmod(index, len(self._names))
        return epoch, self._shuffle_epoch(epoch)[place]

    def get_group_index(self, epoch: int, name: str) -> int:
        return epoch * len(self._names) + self._shuffle_epoch(epoch).index(name)

    def _shuffle_epoch(self, epoch: int) -> list[str]:
        if epoch not in self._epochs:
            shuffled = self._epochs[epoch] = list(self._names)
            random.Random(f"{self._seed}/{epoch}").shuffle(shuffled)
        return self._epochs[epoch]


class RolloutScheduler:
    """Keeps groups in flight and hands out the finished ones. Use as an async context manager."""

    def __init__(
        self,
        client: AsyncClient,
        tasks: Sequence[TaskRequest],
        settings: RolloutSettings,
        *,
        name: str,
        seed: int,
        cursor: int,
        settled: SettledGroups,
        limit: int,
    ) -> None:
        """`name` is the prefix of all task ids. `cursor` and `settled` are the progress of an earlier process. `limit`
        is the total number of groups, including those."""
        self.settled = settled
        self.limit = limit
        self._client = client
        self._tasks = {task.task_id: task for task in tasks}
        self._settings = settings
        self._checker = SessionChecker(settings.verify_share)
        self._name = name
        self._order = TaskOrder(list(self._tasks), seed)
        self._next = settled.floor  # all groups below it are settled or in flight
        self._cursor = cursor
        self._indices: dict[str, int] = {}  # of groups in flight, by task id
        self._ready: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        self._reader_task: asyncio.Task[None] | None = None
        self._submit_lock = asyncio.Lock()

    async def __aenter__(self) -> "RolloutScheduler":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader_task is not None:
            self._reader_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader_task

    @property
    def in_flight(self) -> int:
        return len(self._indices)

    async def submit_next_groups(self) -> None:
        """Submits as many groups as may be in flight."""
        settings = self._settings
        if self._reader_task is None:
            self._reader_task = asyncio.create_task(self._read_feed())
        async with self._submit_lock:
            tasks = []
            max_in_flight = settings.groups_per_step * (settings.max_lag + 1)
            while self.in_flight < min(max_in_flight, self.limit - len(self.settled)):
                index, self._next = self._next, self._next + 1
                epoch, name = self._order.get_epoch_and_task(index)
                task = self._build_task(epoch, self._tasks[name])
                if index not in self.settled and task.task_id not in self._indices:
                    self._indices[task.task_id] = index
                    tasks.append(task)
            if tasks:
                await self._client.submit(tasks)

    def _build_task(self, epoch: int, task: TaskRequest) -> TaskRequest:
        """The service cancels sessions that become stale while they run, since training would drop them."""
        settings = self._settings
        return task.model_copy(
            update={
                "task_id": f"{self._name}/{epoch}/{task.task_id}",
                "run": settings.run,
                "num_samples": settings.group_size,
                "sampling": merge_sampling(task, settings),
                "max_lag": settings.max_lag,
                "on_stale": "cancel",
            }
        )

    async def take_group(self) -> RolloutGroup:
        """Waits for the next finished group. Raises ClientError if the service can't be reached."""
        assert self._reader_task is not None  # submit_next_groups was called
        taking = asyncio.ensure_future(self._ready.get())
        try:
            await asyncio.wait({taking, self._reader_task}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                await self._reader_task  # raises its error
            return await taking
        finally:
            taking.cancel()

    def settle(self, settled_groups: Iterable[RolloutGroup]) -> None:
        """Groups that are settled already may be among them."""
        new = [group for group in settled_groups if group.index not in self.settled]
        self.settled.add(group.index for group in new)
        for group in new:
            del self._indices[group.task_id]

    async def _read_feed(self) -> None:
        settings = self._settings
        feed = self._client.results(
            self._cursor, unit="group", raw=True, builder=settings.builder, limit=_GROUPS_PER_PAGE
        )
        async with feed:
            async for result in feed:
                index = self._find_index(result.task_id)
                if index is None or index in self.settled:
                    continue
                # An earlier process may have submitted groups that this one has not submitted yet.
                self._indices[result.task_id] = index
                if settings.builder == TREE_BUILDER:
                    tree = await self._client.trajectory(result.task_id)
                    group = await asyncio.to_thread(
                        groups.build_group_from_tree, result.data, tree, index, self._checker
                    )
                else:
                    group = await asyncio.to_thread(groups.build_group_from_traces, result.data, index, self._checker)
                await self._ready.put(group)

    def _find_index(self, task_id: str) -> int | None:
        """None for groups that are not from this scheduler, such as an evaluation's."""
        epoch, _, name = task_id.removeprefix(f"{self._name}/").partition("/")
        ours = task_id.startswith(f"{self._name}/") and epoch.isdecimal() and name in self._tasks
        return self._order.get_group_index(int(epoch), name) if ours else None


_UNMODIFIED_SAMPLING = SamplingOverrides(
    top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
)
"""Overrides the harness's sampling parameters, so that tokens are sampled from the unmodified policy. Otherwise their
probabilities would be unknown."""


def merge_sampling(task: TaskRequest, settings: RolloutSettings, **others: object) -> object:
    """The task's sampling overrides, with the trainer's on top."""
    values = (
        _UNMODIFIED_SAMPLING.model_dump(exclude_none=True) | settings.sampling.model_dump(exclude_none=True) | others
    )
    return task.sampling.model_copy(update=values)


# Held-out tasks


class EvaluationResult(Struct):
    """The outcome of one evaluation. `reward` is the mean over the sessions that have one."""

    step: int
    reward: float | None
    sessions: int
    reasons: dict[str, int] = field(default_factory=dict)  # of sessions without a reward
    rewards: dict[str, list[float]] = field(default_factory=dict)  # by task


class Evaluation:
    """Runs held-out tasks on the same service, under their own ids. Their sessions are never trained on."""

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
        """Runs all held-out tasks, with priority over other queued tasks."""
        changes: dict[str, Any] = {}
        if self._settings.temperature is not None:
            changes["temperature"] = self._settings.temperature
        tasks_by_id = {f"{self._name}/held-out/{step}/{task.task_id}": task for task in self._tasks}
        tasks = [
            task.model_copy(
                update={
                    "task_id": task_id,
                    "run": self._rollout.run,
                    "num_samples": self._settings.samples,
                    "sampling": merge_sampling(task, self._rollout, **changes),
                    "dispatch_priority": min(task.dispatch_priority + 1, 100),
                    "max_lag": 0,  # an engine that restarted with other weights must not be measured
                    "on_stale": "cancel",
                }
            )
            for task_id, task in tasks_by_id.items()
        ]
        await self._client.submit(tasks)
        rewards: dict[str, list[float]] = {task.task_id: [] for task in self._tasks}
        reasons: Counter[str] = Counter()
        async for ended in self._client.as_completed(tasks_by_id):
            for result in ended.results:
                if result.reward is None:
                    reasons[result.reason or "not_evaluated"] += 1
                else:
                    rewards[tasks_by_id[ended.task_id].task_id].append(result.reward)
        all_rewards = [reward for task_rewards in rewards.values() for reward in task_rewards]
        mean = sum(all_rewards) / len(all_rewards) if all_rewards else None
        return EvaluationResult(step, mean, len(all_rewards) + reasons.total(), dict(reasons), rewards)
