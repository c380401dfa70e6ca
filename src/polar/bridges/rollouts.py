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

from polar.bridges.settings import BridgeSettings
from polar.client.async_client import AsyncClient
from polar.client.task_input import load_tasks
from polar.closeable import AsyncCloseable
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.records import wire
from polar.records.result import SessionResult
from polar.records.task import TaskRequest
from polar.trajectory.checker import SessionChecker
from polar.trajectory.document_check import check_received, find_hold_reason
from polar.trajectory.verify import Problem


class SessionGroup(Struct):
    """Of one task, all sessions that can be trained on; `left_out` counts the others, by reason."""

    task: str  # as the task files name it
    name: str  # as the service does
    requested_samples: int
    items: list[SessionItem]
    results: list[SessionResult]  # of the same sessions, with their messages
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def rewards(self) -> list[float]:
        return [one.session.reward for one in self.items if one.session.reward is not None]


class GroupKeys:
    """Keys of groups, step by step: a task that comes again in a step has another group. Whoever goes on from a step
    asks for the same ones."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def next_key(self, step: str, task: str) -> str:
        again = self._counts[step, task]
        self._counts[step, task] += 1
        return f"{step}.{again}" if again else step


class RolloutClient(AsyncCloseable):
    """Use as an async context manager, or close it. Many groups may be asked for at the same time."""

    def __init__(self, settings: BridgeSettings) -> None:
        """Raises ConfigError where the tasks can't be read."""
        self.settings = settings
        self.tasks: Mapping[str, TaskRequest] = {
            task.task_id: task for task in load_tasks(settings.tasks, run=settings.run)
        }
        self.client = AsyncClient(settings.server, settings.token, settings.run, patience=settings.patience)
        self._checker = SessionChecker(settings.verify_share)
        self._has_answered = False  # the service has answered

    async def close(self) -> None:
        await self.client.close()

    async def run_group(
        self, task: str, key: str, *, samples: int | None = None, sampling: SamplingOverrides | None = None
    ) -> SessionGroup:
        """Runs a task, or finds what ran already under this `key` (a step, say); `sampling` goes over the task's own.
        Raises ConfigError for a task that the files don't have, and ClientError."""
        asked = self._build_request(task, key, samples or self.settings.samples, sampling)
        if not self._has_answered:
            await self.client.health()  # a service that is not there is told at once; one that goes away is waited for
            self._has_answered = True
        await self.client.submit(asked)
        async for ended in self.client.as_completed([asked.task_id]):
            return self._build_group(task, asked, ended.results)
        raise AssertionError  # it ends, or raises

    async def run_groups(self, tasks: Iterable[str], key: str, *, samples: int | None = None) -> list[SessionGroup]:
        """One for each task, in their order; a task that is named twice has two groups. Raises ConfigError before any
        is run."""
        keys = GroupKeys()
        asked = [(task, keys.next_key(key, task)) for task in tasks]
        for task, _ in asked:
            self._get_task(task)
        return await gather_or_cancel(self.run_group(task, own, samples=samples) for task, own in asked)

    async def cancel(self, task: str, key: str) -> None:
        await self.client.cancel(self._group_name(task, key))

    def _group_name(self, task: str, key: str) -> str:
        return f"{self.settings.name}/{key}/{task}"

    def _get_task(self, task: str) -> TaskRequest:
        if task in self.tasks:
            return self.tasks[task]
        some = ", ".join(sorted(self.tasks)[:3])
        raise ConfigError(
            f"There is no task {task!r} in {', '.join(self.settings.tasks)}: a row of the trainer's data names a task "
            f"by its task_id, as {some}."
        )

    def _build_request(self, task: str, key: str, samples: int, sampling: SamplingOverrides | None) -> TaskRequest:
        written = self._get_task(task)
        over = {} if sampling is None else sampling.model_dump(exclude_none=True)
        return written.model_copy(
            update={
                "task_id": self._group_name(task, key),
                "num_samples": samples,
                "builder": written.builder.model_copy(update={"strategy": self.settings.builder}),
                "max_lag": self.settings.max_lag if self.settings.max_lag is not None else written.max_lag,
                "sampling": written.sampling.model_copy(update=over),
                "metadata": {**written.metadata, "task": task, "key": key},
            }
        )

    def _build_group(self, task: str, asked: TaskRequest, results: list[SessionResult]) -> SessionGroup:
        left_out: Counter[str] = Counter()
        kept = []
        for result in results:
            reason = _find_exclusion_reason(result) or find_hold_reason(
                self._checker, result.session_id, partial(_find_problems, result)
            )
            if reason is None:
                kept.append(result)
            else:
                left_out[reason] += 1
        return SessionGroup(
            task, asked.task_id, asked.num_samples, [SessionItem.from_result(result) for result in kept], kept, left_out
        )


T = TypeVar("T")


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """All of it at the same time, in its order. Where one fails, nobody waits for the others any more."""
    running: list[asyncio.Future[T]] = []
    try:
        running.extend(asyncio.ensure_future(one) for one in work)
        return list(await asyncio.gather(*running))
    except BaseException:
        for one in running:
            one.cancel()
        raise


def _find_problems(result: SessionResult) -> list[Problem]:
    return check_received(wire.trajectory_from_result(result))


def _find_exclusion_reason(result: SessionResult) -> str | None:
    """Why a session can't be trained on."""
    if result.reward is None:
        return result.reason or "no_reward"
    if result.stale:
        return "stale"
    if not result.trajectory.traces:
        return "nothing_to_train"
    return None
