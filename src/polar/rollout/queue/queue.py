"""The queue: tasks and their work, as rows of the store's database.

    submit ─► queued ─► leased ─► done
                ▲          │
                └─ waiting ┘  retry

Each method is one transaction. If the connection is lost during the commit, the transaction may run twice; the second
run finds the work done and changes nothing. Every transaction first checks that this server is still the one that may
write: each start takes the next epoch.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from polar.records.result import ResultUnit
from polar.records.session import PLATFORM_REASONS
from polar.rollout.protocol import INTERRUPTED, FinishStatus, Lease, LeaseId, SessionOutcome
from polar.rollout.queue.database import QueueDatabase, fetch_number
from polar.rollout.queue.records import (
    AdmittedTask,
    ConsumerPosition,
    Counts,
    EndedTask,
    FinishResult,
    Lane,
    LeaseAllowance,
    LeaseCandidate,
    NewTask,
    TaskRow,
    Totals,
    TrackedLease,
    WorkChange,
    WorkRow,
    WorkState,
    make_count_parameters,
    make_end_parameters,
    make_lease,
    make_lease_parameters,
    make_task_parameters,
    make_task_row,
    make_work_parameters,
    parse_callback_url,
    restore_lease,
    to_change,
)
from polar.rollout.queue.selection import CONTROL_RATIO, SUSPECT_KILLS, SuspectRecord, select_work
from polar.store.sql import Connection, WritingConnection

_KILLER_ERROR = "Several nodes died while they ran this session, the last one while it ran nothing else: not retried."


class Queue:
    def __init__(self, database: QueueDatabase) -> None:
        self._database = database
        self._sql = database.sql

    # Tasks

    async def submit(self, tasks: Sequence[NewTask]) -> list[AdmittedTask]:
        """Inserts tasks. Returns each as it is in the queue now; a task that existed before may have other content."""

        now = time.time()

        def insert(db: WritingConnection) -> list[AdmittedTask]:
            samples = sum(task.samples for task in tasks)
            first = fetch_number(db, self._sql.advance_counter, name="work", count=samples) - samples + 1
            is_new_task = [
                bool(rows)
                for rows in self._database.execute_each(
                    db, self._sql.insert_task, [make_task_parameters(task, now) for task in tasks]
                )
            ]
            known = [task for task, is_new in zip(tasks, is_new_task, strict=True) if not is_new]
            names = [{"run": task.run, "task_id": task.task_id} for task in known]
            rows_of_known = iter(self._database.execute_each(db, self._sql.task, names))
            admitted = [
                AdmittedTask(make_task_row(task, now))
                if is_new
                else self._readmit(db, task, TaskRow(*next(rows_of_known)[0]), now)
                for task, is_new in zip(tasks, is_new_task, strict=True)
            ]
            work: list[dict[str, object]] = []
            for task, admitted_task in zip(tasks, admitted, strict=True):
                if admitted_task.is_new:
                    work += make_work_parameters(task, first)
                first += task.samples
            if work:
                db.executemany(self._sql.insert_work, work)
            return admitted

        return await self._database.transact(insert)

    def _readmit(self, db: WritingConnection, task: NewTask, known: TaskRow, now: float) -> AdmittedTask:
        """Submits a task whose id exists already."""
        name = {"run": task.run, "task_id": task.task_id}
        if task.rerun:  # this submission may contain it twice
            known = TaskRow(*db.execute(self._sql.task, name).fetchone())
        if task.rerun and known.state != "running":
            db.execute(self._sql.keep_replaced, {**name, "cursor": known.cursor})
            db.execute(self._sql.drop_work, name)
            db.execute(self._sql.drop_task, name)
            db.execute(self._sql.insert_task, make_task_parameters(task, now))
            return AdmittedTask(make_task_row(task, now), replaced=known)
        same = known.digest == task.digest
        if same and task.callback_url not in (None, parse_callback_url(known.request)):
            db.execute(self._sql.redirect_callback, {**name, "request": task.request})
            known = msgspec.structs.replace(known, request=task.request, callback="waiting")
            return AdmittedTask(known, is_new=False, has_new_callback=True)
        return AdmittedTask(known, is_new=False)

    async def cancel(self, run: str, task_id: str, reason: str) -> list[WorkChange] | None:
        """Ends the work that has not begun; nodes end what runs. None where there is no such task."""

        def cancel(db: WritingConnection) -> list[WorkChange] | None:
            if db.execute(self._sql.task, {"run": run, "task_id": task_id}).fetchone() is None:
                return None
            return self._cancel(db, run, task_id, reason)

        return await self._database.transact(cancel)

    def _cancel(self, db: WritingConnection, run: str, task_id: str, reason: str) -> list[WorkChange]:
        db.execute(self._sql.cancel_task, {"run": run, "task_id": task_id, "reason": reason})
        rows = db.execute(self._sql.task_work, {"run": run, "task_id": task_id}).fetchall()
        idle = [work for row in rows if (work := WorkRow(*row)).state in ("queued", "waiting")]
        ending = [(SessionOutcome(work.work_id, work.fence, None, reason=reason), work.state) for work in idle]
        return [change for change in self._finish_work(db, ending) if change is not None]

    async def set_callback_state(self, run: str, task_id: str, state: str) -> None:
        """Records that a task's callback was acknowledged or given up."""
        await self._database.write(self._sql.set_callback_state, run=run, task_id=task_id, callback=state)

    # Leases

    async def lease(
        self,
        node: str,
        holding: Iterable[LeaseId],
        allowances: Sequence[LeaseAllowance],
        room: int,
        slots: int,
        unrunnable: Collection[tuple[str, str]] = (),
    ) -> list[tuple[Lease, TrackedLease]]:
        """Leases up to `room` sessions to a node, and repeats leases that it does not know of. Skips `unrunnable`
        tasks."""
        known = set(holding)
        granted: set[int] = set()  # by an earlier run of this transaction whose commit is uncertain

        def lease(db: WritingConnection) -> list[tuple[Lease, TrackedLease]]:
            held_leases = self._load_lease_kills(db, node)
            unknown = sorted(held_leases.keys() - known, key=_work_id)
            rows = self._database.execute_each(
                db, self._sql.leased_work, [{"work_id": lease_id.work_id} for lease_id in unknown]
            )
            repeated = [restore_lease(row, node) for [row] in rows]
            is_rerun = any(lease_id.work_id in granted for lease_id in unknown)
            fetch_candidates = partial(self._fetch_candidates, db)
            selected = (
                []
                if is_rerun
                else select_work(
                    fetch_candidates, allowances, room - len(repeated), slots, held_leases.values(), unrunnable
                )
            )
            granted.update(candidate.work_id for candidate, _ in selected)
            if selected:
                db.executemany(
                    self._sql.lease,
                    [
                        {"work_id": candidate.work_id, "node": node, "version": allowance.version}
                        for candidate, allowance in selected
                    ],
                )
            return [*repeated, *(make_lease(candidate, allowance, node) for candidate, allowance in selected)]

        return await self._database.transact(lease)

    def _fetch_candidates(self, db: Connection, lane: Lane, limit: int, most_kills: int) -> list[LeaseCandidate]:
        parameters = {
            "run": lane.run,
            "lane": lane.name,
            "limit": limit,
            "most_kills": most_kills,
            "suspect": SUSPECT_KILLS,
            "rest": CONTROL_RATIO,
        }
        return [LeaseCandidate(*row) for row in db.execute(self._sql.lease_candidates, parameters).fetchall()]

    def _load_lease_kills(self, db: Connection, node: str) -> dict[LeaseId, int]:
        """A node's leases, and how many nodes have died while running each."""
        rows = db.execute(self._sql.node_leases, {"node": node}).fetchall()
        return {LeaseId(work_id, fence): kills for work_id, fence, kills in rows}

    async def finish(self, outcomes: Sequence[SessionOutcome], attempts: int) -> list[FinishResult]:
        """Ends work by outcomes. Only the current fence of some work can end it; repeated outcomes get the same
        answer."""

        def finish(db: WritingConnection) -> list[FinishResult]:
            changes = self._retry(db, outcomes, attempts)
            final = [outcome for outcome in outcomes if outcome.lease_id not in changes]
            for outcome in final:
                if outcome.reason == INTERRUPTED:  # and its task was cancelled meanwhile
                    outcome.reason = "cancelled"
            for outcome, change in zip(
                final, self._finish_work(db, [(outcome, "leased") for outcome in final]), strict=True
            ):
                if change is not None:
                    changes[outcome.lease_id] = change
            return [
                FinishResult("taken", changes[outcome.lease_id])
                if outcome.lease_id in changes
                else FinishResult(self._repeat_status(db, outcome))
                for outcome in outcomes
            ]

        return await self._database.transact(finish)

    def _retry(
        self, db: WritingConnection, outcomes: Sequence[SessionOutcome], attempts: int
    ) -> dict[LeaseId, WorkChange]:
        """Requeues work that was handed back, or that the platform failed and that has attempts left."""
        interrupted = [outcome for outcome in outcomes if outcome.reason == INTERRUPTED]
        failed = [outcome for outcome in outcomes if outcome.reason in PLATFORM_REASONS]
        released = self._database.execute_each(
            db, self._sql.release, [{**make_lease_parameters(outcome.lease_id), "killed": 0} for outcome in interrupted]
        )
        retried = self._database.execute_each(
            db,
            self._sql.retry,
            [{**make_lease_parameters(outcome.lease_id), "attempts": attempts} for outcome in failed],
        )
        changes = [
            *(
                to_change(rows, "leased", "queued", outcome)
                for outcome, rows in zip(interrupted, released, strict=True)
            ),
            *(to_change(rows, "leased", "waiting", outcome) for outcome, rows in zip(failed, retried, strict=True)),
        ]
        return {change.outcome.lease_id: change for change in changes if change is not None}

    def _finish_work(
        self, db: WritingConnection, ending: Sequence[tuple[SessionOutcome, WorkState]]
    ) -> list[WorkChange | None]:
        """Marks work as done. None for work whose state or fence has changed."""
        if not ending:
            return []
        # Two cursors each: for the session's end, and for its task's. Unused ones are skipped.
        first = fetch_number(db, self._sql.advance_counter, name="cursor", count=2 * len(ending)) - 2 * len(ending) + 1
        cursors = range(first, first + 2 * len(ending), 2)
        parameters = [make_end_parameters(*item, cursor) for item, cursor in zip(ending, cursors, strict=True)]
        changes = [
            to_change(rows, state, "done", outcome, cursor)
            for rows, (outcome, state), cursor in zip(
                self._database.execute_each(db, self._sql.finish, parameters), ending, cursors, strict=True
            )
        ]
        finished = [change for change in changes if change is not None]
        count_parameters = [make_count_parameters(change, time.time()) for change in finished]
        for change, [row] in zip(
            finished, self._database.execute_each(db, self._sql.count_end, count_parameters), strict=True
        ):
            state, cursor, usable, enough, cancelled, callback = row
            if cursor is not None:
                change.ended_task = EndedTask(change.lane.run, change.task_id, state, cursor, callback is not None)
            elif enough is not None and usable >= enough and cancelled is None:
                change.triggers_early_stop = True
        stopped = {
            (change.lane.run, change.task_id): change for change in reversed(finished) if change.triggers_early_stop
        }
        for (run, task_id), change in stopped.items():
            change.cancelled_work = self._cancel(db, run, task_id, "early_stop")
        return changes

    def _repeat_status(self, db: Connection, outcome: SessionOutcome) -> FinishStatus:
        """The answer to a repeated or late outcome. Work of that fence that is neither leased nor done was requeued: an
        outcome that requeues it was taken; any other one is lost."""
        row = db.execute(self._sql.work, {"work_id": outcome.work_id}).fetchone()
        if row is None:
            return "lost"
        work = WorkRow(*row)
        if work.state == "done":
            was_accepted = work.session_id == outcome.session_id
        else:
            was_accepted = work.state != "leased" and (
                outcome.reason == INTERRUPTED or outcome.reason in PLATFORM_REASONS
            )
        return "taken" if was_accepted and work.fence == outcome.fence else "lost"

    async def release_leases(self, node: str, *, died: bool) -> list[WorkChange]:
        """Requeues all work of a node that is gone. `died`: it was not asked to stop, so its work is marked as suspect,
        and proven killers are not retried (selection.py)."""

        def release(db: WritingConnection) -> list[WorkChange]:
            kills_by_lease = self._load_lease_kills(db, node)
            convicted: list[LeaseId] = []
            if died and not any(kills_by_lease.values()):
                db.execute(self._sql.add_control_death)
            elif died and len(kills_by_lease) == 1:
                convicted = [
                    lease_id for lease_id in kills_by_lease if self._load_suspect_record(db, lease_id).is_proven
                ]
            outcomes = {
                lease_id: SessionOutcome(lease_id.work_id, lease_id.fence, None, reason="node_lost", node_id=node)
                for lease_id in sorted(kills_by_lease, key=_work_id)
            }
            returned = [outcome for lease_id, outcome in outcomes.items() if lease_id not in convicted]
            released = self._database.execute_each(
                db,
                self._sql.release,
                [{**make_lease_parameters(outcome.lease_id), "killed": int(died)} for outcome in returned],
            )
            changes = {
                outcome.lease_id: to_change(rows, "leased", "queued", outcome)
                for outcome, rows in zip(returned, released, strict=True)
            }
            ending = [outcome for lease_id, outcome in outcomes.items() if changes.get(lease_id) is None]
            for outcome in ending:  # else it was cancelled, and so nobody tries again
                outcome.reason, outcome.error = (
                    ("node_killer", _KILLER_ERROR) if outcome.lease_id in convicted else ("cancelled", None)
                )
            finished = self._finish_work(db, [(outcome, "leased") for outcome in ending])
            return [change for change in (*changes.values(), *finished) if change is not None]

        return await self._database.transact(release)

    def _load_suspect_record(self, db: Connection, lease_id: LeaseId) -> SuspectRecord:
        return SuspectRecord(*db.execute(self._sql.suspect_record, {"work_id": lease_id.work_id}).fetchone())

    async def record_lifetimes(self, seconds: Mapping[str, float]) -> bool:
        """Adds lifetimes of nodes to the records of suspect work. False where there is no such work."""

        def record(db: WritingConnection) -> bool:
            rows = db.execute(self._sql.suspect_work).fetchall()
            hosts = {work_id: node for work_id, node, state in rows if state == "leased"}
            for work_id, node in hosts.items():
                db.execute(self._sql.add_exposure, {"work_id": work_id, "seconds": seconds.get(node, 0.0)})
            suspicious = set(hosts.values())
            control = sum(lived for node, lived in seconds.items() if node not in suspicious)
            if rows:
                db.execute(self._sql.add_control, {"seconds": control})
            return bool(rows)

        return await self._database.transact(record)

    async def retract_kills(self, work_ids: Iterable[int]) -> None:
        """Takes back a node's death, because the node is alive."""

        def retract(db: WritingConnection) -> None:
            for work_id in work_ids:
                db.execute(self._sql.retract_kill, {"work_id": work_id})

        await self._database.transact(retract)

    async def requeue(self, work_ids: Iterable[int]) -> list[Lane]:
        """Queues work that waited for a retry. Returns the lanes of that work."""

        def requeue(db: WritingConnection) -> list[Lane]:
            lanes = []
            for work_id in work_ids:
                lanes += [Lane(*row) for row in db.execute(self._sql.requeue, {"work_id": work_id}).fetchall()]
            return lanes

        return await self._database.transact(requeue)

    async def delete_ended_tasks(self, cursor: int, limit: int) -> int:
        """Drops up to `limit` tasks that ended by the cursor, with their sessions, and up to `limit` sessions of tasks
        that ended by then and were run again. Returns how many tasks and such sessions there were."""

        def delete(db: WritingConnection) -> int:
            tasks = db.execute(self._sql.tasks_ended_up_to, {"cursor": cursor, "limit": limit}).fetchall()
            for run, task_id in tasks:
                task = {"run": run, "task_id": task_id}
                for (session_id,) in db.execute(self._sql.task_sessions, task).fetchall():
                    self._drop_session(db, session_id)
                db.execute(self._sql.drop_work, task)
                db.execute(self._sql.drop_task, task)
            replaced = db.execute(self._sql.replaced_up_to, {"cursor": cursor, "limit": limit}).fetchall()
            for (session_id,) in replaced:
                self._drop_session(db, session_id)
                db.execute(self._sql.drop_replaced, {"session_id": session_id})
            return len(tasks) + len(replaced)

        return await self._database.transact(delete)

    def _drop_session(self, db: WritingConnection, session_id: str) -> None:
        db.execute(self._sql.drop_exchanges, {"session_id": session_id})
        db.execute(self._sql.drop_session, {"session_id": session_id})

    # Reads

    async def list_leases(self) -> list[TrackedLease]:
        """All leases: read when a server starts, when a node joins, and after uncertain commits."""

        def read(db: Connection) -> list[TrackedLease]:
            leases: list[TrackedLease] = []
            while True:
                after = leases[-1].lease_id.work_id if leases else 0
                rows = db.execute(self._sql.leases, {"after": after, "limit": 1000}).fetchall()
                if not rows:
                    return leases
                for work_id, fence, run, lane, task_id, node, version, cancelled, request in rows:
                    lease_id = LeaseId(work_id, fence)
                    leases.append(TrackedLease(lease_id, Lane(run, lane), task_id, node, version, cancelled, request))

        return await self._database.transact(read)

    async def list_node_leases(self, node: str) -> list[TrackedLease]:
        def read(db: Connection) -> list[TrackedLease]:
            leases = db.execute(self._sql.node_leases, {"node": node}).fetchall()
            rows = self._database.execute_each(
                db, self._sql.leased_work, [{"work_id": work_id} for work_id, *_ in leases]
            )
            return [restore_lease(row, node)[1] for [row] in rows]

        return await self._database.transact(read)

    async def list_waiting_work(self) -> list[int]:
        return await self._database.transact(
            lambda db: [row[0] for row in db.execute(self._sql.waiting_work).fetchall()]
        )

    async def load_counts(self) -> dict[Lane, Counts]:
        """Counts in the order of transactions, so that later changes can be added to them."""

        def read(db: Connection) -> dict[Lane, Counts]:
            counts: dict[Lane, Counts] = {}
            for state, run, lane, count in db.execute(self._sql.counts).fetchall():
                setattr(counts.setdefault(Lane(run, lane), Counts()), state, count)
            return counts

        return await self._database.transact(read)

    async def load_totals(self) -> dict[str, Totals]:
        def read(db: Connection) -> dict[str, Totals]:
            rows = db.execute(self._sql.totals).fetchall()
            return {run: Totals(int(tasks), int(ended), int(usable)) for run, tasks, ended, usable in rows}

        return await self._database.transact(read)

    async def get_task(self, run: str, task_id: str) -> TaskRow | None:
        row = await self._database.query(
            lambda db: db.execute(self._sql.task, {"run": run, "task_id": task_id}).fetchone()
        )
        return None if row is None else TaskRow(*row)

    async def list_task_work(self, run: str, task_id: str) -> list[WorkRow]:
        return await self._database.fetch_rows(WorkRow, self._sql.task_work, run=run, task_id=task_id)

    async def list_work_after(self, run: str, after: int, limit: int) -> list[WorkRow]:
        return await self._database.fetch_rows(WorkRow, self._sql.work_after, run=run, after=after, limit=limit)

    async def list_tasks_after(self, run: str, after: int, limit: int) -> list[TaskRow]:
        return await self._database.fetch_rows(TaskRow, self._sql.tasks_after, run=run, after=after, limit=limit)

    async def list_recent_tasks(self, run: str, limit: int) -> list[TaskRow]:
        return await self._database.fetch_rows(TaskRow, self._sql.recent_tasks, run=run, limit=limit)

    async def list_tasks_awaiting_callback(self, after: int, limit: int) -> list[TaskRow]:
        return await self._database.fetch_rows(TaskRow, self._sql.tasks_awaiting_callback, after=after, limit=limit)

    async def count_usable_after(self, run: str, after: int, unit: ResultUnit) -> int:
        """Counts in the order of transactions, like `load_counts`."""
        query = self._sql.usable_after if unit == "session" else self._sql.usable_in_tasks_after
        return await self._database.transact(lambda db: int(fetch_number(db, query, run=run, after=after)))

    # Runs, consumers, facts

    async def load_runs(self) -> dict[str, str]:
        return dict(await self._database.query(lambda db: db.execute(self._sql.runs).fetchall()))

    async def save_run(self, run: str, settings: str) -> None:
        await self._database.write(self._sql.save_run, run=run, settings=settings)

    async def load_consumers(self) -> dict[tuple[str, str], ConsumerPosition]:
        rows = await self._database.query(lambda db: db.execute(self._sql.consumers).fetchall())
        return {(run, consumer): ConsumerPosition(cursor, unit) for run, consumer, cursor, unit in rows}

    async def save_consumer(self, run: str, consumer: str, position: ConsumerPosition) -> None:
        await self._database.write(
            self._sql.save_consumer, run=run, consumer=consumer, cursor=position.cursor, unit=position.unit
        )

    async def read_last_cursor(self) -> int:
        """The last cursor that was assigned."""
        return await self._database.transact(lambda db: fetch_number(db, self._sql.counter, name="cursor"))

    async def load_fact(self, name: str) -> str | None:
        row = await self._database.query(lambda db: db.execute(self._sql.fact, {"name": name}).fetchone())
        return None if row is None else str(row[0])

    async def save_fact(self, name: str, value: str) -> None:
        await self._database.write(self._sql.save_fact, name=name, value=value)


def _work_id(lease_id: LeaseId) -> int:
    return lease_id.work_id
