"""The rollout service without its HTTP.

    trainers ─► Rollout ─► Queue (the database: the truth) ◄─ Leasing ◄─ nodes
                    Ledger: what is counted, and who waits        Steering ─► engines and policy, at every node

What is in memory here can be made anew from the database by the next start.
"""

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from polar.config import DEFAULT_RUN, Compat, ServerSettings
from polar.errors import ConfigError, StoreError
from polar.rollout.events import Events
from polar.rollout.leasing import Leasing
from polar.rollout.ledger import Ledger
from polar.rollout.members import NodeView, view
from polar.rollout.models import TaskRequest, Unit
from polar.rollout.policy import Policy
from polar.rollout.queue import Queue
from polar.rollout.records import Lane, NewTask, Taken, TaskRow, WorkRow
from polar.rollout.results import status_of_task
from polar.rollout.retention import Retention
from polar.rollout.runs import Quotas, RunSettings
from polar.rollout.semantics import SEMANTICS, TaskSemantics
from polar.rollout.steering import Steering
from polar.rollout.transactions import Database, Superseded
from polar.store.base import Store

log = logging.getLogger(__name__)

_RECOUNT = 60.0  # seconds
_LOOKS = 4  # a term, after silent nodes


class Submitted(Struct):
    task_id: str
    status: str


class Refused(Struct):
    task_id: str
    code: Literal[409, 422, 429]
    error: str
    retry_after: float | None = None


class RolloutStore(Store, Database, Protocol):
    """A store that holds the queue, too."""


