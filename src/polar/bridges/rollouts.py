"""Groups for a trainer: tasks go out, sessions come back as traces.

A group is all sessions of one task at one step. Its name at the service follows from the trainer's run, the step and
the task, so whoever asks again (after a crash, say) gets what has run already, and nothing runs twice.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from msgspec import Struct, field

from polar.bridges.reading import item
from polar.bridges.settings import BridgeSettings
from polar.client.async_client import AsyncClient
from polar.client.given import tasks_of
from polar.closing import AsyncClosing
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import Item
from polar.rollout.models import SessionResult, TaskRequest
from polar.trajectory.checker import SessionChecker
from polar.trajectory.document_check import check_received, hold_reason
from polar.trajectory.verify import Problem


class Group(Struct):
    """Of one task, all sessions that can be trained on; `left_out` counts the others, by reason."""

    task: str  # as the task files name it
    name: str  # as the service does
    asked: int
    items: list[Item]
    results: list[SessionResult]  # of the same sessions, with their messages
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def rewards(self) -> list[float]:
        return [one.session.reward for one in self.items if one.session.reward is not None]


class Keys:
    """Keys of groups, step by step: a task that comes again in a step has another group. Whoever goes on from a step
    asks for the same ones."""

    def __init__(self) -> None:
        self._asked: Counter[tuple[str, str]] = Counter()

    def of(self, step: str, task: str) -> str:
        again = self._asked[step, task]
        self._asked[step, task] += 1
        return f"{step}.{again}" if again else step


class Rollouts(AsyncClosing):
    """Use as an async context manager, or close it. Many groups may be asked for at the same time."""

    def __init__(self, settings: BridgeSettings) -> None:
        """Raises ConfigError where the tasks can't be read."""
        self.settings = settings
        self.tasks: Mapping[str, TaskRequest] = {
            task.task_id: task for task in tasks_of(settings.tasks, run=settings.run)
        }
        self.client = AsyncClient(settings.server, settings.token, settings.run, patience=settings.patience)
        self._checker = SessionChecker(settings.verify_share)
        self._met = False  # the service has answered

    async def close(self) -> None:
        await self.client.close()

    async def group(
        self, task: str, key: str, *, samples: int | None = None, sampling: SamplingOverrides | None = None
    ) -> Group:
        """Runs a task, or finds what ran already under this `key` (a step, say); `sampling` goes over the task's own.
        Raises ConfigError for a task that the files don't have, and ClientError."""
        asked = self._request(task, key, samples or self.settings.samples, sampling)
        if not self._met:
            await self.client.health()  # a service that is not there is told at once; one that goes away is waited for
            self._met = True
        await self.client.submit(asked)
        async for ended in self.client.ended([asked.task_id]):
            return self._group(task, asked, ended.results)
        raise AssertionError  # it ends, or raises

    async def groups(self, wanted: Iterable[str], key: str, *, samples: int | None = None) -> list[Group]:
        """One for each task, in their order; a task that is named twice has two groups. Raises ConfigError before any
        is run."""
        keys = Keys()
        asked = [(task, keys.of(key, task)) for task in wanted]
        for task, _ in asked:
            self._written(task)
        return await together(self.group(task, own, samples=samples) for task, own in asked)

    async def cancel(self, task: str, key: str) -> None:
        await self.client.cancel(self._name(task, key))

    def _name(self, task: str, key: str) -> str:
        return f"{self.settings.name}/{key}/{task}"

    def _written(self, task: str) -> TaskRequest:
        if task in self.tasks:
            return self.tasks[task]
        some = ", ".join(sorted(self.tasks)[:3])
        raise ConfigError(
            f"There is no task {task!r} in {', '.join(self.settings.tasks)}: a row of the trainer's data names a task "
            f"by its task_id, as {some}."
        )

    def _request(self, task: str, key: str, samples: int, sampling: SamplingOverrides | None) -> TaskRequest:
        written = self._written(task)
        over = {} if sampling is None else sampling.model_dump(exclude_none=True)
        return written.model_copy(
            update={
                "task_id": self._name(task, key),
                "num_samples": samples,
                "builder": written.builder.model_copy(update={"strategy": self.settings.builder}),
                "max_lag": self.settings.max_lag if self.settings.max_lag is not None else written.max_lag,
                "sampling": written.sampling.model_copy(update=over),
                "metadata": {**written.metadata, "task": task, "key": key},
            }
        )

    def _group(self, task: str, asked: TaskRequest, results: list[SessionResult]) -> Group:
        left_out: Counter[str] = Counter()
        kept = []
        for result in results:
            reason = _unusable(result) or hold_reason(self._checker, result.session_id, partial(_problems_of, result))
            if reason is None:
                kept.append(result)
            else:
                left_out[reason] += 1
        return Group(task, asked.task_id, asked.num_samples, [item(result) for result in kept], kept, left_out)


T = TypeVar("T")


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """All of it at the same time, in its order. Where one fails, nobody waits for the others any more."""
    running: list[asyncio.Future[T]] = []
    try:
        running.extend(asyncio.ensure_future(one) for one in work)
        return list(await asyncio.gather(*running))
    except BaseException:
        for one in running:
            one.cancel()
        raise


def _problems_of(result: SessionResult) -> list[Problem]:
    return check_received(item(result).trajectory)


def _unusable(result: SessionResult) -> str | None:
    """Why a session can't be trained on."""
    if result.reward is None:
        return result.reason or "no_reward"
    if result.metadata.get("stale"):
        return "stale"
    if not result.trajectory.traces:
        return "nothing_to_train"
    return None
