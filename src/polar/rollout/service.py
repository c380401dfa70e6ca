"""The rollout service without its HTTP.

    trainers ─► RolloutService ─► Queue (the database: the truth) ◄─ LeaseManager ◄─ nodes
                    Ledger: counts, and who waits for them        EngineController ─► engines and policy, at every node

All state in memory can be rebuilt from the database.
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
from polar.records.result import ResultUnit
from polar.records.task import SEMANTICS, TaskRequest, TaskSemantics
from polar.rollout.engine_controller import EngineController
from polar.rollout.events import EventBus
from polar.rollout.lease_manager import LeaseManager, NodeView
from polar.rollout.ledger import Ledger
from polar.rollout.queue import Queue, QueueDatabase, Superseded
from polar.rollout.queue.database import TransactionalStore
from polar.rollout.queue.records import ConsumerPosition, Lane, NewTask, TaskRow, WorkRow
from polar.rollout.results import get_task_status
from polar.rollout.runs import Quotas, RunRegistry, RunSettings
from polar.store.base import Store

log = logging.getLogger(__name__)

_RECOUNT_SECONDS = 60.0
_CHECKS_PER_TERM = 4
"""Checks for silent nodes within the time after which a silent node is lost."""
_RETENTION_MARKS = 100
"""Within the time that results are kept."""
_MAX_DELETED_TASKS = 50
"""In one transaction, so that other writers don't wait for long."""
_RETENTION_FACT = "retention"


class SubmittedTask(Struct):
    task_id: str
    status: str


class RefusedTask(Struct):
    task_id: str
    code: Literal[409, 422, 429]
    error: str
    retry_after: float | None = None


class RolloutStore(Store, TransactionalStore, Protocol):
    """A store that holds the queue, too."""