class Rollout:
    """Use as an async context manager."""

    leasing: Leasing
    steering: Steering

    def __init__(
        self,
        store: RolloutStore,
        settings: ServerSettings,
        *,
        store_id: str,
        replicas: list[str],
        versions: Callable[[], Awaitable[dict[str, int]]],
        check: Callable[[TaskRequest], Awaitable[None]] | None = None,
    ) -> None:
        """`replicas` are those of the configuration, `versions` tells what they hold. `check` raises ConfigError where
        a task can't be run."""
        self._store = store
        self._settings = settings
        self._store_id = store_id
        self._replicas = replicas
        self._versions = versions
        self._check = check
        self.events = Events()
        self.ledger = Ledger(self.events)
        self.superseded = asyncio.Event()  # another server has taken over
        self.failed = asyncio.Event()  # something that it can't do without has ended
        self._queue: Queue
        self._policy: Policy
        self._consumers: dict[tuple[str, str], Taken] = {}
        self._admitting = asyncio.Lock()  # what may be queued is looked at and used up by one at a time
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Rollout":
        queue = self._queue = await Queue.open(self._store)
        runs = {run: RunSettings.decode(text) for run, text in (await queue.runs()).items()}
        versions = await self._versions()  # only now: until then an older server may have set others
        self._policy = Policy(self._replicas, versions, runs, queue.epoch << 32, self._store_id)
        self.leasing = Leasing(
            queue,
            self.ledger,
            self._policy,
            self.events,
            self._settings,
            store=self._store,
            store_id=self._store_id,
            later=self._later,
            recount=self._recount,
        )
        self.steering = Steering(self._policy, self.leasing, queue, self._store, self.events)
        await queue.go_on(await queue.waiting())
        self._consumers = await queue.consumers()
        queue.doubts += 1
        await self._recount()
        self._later(0, self._watch)
        if self._settings.retention_hours is not None:
            self._later(0, Retention(queue, self._settings.retention_hours).keep)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def closing(self) -> bool:
        return self.ledger.closed

    def close(self) -> None:
        """Whoever waits for something is answered; the rest is for the end of the context."""
        self.ledger.close()
        self.events.close()
        self.leasing.tell_all()

    # Tasks

    async def submit(self, tasks: list[TaskRequest]) -> list[Submitted | Refused]:
        """Each by itself. Told twice, a task is there once; what it means is decided here."""
        tasks = [task.adopt(self._semantics(task.run)) for task in tasks]
        answers: dict[int, Submitted | Refused] = {}
        wanted: dict[int, NewTask] = {}
        coming: defaultdict[str, int] = defaultdict(int)
        unfit = [await self._unfit(task) for task in tasks]
        async with self._admitting:
            for number, task in enumerate(tasks):
                refused = unfit[number] or await self._no_room(task, coming[task.run])
                if refused is not None:
                    answers[number] = refused
                else:
                    coming[task.run] += task.num_samples
                    wanted[number] = _new_task(task)
            admitted = await self._queue.submit(list(wanted.values())) if wanted else []
            for (number, new), one in zip(wanted.items(), admitted, strict=True):
                if one.row.digest != new.digest:
                    error = f"Task {new.task_id} is there already, with other content: give it another task_id."
                    answers[number] = Refused(new.task_id, 409, error)
                    continue
                answers[number] = Submitted(new.task_id, status_of_task(one.row))
                if one.replaced is not None:
                    self.ledger.forget_ended_task(one.replaced)
                if one.is_new:
                    self.ledger.submitted(Lane(new.run, new.lane), new.task_id, new.samples)
                elif one.calls_elsewhere:
                    self.ledger.announce_redirect(new.run, new.task_id)
        self.ledger.feed()
        return [answers[number] for number in range(len(tasks))]

    def _semantics(self, run: str) -> TaskSemantics:
        return SEMANTICS[self._policy.compat(run) or self._settings.compat]

    async def _unfit(self, task: TaskRequest) -> Refused | None:
        if self._check is not None:
            try:
                await self._check(task)
            except ConfigError as error:
                return Refused(task.task_id, 422, str(error))
        return None

    async def _no_room(self, task: TaskRequest, coming: int) -> Refused | None:
        if self._queue.doubtful:
            await self._recount()
        most = self._policy.quotas(task.run).max_queued
        queued = self.ledger.of_run(task.run).queued + coming if most is not None else 0
        if most is not None and task.num_samples > most:
            error = f"It has {task.num_samples} samples, more than the run may have queued ({most}): raise its quota."
            return Refused(task.task_id, 422, error)
        if most is not None and queued + task.num_samples > most:
            known = await self._queue.task(task.run, task.task_id)
            if known is not None and (known.state == "running" or task.semantics.resubmit_ended == "keep"):
                return None  # it is in already
            error = f"Run {task.run} has {queued} sessions queued, and may have {most}: try again later."
            return Refused(task.task_id, 429, error, retry_after=self._settings.beat_seconds)
        return None

    async def recent_tasks(self, run: str, limit: int) -> list[TaskRow]:
        """The newest first."""
        return await self._queue.recent_tasks(run, limit)

    async def task(self, run: str, task_id: str) -> TaskRow | None:
        return await self._queue.task(run, task_id)

    async def work_of(self, run: str, task_id: str) -> list[WorkRow]:
        """One for each sample."""
        return await self._queue.work_of(run, task_id)

    async def cancel(self, run: str, task_id: str, reason: str = "cancelled") -> int | None:
        """How many sessions it ends, now or soon; None where there is no such task."""
        changes = await self._queue.cancel(run, task_id, reason)
        if changes is None:
            return None
        for change in changes:
            self.ledger.changed(change)
        return len(changes) + self.leasing.cancel(run, task_id, reason)

    # Results

    async def sessions_after(self, run: str, after: int, limit: int) -> list[WorkRow]:
        return await self._queue.work_after(run, after, limit)

    async def groups_after(self, run: str, after: int, limit: int) -> list[TaskRow]:
        return await self._queue.tasks_after(run, after, limit)

    async def wait(self, run: str, after: int, seconds: float, unit: Unit) -> None:
        """Until there may be something beyond `after`."""
        await self.ledger.wait(run, after, seconds, unit)

    async def consumed(self, run: str, consumer: str, cursor: int | None, unit: Unit) -> int:
        """Remembers up to where a consumer has taken everything; without a cursor, tells it."""
        known = self._consumers.get((run, consumer), Taken(0, unit))
        if cursor is None or (taken := Taken(cursor, unit)) == known:
            return known.cursor
        await self._queue.keep_consumer(run, consumer, taken)
        self._consumers[run, consumer] = taken
        await self._count_untaken(run)
        self.ledger.feed()
        return cursor

    async def callbacks_waiting(self, limit: int, after: int = 0) -> list[TaskRow]:
        """Ended tasks whose callback is not acknowledged, by the cursor of their end."""
        return await self._queue.tasks_to_tell(after, limit)

    async def callback_done(self, run: str, task_id: str, *, acknowledged: bool = True) -> None:
        await self._queue.told(run, task_id, "acknowledged" if acknowledged else "given_up")

    # Runs and nodes

    async def set_quotas(self, run: str, quotas: Quotas) -> None:
        settings = self._policy.settings(run)
        settings.quotas = quotas
        await self._queue.keep_run(run, settings.encode())
        await self._count_untaken(run)
        self.ledger.feed()

    async def set_compat(self, run: str, compat: Compat | None) -> None:
        """Whose meaning the run's tasks have that are submitted from now on; None: the server's."""
        settings = self._policy.settings(run)
        settings.compat = compat
        await self._queue.keep_run(run, settings.encode())

    def compat(self, run: str) -> Compat | None:
        return self._policy.compat(run)

    def quotas(self) -> dict[str, Quotas]:
        return {run: settings.quotas for run, settings in self._policy.runs.items()}

    def status(self) -> dict[str, dict[str, int]]:
        """By run: sessions in each state."""
        found = {}
        for run in sorted({DEFAULT_RUN, *self.ledger.totals, *(lane.run for lane in self.ledger.lanes)}):
            counts, totals = self.ledger.of_run(run), self.ledger.totals[run]
            found[run] = {
                "tasks": totals.tasks,
                "queued": counts.queued,
                "leased": counts.leased,
                "waiting": counts.waiting,
                "done": totals.ended,
                "usable": totals.usable,
            }
            if self._policy.quotas(run).ahead is not None:
                found[run]["untaken"] = self.ledger.untaken[run]
        return found

    def nodes(self) -> list[NodeView]:
        """Those that run sessions."""
        return [shown for one in self.leasing.members.values() if (shown := view(one)) is not None and shown.slots]

    # Looking after it

    async def _recount(self) -> None:
        """From time to time; and all that is in memory, where the queue is in doubt."""
        doubts = self._queue.doubts
        if self._queue.doubtful:
            self.ledger.totals.update(await self._queue.totals())
            await self.leasing.restore()
            self.ledger.wake()
            self.events.lag("the store was in doubt")
        self.ledger.lanes = await self._queue.counts()
        for run in list(self._policy.runs):
            await self._count_untaken(run)
        self._queue.settled = max(doubts, self._queue.settled)

    async def _count_untaken(self, run: str) -> None:
        """Only where a quota asks for it: it takes a look at the database."""
        if self._policy.quotas(run).ahead is not None:
            consumers = [taken for (of, _), taken in self._consumers.items() if of == run] or [Taken(0, "session")]
            counts = [await self._queue.usable_after(run, taken.cursor, taken.unit) for taken in consumers]
            self.ledger.untaken[run] = min(counts)  # what one has taken is trained on, though others still look

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        term = self._settings.lease_seconds
        looked = counted = loop.time()
        while True:
            await asyncio.sleep(term / _LOOKS)
            now = loop.time()
            if now - looked > term / 2:
                self.leasing.give_term()
            looked = now
            try:
                await self._queue.check()
                await self.leasing.lose_silent(now)
                await self.leasing.record_lifetimes()
                if now - counted > _RECOUNT or self._queue.doubtful:
                    counted = now
                    await self._recount()
            except Superseded as error:
                log.error("%s", error)
                self.superseded.set()
                return
            except StoreError as error:
                log.error("The queue can't be looked after: %s", error)

    def _later(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await work()

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("Something that the queue needs has failed", exc_info=error)
            self.failed.set()


def _new_task(task: TaskRequest) -> NewTask:
    content = task.model_dump(mode="json", exclude_defaults=True, exclude={"callback_url"})
    return NewTask(
        run=task.run,
        task_id=task.task_id,
        samples=task.num_samples,
        enough=task.early_stop_min_usable_sessions,
        lane=task.runtime.backend,
        priority=task.dispatch_priority,
        callback_url=task.callback_url,
        digest=hashlib.sha256(msgspec.json.encode(content, order="deterministic")).digest()[:16],
        request=task.model_dump_json(exclude_unset=True),
        rerun=task.semantics.resubmit_ended == "rerun",
    )
