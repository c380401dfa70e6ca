"""Groups for a trainer: tasks go out, sessions come back as traces.

A group is all sessions of one task at one step. Its name at the service follows from the trainer's run, the step and
the task. So a trainer that asks again (after a crash, say) gets what has run already, and nothing runs twice.

Trainers that ask for each session by itself share a client and its groups: the first to ask has the group run
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
"""Groups that are waited for: more than any step has."""
_TOP_K_WITHOUT_LIMIT = 10**8
"""From here on `top_k` leaves all tokens: some trainers have such a number as their default."""


def build_sampling_overrides(*, top_k: int | None = None, **others: Any) -> SamplingOverrides:
    """A `top_k` that leaves all tokens (-1, as vLLM has it, or more than there are) is our 0; None says nothing."""
    if top_k is not None:
        top_k = top_k if 0 < top_k < _TOP_K_WITHOUT_LIMIT else 0
    return SamplingOverrides(top_k=top_k, **others)


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
    """Keys of groups, step by step: a task that comes again in a step has another group. A trainer that
    resumes at a step asks for the same ones."""

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
            await self.client.health()  # fails at once without a service; one that goes away later is waited for
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
    """All of it at the same time, in its order. Where one fails, the others are cancelled."""
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


# What bridges check before a session is trained on


def check_temperature(items: Iterable[SessionItem], temperature: float) -> None:
    """Recorded log-probabilities are of logits that were divided by something, which must be the trainer's temperature.
    Raises ConfigError."""
    for trace in (trace for item in items for trace in item.trajectory.traces):
        check_logit_scales(trace.session_id, get_logit_scales(trace), temperature)


def require_experts(trace: Trace) -> Experts:
    """The experts of its tokens, for a trainer that routes by them. Raises ConfigError where there are none."""
    if trace.experts is None:
        raise ConfigError(
            f"The trainer replays routing, and the engine did not tell which experts {trace.session_id}'s tokens were "
            "routed to: start it with --enable-return-routed-experts; for SGLang set [engine] options.routed_experts."
        )
    return trace.experts


def get_logit_scales(trace: Trace) -> list[float | None]:
    """What divided the logits, for each of its exchanges; None where that is unknown. An empty list without recorded
    log-probabilities: the trainer's own are of its temperature."""
    return [] if trace.logprobs is None else [trace.scales.get(name) for name in trace.exchange_ids]


def check_logit_scales(session: str, found: Iterable[float | None], temperature: float) -> None:
    """As `check_temperature`, of one trace's `scales`."""
    temperatures = list(dict.fromkeys(found))
    if any(one != temperature for one in temperatures):
        known = ", ".join(
            "one that is unknown (because of top_p, say)" if one is None else f"{one:g}" for one in temperatures
        )
        raise ConfigError(
            f"The trainer computes at temperature {temperature:g}, and the log-probabilities of {session} are of "
            f"temperature {known}: choose a temperature that engine and trainer share, such as 1, and nothing else "
            "that changes what is sampled."
        )


# Groups for trainers that ask for each session by itself


class _PendingGroup(Struct):
    group: asyncio.Future[SessionGroup]
    taken: int = 0  # sessions that were claimed


class SharedGroups:
    def __init__(self, rollouts: RolloutClient) -> None:
        self.rollouts = rollouts
        self._pending: dict[tuple[str, str], _PendingGroup] = {}

    async def claim_session(
        self, task: str, key: str, samples: int, sampling: SamplingOverrides
    ) -> tuple[SessionGroup, int]:
        """The group, and which of its sessions this is: there may be fewer of them. It is forgotten when the last one
        has come for it, or it has failed; asked again, the service has it. Who is cancelled takes nothing from the
        others. Raises ConfigError and ClientError."""
        coming = self._pending.get((task, key))
        if coming is None or has_failed(coming.group):
            asked = asyncio.ensure_future(self.rollouts.run_group(task, key, samples=samples, sampling=sampling))
            asked.add_done_callback(has_failed)  # asyncio complains of an error that is never retrieved
            coming = self._pending[task, key] = _PendingGroup(asked)
            if len(self._pending) > _MAX_PENDING_GROUPS:  # a trainer that died of something else never comes for some
                del self._pending[next(iter(self._pending))]
        number = coming.taken
        coming.taken += 1
        if coming.taken == samples:
            del self._pending[task, key]
        return await asyncio.shield(coming.group), number


def has_failed(work: asyncio.Future[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


_shared_groups: dict[asyncio.AbstractEventLoop, dict[str, SharedGroups]] = {}


def get_shared_groups(settings: BridgeSettings) -> SharedGroups:
    """Those of these settings, in the event loop that runs. What a closed loop had is forgotten."""
    for loop in [one for one in list(_shared_groups) if one.is_closed()]:
        _shared_groups.pop(loop, None)  # not by a weak reference: a client holds its loop
    known = _shared_groups.setdefault(asyncio.get_running_loop(), {})
    name = settings.model_dump_json()
    if name not in known:
        known[name] = SharedGroups(RolloutClient(settings))
    return known[name]
