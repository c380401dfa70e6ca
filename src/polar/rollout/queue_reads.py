"""What there is in the queue, and what is kept beside it: runs, consumers, facts."""

from polar.rollout.models import Unit
from polar.rollout.protocol import Held
from polar.rollout.records import Counts, Lane, Taken, TaskRow, Totals, Tracked, WorkRow
from polar.rollout.rows import leased_again
from polar.rollout.transactions import Transactions, number
from polar.store.sql import Connection


class QueueReads(Transactions):
    async def leases(self) -> list[Tracked]:
        """All there are: read when a server starts, when a node joins, and in doubt."""

        def read(db: Connection) -> list[Tracked]:
            found: list[Tracked] = []
            while True:
                after = found[-1].held.work_id if found else 0
                rows = db.execute(self.q.leases, {"after": after, "limit": 1000}).fetchall()
                if not rows:
                    return found
                for work_id, fence, run, lane, task_id, node, version, cancelled, request in rows:
                    held = Held(work_id, fence)
                    found.append(Tracked(held, Lane(run, lane), task_id, node, version, cancelled, request))

        return await self.transact(read)

    async def leases_of(self, node: str) -> list[Tracked]:
        def read(db: Connection) -> list[Tracked]:
            held = db.execute(self.q.leased_to, {"node": node}).fetchall()
            found = self.all(db, self.q.leased_work, [{"work_id": work_id} for work_id, *_ in held])
            return [leased_again(rows[0], node)[1] for rows in found]

        return await self.transact(read)

    async def waiting(self) -> list[int]:
        return await self.transact(lambda db: [row[0] for row in db.execute(self.q.waiting).fetchall()])

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

    async def work_of(self, run: str, task_id: str) -> list[WorkRow]:
        return await self.rows(WorkRow, self.q.work_of, run=run, task_id=task_id)

    async def work_after(self, run: str, after: int, limit: int) -> list[WorkRow]:
        return await self.rows(WorkRow, self.q.work_after, run=run, after=after, limit=limit)

    async def tasks_after(self, run: str, after: int, limit: int) -> list[TaskRow]:
        return await self.rows(TaskRow, self.q.tasks_after, run=run, after=after, limit=limit)

    async def recent_tasks(self, run: str, limit: int) -> list[TaskRow]:
        return await self.rows(TaskRow, self.q.recent_tasks, run=run, limit=limit)

    async def tasks_to_tell(self, after: int, limit: int) -> list[TaskRow]:
        return await self.rows(TaskRow, self.q.tasks_to_tell, after=after, limit=limit)

    async def usable_after(self, run: str, after: int, unit: Unit) -> int:
        """In the order of transactions, like `counts`."""
        query = self.q.usable_after if unit == "session" else self.q.usable_in_tasks_after
        return await self.transact(lambda db: int(number(db, query, run=run, after=after)))

    # Runs, consumers, facts

    async def runs(self) -> dict[str, str]:
        return dict(await self.db.query(lambda db: db.execute(self.q.runs).fetchall()))

    async def keep_run(self, run: str, settings: str) -> None:
        await self.write(self.q.keep_run, run=run, settings=settings)

    async def consumers(self) -> dict[tuple[str, str], Taken]:
        rows = await self.db.query(lambda db: db.execute(self.q.consumers).fetchall())
        return {(run, consumer): Taken(cursor, unit) for run, consumer, cursor, unit in rows}

    async def keep_consumer(self, run: str, consumer: str, taken: Taken) -> None:
        await self.write(self.q.keep_consumer, run=run, consumer=consumer, cursor=taken.cursor, unit=taken.unit)

    async def cursor(self) -> int:
        """The last one given out."""
        return await self.transact(lambda db: number(db, self.q.counter, name="cursor"))

    async def fact(self, name: str) -> str | None:
        row = await self.db.query(lambda db: db.execute(self.q.fact, {"name": name}).fetchone())
        return None if row is None else str(row[0])

    async def keep_fact(self, name: str, value: str) -> None:
        await self.write(self.q.keep_fact, name=name, value=value)
