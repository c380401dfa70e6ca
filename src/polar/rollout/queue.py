"""The queue: tasks and their work, as rows of the store's database.

    submit ─► queued ─► leased ─► done
                ▲          │
                └─ waiting ┘  another try

Each method is one transaction, which may be made twice where a connection is lost in the middle of its commit: then it
finds its own work done and changes nothing. Every one of them begins by making sure that this server is still the one
that writes here: each start takes the next epoch.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from polar.errors import StoreError
from polar.rollout.protocol import Answer, Ended, Held, Lease
from polar.rollout.queue_sql import Queries, TaskRow, WorkRow, WorkState, queries
from polar.store.sql import Connection, Style, WritingConnection

T = TypeVar("T")

SUSPECT = 2
"""Nodes that have died with some work before it is suspected of killing them."""

PLATFORM = frozenset({"sandbox_failed", "store_failed", "engine_failed", "node_failed"})
"""Reasons for which a session is tried again: they say nothing of the agent."""

INTERRUPTED = "interrupted"
"""The node closed: the session goes back, and nothing is counted."""


_ANY = 1 << 31
_KILLER = "Node after node died under this session, the last one under no other suspect: set aside."


class Database(Protocol):
    """What the queue needs of a store."""

    @property
    def style(self) -> Style: ...

    async def transact(self, work: Callable[[WritingConnection], T]) -> T: ...

    async def query(self, work: Callable[[Connection], T]) -> T: ...


class Superseded(StoreError):
    """Another server has been started on this database."""


class NewTask(Struct):
    run: str
    task_id: str
    samples: int
    enough: int | None
    lane: str
    priority: int
    callback: bool
    digest: bytes
    request: str


class Lane(Struct, frozen=True):
    """Work of one run that takes one kind of runtime: nobody else's priorities matter in it."""

    run: str
    name: str


class Allowance(Struct, frozen=True):
    """What a node may have of a lane."""

    lane: Lane
    most: int  # of the run, shared by its lanes
    busy: int  # of the run, by now: of equally urgent work, that of the least busy run goes first
    version: int | None  # of the policy


class Head(Struct):
    """The next of a lane."""

    work_id: int
    rank: int
    kills: int
    fence: int
    task_id: str
    sample: int
    attempt: int
    digest: bytes
    request: str


class Tracked(Struct):
    """A lease, as the server keeps it in memory."""

    held: Held
    lane: Lane
    task_id: str
    node: str
    version: int | None
    cancelled: str | None
    request: str


class EndedTask(Struct):
    run: str
    task_id: str
    state: str
    cursor: int
    callback: bool  # somebody is to be told


class Outcome(Struct):
    """What became of something that was said to have ended."""

    answer: Answer
    change: "Change | None" = None  # None where it was heard before, or too late


class Change(Struct):
    """Some work is no longer what it was."""

    lane: Lane
    task_id: str
    sample: int
    was: WorkState
    became: WorkState
    ended: Ended
    cursor: int | None = None
    task: EndedTask | None = None  # that ended with it
    enough: bool = False  # its task has enough graded sessions now: the others are not wanted any more
    others: list["Change"] = []  # of those, what had not begun


class Counts(Struct):
    queued: int = 0
    leased: int = 0
    waiting: int = 0


class Totals(Struct):
    tasks: int = 0
    ended: int = 0
    usable: int = 0


