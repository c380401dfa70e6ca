"""What there is in the queue, and what is kept beside it: runs, consumers, facts."""

from polar.records.result import ResultUnit
from polar.rollout.protocol import LeaseId
from polar.rollout.queue_rows import restore_lease
from polar.rollout.records import ConsumerPosition, Counts, Lane, TaskRow, Totals, TrackedLease, WorkRow
from polar.rollout.transactions import QueueTransactions, fetch_number
from polar.store.sql import Connection


class QueueReads(QueueTransactions):
    async def leases(self) -> list[TrackedLease]:
        """All there are: read when a server starts, when a node joins, and in doubt."""

        def read(db: Connection) -> list[TrackedLease]:
            found: list[TrackedLease] = []
            while True:
                after = found[-1].lease_id.work_id if found else 0
                rows = db.execute(self.q.leases, {"after": after, "limit": 1000}).fetchall()
                if not rows:
                    return found
                for work_id, fence, run, lane, task_id, node, version, cancelled, request in rows:
                    held = LeaseId(work_id, fence)
                    found.append(TrackedLease(held, Lane(run, lane), task_id, node, version, cancelled, request))

        return await self.transact(read)

    async def node_leases(self, node: str) -> list[TrackedLease]:
        def read(db: Connection) -> list[TrackedLease]:
            held = db.execute(self.q.node_leases, {"node": node}).fetchall()
            found = self.execute_each(db, self.q.leased_work, [{"work_id": work_id} for work_id, *_ in held])
            return [restore_lease(rows[0], node)[1] for rows in found]

        return await self.transact(read)

    async def waiting_work(self) -> list[int]:
        return await self.transact(lambda db: [row[0] for row in db.execute(self.q.waiting_work).fetchall()])

    async def counts(self) -> dict[Lane, Counts]:
        """In the order of transactions, so that changes can be counted from here on."""

        def read(db: Connection) -> dict[Lane, Counts]:
            found: dict[Lane, Counts] = {}
            for state, run, lane, count in db.execute(self.q.counts).fetchall():
                setattr(found.setdefault(Lane(run, lane), Counts()), state, count)
            return found

        return await self.transact(read)

    async def totals(self) -> dict[str, Totals]:
        def read(db: Connection) -> dict[str, Totals]:
            rows = db.execute(self.q.totals).fetchall()
            return {run: Totals(int(tasks), int(ended), int(usable)) for run, tasks, ended, usable in rows}

        return await self.transact(read)

    async def task(self, run: str, task_id: str) -> TaskRow | None:
        row = await self.db.query(lambda db: db.execute(self.q.task, {"run": run, "task_id": task_id}).fetchone())
        return None if row is None else TaskRow(*row)

    async def task_work(self, run: str, task_id: str) -> list[WorkRow]:
        return await self.fetch_rows(WorkRow, self.q.task_work, run=run, task_id=task_id)

    async def work_after(self, run: str, after: int, limit: int) -> list[WorkRow]:
        return await self.fetch_rows(WorkRow, self.q.work_after, run=run, after=after, limit=limit)

    async def tasks_after(self, run: str, after: int, limit: int) -> list[TaskRow]:
        return await self.fetch_rows(TaskRow, self.q.tasks_after, run=run, after=after, limit=limit)

    async def recent_tasks(self, run: str, limit: int) -> list[TaskRow]:
        return await self.fetch_rows(TaskRow, self.q.recent_tasks, run=run, limit=limit)

    async def tasks_awaiting_callback(self, after: int, limit: int) -> list[TaskRow]:
        return await self.fetch_rows(TaskRow, self.q.tasks_awaiting_callback, after=after, limit=limit)

    async def usable_after(self, run: str, after: int, unit: ResultUnit) -> int:
        """In the order of transactions, like `counts`."""
        query = self.q.usable_after if unit == "session" else self.q.usable_in_tasks_after
        return await self.transact(lambda db: int(fetch_number(db, query, run=run, after=after)))

    # Runs, consumers, facts

    async def runs(self) -> dict[str, str]:
        return dict(await self.db.query(lambda db: db.execute(self.q.runs).fetchall()))

    async def save_run(self, run: str, settings: str) -> None:
        await self.write(self.q.save_run, run=run, settings=settings)

    async def consumers(self) -> dict[tuple[str, str], ConsumerPosition]:
        rows = await self.db.query(lambda db: db.execute(self.q.consumers).fetchall())
        return {(run, consumer): ConsumerPosition(cursor, unit) for run, consumer, cursor, unit in rows}

    async def save_consumer(self, run: str, consumer: str, position: ConsumerPosition) -> None:
        await self.write(self.q.save_consumer, run=run, consumer=consumer, cursor=position.cursor, unit=position.unit)

    async def last_cursor(self) -> int:
        """The last one given out."""
        return await self.transact(lambda db: fetch_number(db, self.q.counter, name="cursor"))

    async def fact(self, name: str) -> str | None:
        row = await self.db.query(lambda db: db.execute(self.q.fact, {"name": name}).fetchone())
        return None if row is None else str(row[0])

    async def save_fact(self, name: str, value: str) -> None:
        await self.write(self.q.save_fact, name=name, value=value)
