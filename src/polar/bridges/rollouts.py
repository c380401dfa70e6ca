"""Runs groups for a trainer: submits tasks, and returns their sessions as traces.

A group is all sessions of one task at one step. Its name at the service is made of the trainer's run, the step and the
task. So a trainer that asks again, for example after a crash, gets the sessions that ran before, and nothing runs
twice.

Trainers that ask for single sessions share a client and its groups: the first request starts the group
(`SharedGroups`).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, field

from polar.bridges.settings import BridgeSettings
from polar.client.async_client import AsyncClient
from polar.client.closeable import AsyncCloseable
from polar.client.submission import load_tasks
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.records import wire
from polar.records.experts import Experts
from polar.records.result import SessionResult
from polar.records.task import TaskRequest
from polar.records.trajectory import Trace
from polar.trajectory.checker import SessionChecker
from polar.trajectory.document_check import check_received, find_hold_reason
from polar.trajectory.verify import Problem

_MAX_PENDING_GROUPS = 4096
"""The maximum of groups that have unclaimed sessions: more than any step has."""
_TOP_K_WITHOUT_LIMIT = 10**8
"""A `top_k` of at least this means no limit: some trainers have such a number as their default."""


def build_sampling_overrides(*, top_k: int | None = None, **others: Any) -> SamplingOverrides:
    """Sampling overrides in which a `top_k` without effect (vLLM's -1, or a huge number) becomes 0. None overrides
    nothing."""
    if top_k is not None:
        top_k = top_k if 0 < top_k < _TOP_K_WITHOUT_LIMIT else 0
    return SamplingOverrides(top_k=top_k, **others)


class SessionGroup(Struct):
    """The sessions of one task that can be trained on. `left_out` counts the others by reason."""

    task: str  # the task's id in the task files
    name: str  # the task's id at the service
    requested_samples: int
    items: list[SessionItem]
    results: list[SessionResult]  # of the same sessions, with their messages
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def rewards(self) -> list[float]:
        return [item.session.reward for item in self.items if item.session.reward is not None]


class GroupKeys:
    """Makes the keys of groups. A task that occurs again in a step gets another key. A trainer that resumes at a step
    makes the same keys again."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def make_key(self, step: str, task: str) -> str:
        repetition = self._counts[step, task]
        self._counts[step, task] += 1
        return f"{step}.{repetition}" if repetition else step


class RolloutClient(AsyncCloseable):
    """Runs groups at the rollout service, concurrently if asked to. Use as an async context manager, or close it."""

    def __init__(self, settings: BridgeSettings) -> None:
        """Raises ConfigError if the tasks can't be read."""
        self.settings = settings
        self.tasks: Mapping[str, TaskRequest] = {
            task.task_id: task for task in load_tasks(settings.tasks, run=settings.run)
        }
        self.client = AsyncClient(settings.server, settings.token, settings.run, patience=settings.patience)
        self._checker = SessionChecker(settings.verify_share)
        self._has_answered = False

    async def close(self) -> None:
        await self.client.close()

    async def run_group(
        self, task: str, key: str, *, samples: int | None = None, sampling: SamplingOverrides | None = None
    ) -> SessionGroup:
        """Runs a task, or returns the sessions that ran before under the same `key` (for example, a step). `sampling`
        overrides the task's own. Raises ConfigError for a task that is not in the files, and ClientError."""
        request = self._build_request(task, key, samples or self.settings.samples, sampling)
        if not self._has_answered:
            await self.client.health()  # without a service, fail at once; wait for it only later
            self._has_answered = True
        await self.client.submit(request)
        async for group_result in self.client.as_completed([request.task_id]):
            return self._build_group(task, request, group_result.results)
        raise AssertionError  # as_completed yields the result or raises

    async def run_groups(self, tasks: Iterable[str], key: str, *, samples: int | None = None) -> list[SessionGroup]:
        """Runs one group for each task, in their order. A task that is named twice has two groups. Raises ConfigError
        before any is run."""
        keys = GroupKeys()
        tasks_and_keys = [(task, keys.make_key(key, task)) for task in tasks]
        for task, _ in tasks_and_keys:
            self._get_task(task)
        return await gather_or_cancel(
            self.run_group(task, group_key, samples=samples) for task, group_key in tasks_and_keys
        )

    async def cancel(self, task: str, key: str) -> None:
        await self.client.cancel(self._make_group_name(task, key))

    def _make_group_name(self, task: str, key: str) -> str:
        return f"{self.settings.name}/{key}/{task}"

    def _get_task(self, task: str) -> TaskRequest:
        if task in self.tasks:
            return self.tasks[task]
        examples = ", ".join(sorted(self.tasks)[:3])
        raise ConfigError(
            f"There is no task {task!r} in {', '.join(self.settings.tasks)}: a row of the trainer's data names a task "
            f"by its task_id, such as {examples}."
        )

    def _build_request(self, task: str, key: str, samples: int, sampling: SamplingOverrides | None) -> TaskRequest:
        template = self._get_task(task)
        sampling_fields = {} if sampling is None else sampling.model_dump(exclude_none=True)
        return template.model_copy(
            update={
                "task_id": self._make_group_name(task, key),
                "num_samples": samples,
                "builder": template.builder.model_copy(update={"strategy": self.settings.builder}),
                "max_lag": self.settings.max_lag if self.settings.max_lag is not None else template.max_lag,
                "sampling": template.sampling.model_copy(update=sampling_fields),
                "metadata": {**template.metadata, "task": task, "key": key},
            }
        )

    def _build_group(self, task: str, request: TaskRequest, results: list[SessionResult]) -> SessionGroup:
        left_out: Counter[str] = Counter()
        usable_results = []
        for result in results:
            reason = _find_exclusion_reason(result) or find_hold_reason(
                self._checker, result.session_id, partial(_find_problems, result)
            )
            if reason is None:
                usable_results.append(result)
            else:
                left_out[reason] += 1
        return SessionGroup(
            task,
            request.task_id,
            request.num_samples,
            [SessionItem.from_result(result) for result in usable_results],
            usable_results,
            left_out,
        )


T = TypeVar("T")


async def gather_or_cancel(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all at the same time and returns the results in order. If one fails, the others are cancelled."""
    futures: list[asyncio.Future[T]] = []
    try:
        futures.extend(asyncio.ensure_future(future) for future in awaitables)
        return list(await asyncio.gather(*futures))
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _find_problems(result: SessionResult) -> list[Problem]:
    return check_received(wire.trajectory_from_result(result))


def _find_exclusion_reason(result: SessionResult) -> str | None:
    """Why a session can't be trained on; None if it can."""
    if result.reward is None:
        return result.reason or "no_reward"
    if result.stale:
        return "stale"
    if not result.trajectory.traces:
        return "nothing_to_train"
    return None


# What bridges check before a session is trained on


def check_temperature(items: Iterable[SessionItem], temperature: float) -> None:
    """Checks that the recorded log-probabilities were computed at the trainer's temperature. Raises ConfigError."""
    for trace in (trace for item in items for trace in item.trajectory.traces):
        check_logit_scales(trace.session_id, get_logit_scales(trace), temperature)


def require_experts(trace: Trace) -> Experts:
    """The experts that a trace's tokens were routed to. Raises ConfigError if they were not recorded."""
    if trace.experts is None:
        raise ConfigError(
            f"The trainer replays routing, and the engine did not report which experts {trace.session_id}'s tokens "
            "were routed to: start it with --enable-return-routed-experts; for SGLang set [engine] "
            "options.routed_experts."
        )
    return trace.experts


def get_logit_scales(trace: Trace) -> list[float | None]:
    """The divisor of the logits for each of the trace's exchanges; None where it is unknown. Empty if the trace has no
    log-probabilities, since the trainer then computes its own."""
    return [] if trace.logprobs is None else [trace.scales.get(name) for name in trace.exchange_ids]


def check_logit_scales(session: str, scales: Iterable[float | None], temperature: float) -> None:
    """Like `check_temperature`, for the scales of one trace."""
    temperatures = list(dict.fromkeys(scales))
    if any(scale != temperature for scale in temperatures):
        described = ", ".join(
            "one that is unknown (because of top_p, say)" if scale is None else f"{scale:g}" for scale in temperatures
        )
        raise ConfigError(
            f"The trainer computes at temperature {temperature:g}, and the log-probabilities of {session} are of "
            f"temperature {described}: choose a temperature that engine and trainer share, such as 1, and nothing else "
            "that changes what is sampled."
        )


# Groups for trainers that ask for single sessions


class _PendingGroup(Struct):
    group: asyncio.Future[SessionGroup]
    claimed_sessions: int = 0


class SharedGroups:
    """Runs each group once for callers that ask for its sessions one by one."""

    def __init__(self, rollouts: RolloutClient) -> None:
        self.rollouts = rollouts
        self._pending: dict[tuple[str, str], _PendingGroup] = {}

    async def claim_session(
        self, task: str, key: str, samples: int, sampling: SamplingOverrides
    ) -> tuple[SessionGroup, int]:
        """Returns the group and the index of the claimed session, which may be beyond the group's usable sessions. The
        group is forgotten when its last session is claimed or when it failed; the service still has it. Cancelling one
        caller does not affect the others. Raises ConfigError and ClientError."""
        pending = self._pending.get((task, key))
        if pending is None or has_failed(pending.group):
            future = asyncio.ensure_future(self.rollouts.run_group(task, key, samples=samples, sampling=sampling))
            future.add_done_callback(has_failed)  # retrieves the error, so that asyncio does not log it
            pending = self._pending[task, key] = _PendingGroup(future)
            if len(self._pending) > _MAX_PENDING_GROUPS:  # a trainer that failed never claims some
                del self._pending[next(iter(self._pending))]
        session_index = pending.claimed_sessions
        pending.claimed_sessions += 1
        if pending.claimed_sessions == samples:
            del self._pending[task, key]
        return await asyncio.shield(pending.group), session_index


def has_failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


_shared_groups: dict[asyncio.AbstractEventLoop, dict[str, SharedGroups]] = {}


def get_shared_groups(settings: BridgeSettings) -> SharedGroups:
    """The shared groups for these settings in the running event loop. Those of closed loops are dropped."""
    for loop in [known_loop for known_loop in list(_shared_groups) if known_loop.is_closed()]:
        _shared_groups.pop(loop, None)  # a weak reference would not work: a client holds its loop
    groups_of_loop = _shared_groups.setdefault(asyncio.get_running_loop(), {})
    settings_key = settings.model_dump_json()
    if settings_key not in groups_of_loop:
        groups_of_loop[settings_key] = SharedGroups(RolloutClient(settings))
    return groups_of_loop[settings_key]