class Queue:
    def __init__(self, database: Database, epoch: int) -> None:
        self._db = database
        self._q: Queries = queries(database.style)
        self.epoch = epoch
        self.doubts = 0  # times that something may have changed that nobody was told of
        self.settled = 0  # so many of them; as long as there are more, what is counted is to be counted anew

    @classmethod
    async def open(cls, database: Database) -> "Queue":
        """From here on this one writes, and no earlier one."""
        q = queries(database.style)

        def take(db: WritingConnection) -> int:
            return _one(db, q.take, name="epoch", count=1)

        return cls(database, await database.transact(take))

    @property
    def doubtful(self) -> bool:
        return self.doubts > self.settled

    async def _transact(self, work: Callable[[WritingConnection], T]) -> T:
        runs = 0

        def guarded(db: WritingConnection) -> T:
            nonlocal runs
            runs += 1
            if _one(db, self._q.hold, name="epoch") != self.epoch:
                raise Superseded("Another server has been started on this database: this one stops.")
            return work(db)

        try:
            return await self._db.transact(guarded)
        except BaseException:  # and yet it may be written
            self.doubts += 1
            raise
        finally:
            self.doubts += runs > 1  # the first may have been written, and the last found nothing to do

    async def check(self) -> None:
        """Raises Superseded where another server has been started since."""
        await self._transact(lambda _: None)

    def _all(self, db: Connection, query: str, parameters: Sequence[Mapping[str, object]]) -> list[Sequence[Any]]:
        """The rows of each. PostgreSQL gets all statements before the first answer is waited for; SQLite is better off
        with one after the other."""
        if self._db.style == "named":
            return [db.execute(query, one).fetchall() for one in parameters]
        return [cursor.fetchall() for cursor in [db.execute(query, one) for one in parameters]]

    # Tasks

    async def submit(self, tasks: Sequence[NewTask]) -> list[tuple[TaskRow, bool]]:
        """Each as it is in the queue now, and whether it is new. One that is there already may have other content."""

        now = time.time()

        def insert(db: WritingConnection) -> list[tuple[TaskRow, bool]]:
            samples = sum(task.samples for task in tasks)
            first = _one(db, self._q.take, name="work", count=samples) - samples + 1
            new = [
                bool(rows) for rows in self._all(db, self._q.insert_task, [_parameters(task, now) for task in tasks])
            ]
            known = [task for task, is_new in zip(tasks, new, strict=True) if not is_new]
            named = [{"run": task.run, "task_id": task.task_id} for task in known]
            found = iter(self._all(db, self._q.task, named))
            rows = [
                _row(task, now) if is_new else TaskRow(*next(found)[0]) for task, is_new in zip(tasks, new, strict=True)
            ]
            work: list[dict[str, object]] = []
            for task, is_new in zip(tasks, new, strict=True):
                if is_new:
                    work += _rows(task, first)
                first += task.samples
            if work:
                db.executemany(self._q.insert_work, work)
            return list(zip(rows, new, strict=True))

        return await self._transact(insert)

    async def cancel(self, run: str, task_id: str, reason: str) -> list[Change] | None:
        """Ends what has not begun; what runs is its nodes' to end. None where there is no such task."""

        def cancel(db: WritingConnection) -> list[Change] | None:
            if db.execute(self._q.task, {"run": run, "task_id": task_id}).fetchone() is None:
                return None
            return self._cancel(db, run, task_id, reason)

        return await self._transact(cancel)

    def _cancel(self, db: WritingConnection, run: str, task_id: str, reason: str) -> list[Change]:
        db.execute(self._q.cancel_task, {"run": run, "task_id": task_id, "reason": reason})
        rows = db.execute(self._q.work_of, {"run": run, "task_id": task_id}).fetchall()
        idle = [work for row in rows if (work := WorkRow(*row)).state in ("queued", "waiting")]
        ending = [(Ended(work.work_id, work.fence, None, reason=reason), work.state) for work in idle]
        return [change for change in self._end(db, ending) if change is not None]

    async def told(self, run: str, task_id: str, callback: str) -> None:
        """Its callback is acknowledged, or given up."""
        parameters = {"run": run, "task_id": task_id, "callback": callback}
        await self._transact(lambda db: db.execute(self._q.told, parameters) and None)

    # Leases

    async def lease(
        self, node: str, holding: Iterable[Held], allowances: Sequence[Allowance], room: int, slots: int
    ) -> list[tuple[Lease, Tracked]]:
        """So many more for a node, and those that it has without knowing."""
        known = set(holding)
        given: set[int] = set()  # by a run of this that may have been committed, or not

        def lease(db: WritingConnection) -> list[tuple[Lease, Tracked]]:
            has = self._has(db, node)
            marked = [kills for kills in has.values() if kills]
            unknown = sorted(has.keys() - known, key=_work_id)
            again = [self._leased(db, held.work_id, node) for held in unknown]
            was = any(held.work_id in given for held in unknown)
            chosen = [] if was else self._choose(db, allowances, room - len(again), slots, marked)
            given.update(head.work_id for head, _ in chosen)
            if chosen:
                db.executemany(
                    self._q.lease,
                    [
                        {"work_id": head.work_id, "node": node, "version": allowance.version}
                        for head, allowance in chosen
                    ],
                )
            return [*again, *(_leased(head, allowance, node) for head, allowance in chosen)]

        return await self._transact(lease)

    def _choose(
        self, db: Connection, allowances: Sequence[Allowance], room: int, slots: int, marked: list[int]
    ) -> list[tuple[Head, Allowance]]:
        """The most urgent first, whatever lane it is in; of equally urgent ones, those of the least busy run."""
        heads: list[tuple[Head, Allowance]] = []
        for allowance in allowances:
            limit = min(room, allowance.most)
            if limit <= 0:
                continue
            found = self._heads(db, allowance.lane, limit, _ANY)
            if any(head.kills for head in found):  # they may not be let in
                for most_kills in (SUSPECT - 1, 0):
                    found += self._heads(db, allowance.lane, limit, most_kills)
            heads += [(head, allowance) for head in found]
        chosen: dict[int, tuple[Head, Allowance]] = {}
        left = {allowance.lane.run: allowance.most for allowance in allowances}
        for head, allowance in sorted(heads, key=lambda one: (one[0].rank, one[1].busy, one[0].work_id)):
            if len(chosen) >= room:
                break
            run = allowance.lane.run
            if head.work_id in chosen or left[run] <= 0:
                continue
            if head.kills:
                if not _may_be_together([*marked, head.kills], slots):
                    continue
                marked.append(head.kills)
            left[run] -= 1
            chosen[head.work_id] = head, allowance
        return list(chosen.values())

    def _heads(self, db: Connection, lane: Lane, limit: int, most_kills: int) -> list[Head]:
        parameters = {"run": lane.run, "lane": lane.name, "limit": limit, "most_kills": most_kills}
        return [Head(*row) for row in db.execute(self._q.heads, parameters).fetchall()]

    def _has(self, db: Connection, node: str) -> dict[Held, int]:
        """What a node has, and how many nodes died with it."""
        rows = db.execute(self._q.leased_to, {"node": node}).fetchall()
        return {Held(work_id, fence): kills for work_id, fence, kills in rows}

    def _leased(self, db: Connection, work_id: int, node: str) -> tuple[Lease, Tracked]:
        row = db.execute(self._q.leased_work, {"work_id": work_id}).fetchone()
        work_id, fence, run, lane, task_id, sample, attempt, version, cancelled, digest, request = row
        lease = Lease(work_id, fence, run, task_id, sample, attempt, digest.hex(), Raw(request.encode()))
        return lease, Tracked(lease.held, Lane(run, lane), task_id, node, version, cancelled, request)

    async def leases(self) -> list[Tracked]:
        """All there are: read when a server starts, when a node joins, and in doubt."""

        def read(db: Connection) -> list[Tracked]:
            found: list[Tracked] = []
            while True:
                after = found[-1].held.work_id if found else 0
                rows = db.execute(self._q.leases, {"after": after, "limit": 1000}).fetchall()
                if not rows:
                    return found
                for work_id, fence, run, lane, task_id, node, version, cancelled, request in rows:
                    held = Held(work_id, fence)
                    found.append(Tracked(held, Lane(run, lane), task_id, node, version, cancelled, request))

        return await self._transact(read)

    async def finish(self, ended: Sequence[Ended], attempts: int) -> list[Outcome]:
        """Only the last lease of some work can end it; told again, that is answered the same."""

        def finish(db: WritingConnection) -> list[Outcome]:
            changes = self._try_again(db, ended, attempts)
            ending = [one for one in ended if one.held not in changes]
            for one, change in zip(ending, self._end(db, [(one, "leased") for one in ending]), strict=True):
                if change is not None:
                    changes[one.held] = change
            return [
                Outcome("taken", changes[one.held]) if one.held in changes else Outcome(self._answer_again(db, one))
                for one in ended
            ]

        return await self._transact(finish)

    def _try_again(self, db: WritingConnection, ended: Sequence[Ended], attempts: int) -> dict[Held, Change]:
        """Those that are the platform's fault, and may be tried again."""
        back = [one for one in ended if one.reason == INTERRUPTED]
        again = [one for one in ended if one.reason in PLATFORM]
        handed = self._all(db, self._q.hand_back, [{**_lease(one.held), "killed": 0} for one in back])
        tried = self._all(db, self._q.try_again, [{**_lease(one.held), "attempts": attempts} for one in again])
        changes = [
            *(_change(rows, "leased", "queued", one) for one, rows in zip(back, handed, strict=True)),
            *(_change(rows, "leased", "waiting", one) for one, rows in zip(again, tried, strict=True)),
        ]
        return {change.ended.held: change for change in changes if change is not None}

    def _end(self, db: WritingConnection, ending: Sequence[tuple[Ended, WorkState]]) -> list[Change | None]:
        """None where something isn't in that state, of that fence, any more."""
        if not ending:
            return []
        # Two each: for its own end, and for its task's. What is not used is left out.
        first = _one(db, self._q.take, name="cursor", count=2 * len(ending)) - 2 * len(ending) + 1
        cursors = range(first, first + 2 * len(ending), 2)
        parameters = [_end_parameters(*one, cursor) for one, cursor in zip(ending, cursors, strict=True)]
        changes = [
            _change(rows, state, "done", ended, cursor)
            for rows, (ended, state), cursor in zip(
                self._all(db, self._q.finish, parameters), ending, cursors, strict=True
            )
        ]
        done = [change for change in changes if change is not None]
        counted = [_count_parameters(change) for change in done]
        for change, [row] in zip(done, self._all(db, self._q.count_end, counted), strict=True):
            state, cursor, usable, enough, cancelled, callback = row
            if cursor is not None:
                change.task = EndedTask(change.lane.run, change.task_id, state, cursor, callback is not None)
            elif enough is not None and usable >= enough and cancelled is None:
                change.enough = True
        stopped = {(change.lane.run, change.task_id): change for change in reversed(done) if change.enough}
        for (run, task_id), change in stopped.items():
            change.others = self._cancel(db, run, task_id, "early_stop")
        return changes

    def _answer_again(self, db: Connection, ended: Ended) -> Answer:
        """To one who says it again, or too late. Work of that fence that is neither leased nor done was given back, by
        its node or because that was lost: an end that gives it back was heard, another one never will be."""
        row = db.execute(self._q.work, {"work_id": ended.work_id}).fetchone()
        if row is None:
            return "lost"
        work = WorkRow(*row)
        if work.state == "done":
            heard = work.session_id == ended.session_id
        else:
            heard = work.state != "leased" and (ended.reason == INTERRUPTED or ended.reason in PLATFORM)
        return "taken" if heard and work.fence == ended.fence else "lost"

    async def lose(self, node: str, *, died: bool) -> list[Change]:
        """All that a node had, which is no more: others may have it. What seems to have killed it is set aside."""

        def lose(db: WritingConnection) -> list[Change]:
            has = self._has(db, node)
            marked = [held for held, kills in has.items() if kills]
            convicted = marked if died and len(marked) == 1 and has[marked[0]] >= SUSPECT else []
            ended = {
                held: Ended(held.work_id, held.fence, None, reason="node_lost", node_id=node)
                for held in sorted(has, key=_work_id)
            }
            back = [one for held, one in ended.items() if held not in convicted]
            handed = self._all(db, self._q.hand_back, [{**_lease(one.held), "killed": int(died)} for one in back])
            changes = {one.held: _change(rows, "leased", "queued", one) for one, rows in zip(back, handed, strict=True)}
            ending = [one for held, one in ended.items() if changes.get(held) is None]
            for one in ending:  # else it was cancelled, and so nobody tries again
                one.reason, one.error = ("node_killer", _KILLER) if one.held in convicted else ("cancelled", None)
            told = self._end(db, [(one, "leased") for one in ending])
            return [change for change in (*changes.values(), *told) if change is not None]

        return await self._transact(lose)

    async def go_on(self, work_ids: Iterable[int]) -> list[Lane]:
        """Work that waited for another try; in which lanes some is queued now."""

        def go_on(db: WritingConnection) -> list[Lane]:
            found = []
            for work_id in work_ids:
                found += [Lane(*row) for row in db.execute(self._q.go_on, {"work_id": work_id}).fetchall()]
            return found

        return await self._transact(go_on)

    # What there is

    async def waiting(self) -> list[int]:
        return await self._transact(lambda db: [row[0] for row in db.execute(self._q.waiting).fetchall()])

    async def counts(self) -> dict[Lane, Counts]:
        """In the order of transactions, so that changes can be counted from here on."""

        def count(db: Connection) -> dict[Lane, Counts]:
            found: dict[Lane, Counts] = {}
            for state, run, lane, number in db.execute(self._q.counts).fetchall():
                setattr(found.setdefault(Lane(run, lane), Counts()), state, number)
            return found

        return await self._transact(count)

    async def totals(self) -> dict[str, Totals]:
        def read(db: Connection) -> dict[str, Totals]:
            rows = db.execute(self._q.totals).fetchall()
            return {run: Totals(int(tasks), int(ended), int(usable)) for run, tasks, ended, usable in rows}

        return await self._transact(read)

    async def task(self, run: str, task_id: str) -> TaskRow | None:
        row = await self._db.query(lambda db: db.execute(self._q.task, {"run": run, "task_id": task_id}).fetchone())
        return None if row is None else TaskRow(*row)

    async def work_of(self, run: str, task_id: str) -> list[WorkRow]:
        return await self._rows(WorkRow, self._q.work_of, run=run, task_id=task_id)

    async def work_after(self, run: str, after: int, limit: int) -> list[WorkRow]:
        return await self._rows(WorkRow, self._q.work_after, run=run, after=after, limit=limit)

    async def tasks_after(self, run: str, after: int, limit: int) -> list[TaskRow]:
        return await self._rows(TaskRow, self._q.tasks_after, run=run, after=after, limit=limit)

    async def tasks_to_tell(self, after: int, limit: int) -> list[TaskRow]:
        return await self._rows(TaskRow, self._q.tasks_to_tell, after=after, limit=limit)

    async def usable_after(self, run: str, after: int) -> int:
        """In the order of transactions, like `counts`."""
        return await self._transact(lambda db: _one(db, self._q.usable_after, run=run, after=after))

    async def _rows(self, kind: Callable[..., T], query: str, **parameters: object) -> list[T]:
        return await self._db.query(lambda db: [kind(*row) for row in db.execute(query, parameters).fetchall()])

    # Runs, consumers, facts

    async def runs(self) -> dict[str, str]:
        return dict(await self._db.query(lambda db: db.execute(self._q.runs).fetchall()))

    async def keep_run(self, run: str, settings: str) -> None:
        await self._transact(lambda db: db.execute(self._q.keep_run, {"run": run, "settings": settings}) and None)

    async def consumers(self) -> dict[tuple[str, str], int]:
        rows = await self._db.query(lambda db: db.execute(self._q.consumers).fetchall())
        return {(run, consumer): cursor for run, consumer, cursor in rows}

    async def keep_consumer(self, run: str, consumer: str, cursor: int) -> None:
        parameters = {"run": run, "consumer": consumer, "cursor": cursor}
        await self._transact(lambda db: db.execute(self._q.keep_consumer, parameters) and None)

    async def cursor(self) -> int:
        """The last one given out."""
        return await self._transact(lambda db: _one(db, self._q.counter, name="cursor"))

    async def fact(self, name: str) -> str | None:
        row = await self._db.query(lambda db: db.execute(self._q.fact, {"name": name}).fetchone())
        return None if row is None else str(row[0])

    async def keep_fact(self, name: str, value: str) -> None:
        await self._transact(lambda db: db.execute(self._q.keep_fact, {"name": name, "value": value}) and None)

    async def forget(self, cursor: int, limit: int) -> int:
        """Drops so many tasks that ended up to there, with their sessions: how many there were."""

        def forget(db: WritingConnection) -> int:
            tasks = db.execute(self._q.ended_up_to, {"cursor": cursor, "limit": limit}).fetchall()
            for run, task_id in tasks:
                task = {"run": run, "task_id": task_id}
                for (session_id,) in db.execute(self._q.sessions_of, task).fetchall():
                    db.execute(self._q.drop_exchanges, {"session_id": session_id})
                    db.execute(self._q.drop_session, {"session_id": session_id})
                db.execute(self._q.drop_work, task)
                db.execute(self._q.drop_task, task)
            return len(tasks)

        return await self._transact(forget)