class RolloutService:
    """Use as an async context manager."""

    lease_manager: LeaseManager
    engine_controller: EngineController

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
        """`replicas` are those of the configuration; `versions` loads their policy versions. `check` raises ConfigError
        where a task can't be run."""
        self._store = store
        self._settings = settings
        self._store_id = store_id
        self._replicas = replicas
        self._versions = versions
        self._check = check
        self.events = EventBus()
        self.ledger = Ledger(self.events)
        self.superseded = asyncio.Event()  # another server has taken over the database
        self.failed = asyncio.Event()  # a task that the service needs has failed
        self._database: QueueDatabase
        self._queue: Queue
        self._run_registry: RunRegistry
        self._consumers: dict[tuple[str, str], ConsumerPosition] = {}
        self._admission_lock = asyncio.Lock()  # checks the queue's quota and uses it in one step
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RolloutService":
        database = self._database = await QueueDatabase.open(self._store)
        queue = self._queue = Queue(database)
        runs = {run: RunSettings.decode(text) for run, text in (await queue.load_runs()).items()}
        versions = await self._versions()  # after `open`: until then an older server may have changed them
        self._run_registry = RunRegistry(self._replicas, versions, runs, database.epoch << 32, self._store_id)
        self.lease_manager = LeaseManager(
            queue,
            self.ledger,
            self._run_registry,
            self.events,
            self._settings,
            store=self._store,
            store_id=self._store_id,
            schedule=self._schedule,
            recount_if_uncertain=self._recount_if_uncertain,
        )
        self.engine_controller = EngineController(
            self._run_registry, self.lease_manager, queue, self._store, self.events
        )
        await queue.requeue(await queue.list_waiting_work())
        self._consumers = await queue.load_consumers()
        database.uncertain_commits += 1  # forces the first count
        await self._recount()
        self._schedule(0, self._maintain)
        if self._settings.retention_hours is not None:
            self._schedule(0, Retention(queue, self._settings.retention_hours).run)
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
        """Answers everyone who waits. The rest is done when the context ends."""
        self.ledger.close()
        self.events.close()
        self.lease_manager.wake_all()

    # Tasks

    async def submit(self, tasks: list[TaskRequest]) -> list[SubmittedTask | RefusedTask]:
        """Submits each task independently. Submitting is idempotent. A task's semantics are fixed here."""
        tasks = [task.with_semantics(self._get_semantics(task.run)) for task in tasks]
        answers: dict[int, SubmittedTask | RefusedTask] = {}
        new_tasks: dict[int, NewTask] = {}
        admitted_samples: defaultdict[str, int] = defaultdict(int)
        refusals = [await self._check_runnable(task) for task in tasks]
        async with self._admission_lock:
            for number, task in enumerate(tasks):
                refusal = refusals[number] or await self._check_queue_quota(task, admitted_samples[task.run])
                if refusal is not None:
                    answers[number] = refusal
                else:
                    admitted_samples[task.run] += task.num_samples
                    new_tasks[number] = _to_new_task(task)
            admitted = await self._queue.submit(list(new_tasks.values())) if new_tasks else []
            for (number, new), admitted_task in zip(new_tasks.items(), admitted, strict=True):
                if admitted_task.row.digest != new.digest:
                    error = f"A different task with the id {new.task_id} already exists: use another task_id."
                    answers[number] = RefusedTask(new.task_id, 409, error)
                    continue
                answers[number] = SubmittedTask(new.task_id, get_task_status(admitted_task.row))
                if admitted_task.replaced is not None:
                    self.ledger.forget_ended_task(admitted_task.replaced)
                if admitted_task.is_new:
                    self.ledger.record_submitted(Lane(new.run, new.lane), new.task_id, new.samples)
                elif admitted_task.has_new_callback:
                    self.ledger.announce_redirect(new.run, new.task_id)
        self.ledger.notify_work()
        return [answers[number] for number in range(len(tasks))]

    def _get_semantics(self, run: str) -> TaskSemantics:
        return SEMANTICS[self._run_registry.get_compat(run) or self._settings.compat]

    async def _check_runnable(self, task: TaskRequest) -> RefusedTask | None:
        if self._check is not None:
            try:
                await self._check(task)
            except ConfigError as error:
                return RefusedTask(task.task_id, 422, str(error))
        return None

    async def _check_queue_quota(self, task: TaskRequest, admitted_samples: int) -> RefusedTask | None:
        await self._recount_if_uncertain()
        max_queued = self._run_registry.get_quotas(task.run).max_queued
        queued = self.ledger.sum_counts(task.run).queued + admitted_samples if max_queued is not None else 0
        if max_queued is not None and task.num_samples > max_queued:
            error = f"The task has {task.num_samples} samples; run {task.run} may queue {max_queued}: raise its quota."
            return RefusedTask(task.task_id, 422, error)
        if max_queued is not None and queued + task.num_samples > max_queued:
            known = await self._queue.get_task(task.run, task.task_id)
            if known is not None and (known.state == "running" or task.semantics.resubmit_ended == "keep"):
                return None  # it is queued already
            error = f"Run {task.run} has {queued} sessions queued and may have {max_queued}: try again later."
            return RefusedTask(task.task_id, 429, error, retry_after=self._settings.beat_seconds)
        return None

    async def list_recent_tasks(self, run: str, limit: int) -> list[TaskRow]:
        """Newest first."""
        return await self._queue.list_recent_tasks(run, limit)

    async def get_task(self, run: str, task_id: str) -> TaskRow | None:
        return await self._queue.get_task(run, task_id)

    async def list_task_work(self, run: str, task_id: str) -> list[WorkRow]:
        """One row for each sample."""
        return await self._queue.list_task_work(run, task_id)

    async def cancel(self, run: str, task_id: str, reason: str = "cancelled") -> int | None:
        """Cancels a task. Returns how many of its sessions end, now or soon; None where there is no such task."""
        changes = await self._queue.cancel(run, task_id, reason)
        if changes is None:
            return None
        for change in changes:
            self.ledger.record_change(change)
        return len(changes) + self.lease_manager.cancel(run, task_id, reason)

    # Results

    async def list_sessions_after(self, run: str, after: int, limit: int) -> list[WorkRow]:
        return await self._queue.list_work_after(run, after, limit)

    async def list_groups_after(self, run: str, after: int, limit: int) -> list[TaskRow]:
        return await self._queue.list_tasks_after(run, after, limit)

    async def wait_for_results(self, run: str, after: int, seconds: float, unit: ResultUnit) -> None:
        """Waits until there may be results beyond `after`, or `seconds` have passed."""
        await self.ledger.wait_for_results(run, after, seconds, unit)

    async def update_consumer(self, run: str, consumer: str, cursor: int | None, unit: ResultUnit) -> int:
        """Records that a consumer has taken all results up to `cursor`. Returns its cursor."""
        known = self._consumers.get((run, consumer), ConsumerPosition(0, unit))
        if cursor is None or (position := ConsumerPosition(cursor, unit)) == known:
            return known.cursor
        await self._queue.save_consumer(run, consumer, position)
        self._consumers[run, consumer] = position
        await self._count_untaken(run)
        self.ledger.notify_work()
        return cursor

    async def list_tasks_awaiting_callback(self, limit: int, after: int = 0) -> list[TaskRow]:
        """Ended tasks whose callback is not acknowledged, ordered by cursor."""
        return await self._queue.list_tasks_awaiting_callback(after, limit)

    async def finish_callback(self, run: str, task_id: str, *, acknowledged: bool = True) -> None:
        await self._queue.set_callback_state(run, task_id, "acknowledged" if acknowledged else "given_up")

    # Runs and nodes

    async def set_quotas(self, run: str, quotas: Quotas) -> None:
        settings = self._run_registry.get_settings(run)
        settings.quotas = quotas
        await self._queue.save_run(run, settings.encode())
        await self._count_untaken(run)
        self.ledger.notify_work()

    async def set_compat(self, run: str, compat: Compat | None) -> None:
        """Sets the semantics of tasks that are submitted to the run from now on; None: the server's."""
        settings = self._run_registry.get_settings(run)
        settings.compat = compat
        await self._queue.save_run(run, settings.encode())

    def get_compat(self, run: str) -> Compat | None:
        return self._run_registry.get_compat(run)

    def list_quotas(self) -> dict[str, Quotas]:
        return {run: settings.quotas for run, settings in self._run_registry.runs.items()}

    def count_sessions(self) -> dict[str, dict[str, int]]:
        """Sessions in each state, by run."""
        status = {}
        for run in sorted({DEFAULT_RUN, *self.ledger.totals, *(lane.run for lane in self.ledger.lanes)}):
            counts, totals = self.ledger.sum_counts(run), self.ledger.totals[run]
            status[run] = {
                "tasks": totals.tasks,
                "queued": counts.queued,
                "leased": counts.leased,
                "waiting": counts.waiting,
                "done": totals.ended,
                "usable": totals.usable,
            }
            if self._run_registry.get_quotas(run).max_ahead is not None:
                status[run]["untaken"] = self.ledger.untaken[run]
        return status

    def list_nodes(self) -> list[NodeView]:
        """Nodes that run sessions."""
        views = [member.to_view() for member in self.lease_manager.members.values()]
        return [view for view in views if view is not None and view.slots]

    # Maintenance

    async def _recount_if_uncertain(self) -> None:
        if self._database.is_uncertain:
            await self._recount()

    async def _recount(self) -> None:
        """Recounts the queue; where a commit is uncertain, also restores everything else from the database."""
        uncertain_commits = self._database.uncertain_commits
        if self._database.is_uncertain:
            self.ledger.totals.update(await self._queue.load_totals())
            await self.lease_manager.restore()
            self.ledger.wake_all_readers()
            self.events.mark_lagged("a commit of the store was uncertain")
        self.ledger.lanes = await self._queue.load_counts()
        for run in list(self._run_registry.runs):
            await self._count_untaken(run)
        self._database.reconcile(uncertain_commits)

    async def _count_untaken(self, run: str) -> None:
        """Counts graded sessions that no consumer has taken, if a quota needs that: it queries the database."""
        if self._run_registry.get_quotas(run).max_ahead is not None:
            consumers = [
                position for (consumer_run, _), position in self._consumers.items() if consumer_run == run
            ] or [ConsumerPosition(0, "session")]
            counts = [
                await self._queue.count_usable_after(run, consumer.cursor, consumer.unit) for consumer in consumers
            ]
            self.ledger.untaken[run] = min(counts)  # what one consumer has taken is trained on

    async def _maintain(self) -> None:
        loop = asyncio.get_running_loop()
        term = self._settings.lease_seconds
        checked_at = counted_at = loop.time()
        while True:
            await asyncio.sleep(term / _CHECKS_PER_TERM)
            now = loop.time()
            if now - checked_at > term / 2:
                self.lease_manager.renew_terms()
            checked_at = now
            try:
                await self._database.check_epoch()
                await self.lease_manager.expire_silent_members(now)
                await self.lease_manager.record_lifetimes()
                if now - counted_at > _RECOUNT_SECONDS or self._database.is_uncertain:
                    counted_at = now
                    await self._recount()
            except Superseded as error:
                log.error("%s", error)
                self.superseded.set()
                return
            except StoreError as error:
                log.error("The maintenance of the queue failed: %s", error)

    def _schedule(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def run_later() -> None:
            await asyncio.sleep(seconds)
            await work()

        task = asyncio.get_running_loop().create_task(run_later())
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A background task of the queue has failed", exc_info=error)
            self.failed.set()


def _to_new_task(task: TaskRequest) -> NewTask:
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


class RetentionMark(Struct, array_like=True):
    served_seconds: float  # by all servers so far
    cursor: int  # of the last result at that time


class Retention:
    """Deletes ended tasks after a number of hours.

    Hours are counted while servers run on this database, so a wrong clock expires nothing. Marks record the last cursor
    at regular times; tasks that had ended by an expired mark are deleted.
    """

    def __init__(self, queue: Queue, hours: float) -> None:
        self._queue = queue
        self._seconds = hours * 3600
        self._marks: list[RetentionMark] = []

    async def run(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        known = await self._queue.load_fact(_RETENTION_FACT)
        self._marks = [RetentionMark(0.0, 0)] if known is None else msgspec.json.decode(known, type=list[RetentionMark])
        began = loop.time() - self._marks[-1].served_seconds
        while True:
            await asyncio.sleep(self._seconds / _RETENTION_MARKS)
            try:
                await self._delete_expired(loop.time() - began)
            except StoreError as error:
                log.error("Expired tasks could not be deleted: %s", error)

    async def _delete_expired(self, served: float) -> None:
        self._marks.append(RetentionMark(served, await self._queue.read_last_cursor()))
        expired = [mark for mark in self._marks if mark.served_seconds <= served - self._seconds]
        if expired:
            while await self._queue.delete_ended_tasks(expired[-1].cursor, _MAX_DELETED_TASKS):
                pass
            self._marks = [mark for mark in self._marks if mark.served_seconds >= expired[-1].served_seconds]
        await self._queue.save_fact(_RETENTION_FACT, msgspec.json.encode(self._marks).decode())