async def identity(database: Database) -> str:
    """Of a store: whoever has the same one shares it."""
    q = queries(database.style)

    def known(db: WritingConnection) -> str:
        row = db.execute(q.fact, {"name": "store_id"}).fetchone()
        if row is None:
            db.execute(q.first_fact, {"name": "store_id", "value": secrets.token_hex(16)})
            row = db.execute(q.fact, {"name": "store_id"}).fetchone()
        return str(row[0])

    return await database.transact(known)


def _rows(task: NewTask, first: int) -> list[dict[str, object]]:
    return [
        {
            "work_id": first + sample,
            "run": task.run,
            "task_id": task.task_id,
            "sample": sample,
            "lane": task.lane,
            "rank": -task.priority,
        }
        for sample in range(task.samples)
    ]


def _parameters(task: NewTask, now: float) -> dict[str, object]:
    return {
        "run": task.run,
        "task_id": task.task_id,
        "samples": task.samples,
        "enough": task.enough,
        "created_at": now,
        "callback": "waiting" if task.callback else None,
        "digest": task.digest,
        "request": task.request,
    }


def _row(task: NewTask, now: float) -> TaskRow:
    """As it is in the database when it has just come."""
    return TaskRow(
        run=task.run,
        task_id=task.task_id,
        state="running",
        cancelled=None,
        samples=task.samples,
        ended=0,
        usable=0,
        enough=task.enough,
        created_at=now,
        ended_at=None,
        cursor=None,
        callback="waiting" if task.callback else None,
        digest=task.digest,
        request=task.request,
    )


def _end_parameters(ended: Ended, state: WorkState, cursor: int) -> dict[str, object]:
    return {
        "work_id": ended.work_id,
        "fence": ended.fence,
        "state": state,
        "session_id": ended.session_id,
        "usable": int(ended.reason is None),
        "summary": msgspec.json.encode(ended).decode(),
        "cursor": cursor,
    }


def _leased(head: Head, allowance: Allowance, node: str) -> tuple[Lease, Tracked]:
    lane, fence = allowance.lane, head.fence + 1
    lease = Lease(
        work_id=head.work_id,
        fence=fence,
        run=lane.run,
        task_id=head.task_id,
        sample=head.sample,
        attempt=head.attempt,
        digest=head.digest.hex(),
        request=Raw(head.request.encode()),
    )
    return lease, Tracked(lease.held, lane, head.task_id, node, allowance.version, None, head.request)


def _change(
    rows: Sequence[Sequence[Any]], was: WorkState, became: WorkState, ended: Ended, cursor: int | None = None
) -> Change | None:
    """Of the row (run, task_id, sample, lane) that was changed, if one was."""
    for run, task_id, sample, lane in rows:
        return Change(Lane(run, lane), task_id, sample, was, became, ended, cursor)
    return None


def _count_parameters(change: Change) -> dict[str, object]:
    assert change.cursor is not None
    return {
        "run": change.lane.run,
        "task_id": change.task_id,
        "usable": int(change.ended.reason is None),
        "now": time.time(),
        "cursor": change.cursor + 1,
    }


def _may_be_together(marked: Sequence[int], slots: int) -> bool:
    """Whether these may run at a node at the same time, under each of which so many nodes have died. Where one of them
    is a suspect, ever fewer, so that those who were only nearby are soon cleared."""
    most = max(marked)
    return most < SUSPECT or len(marked) <= max(1, slots >> 2 * (most - SUSPECT + 1))


def _lease(held: Held) -> dict[str, int]:
    return {"work_id": held.work_id, "fence": held.fence}


def _work_id(held: Held) -> int:
    return held.work_id


def _one(db: Connection, query: str, **parameters: object) -> int:
    value: int = db.execute(query, parameters).fetchone()[0]
    return value
