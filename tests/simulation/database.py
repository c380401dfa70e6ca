"""The database: the production schema and SQL on an SQLite in memory, and each server's connection to it.

Like the real one (store.group_commit), a connection has one writer, which takes whatever waits at once and answers in
the order of its commits. It can fail before a commit, and behind one: then the callers hear of a failure
although all was written, or the work is done once more on a new connection.
"""

import random
import sqlite3
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from polar.errors import StoreError
from polar.store.sql import load_schema
from tests.simulation.loop import Process, VirtualLoop


class _Database:
    """One for all schedules, which have it one after the other: so its statements are prepared once. All that a
    schedule does is one transaction, and its own transactions are savepoints in that."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=500)
        self.db.execute("PRAGMA foreign_keys = ON")
        for statement in load_schema():
            self.db.execute(statement)
        self.touched = False  # a task or some work
        self.db.create_function("touch", 0, self._touch)
        for table in ("tasks", "work"):
            for event in ("INSERT", "UPDATE", "DELETE"):
                name = f"{table}_{event}"
                self.db.execute(f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table} BEGIN SELECT touch(); END")

    def _touch(self) -> None:
        self.touched = True

    def empty(self) -> None:
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
        self.db.execute("BEGIN")


@cache
def _database() -> _Database:
    return _Database()


class Disk:
    """What survives every process."""

    def __init__(self, committed: Callable[[sqlite3.Connection], None]) -> None:
        """`committed` is called after each transaction that has changed tasks or work."""
        self._database = _database()
        self._database.empty()
        self.db = self._database.db
        self.copies: set[str] = set()  # of sessions, from nodes with stores of their own
        self.disowned: dict[str, str] = {}  # sessions, and why
        self._committed = committed

    def run(self, jobs: list["Job"]) -> None:
        """One after the other, so that each can be looked at."""
        for job in jobs:
            self.db.execute("SAVEPOINT job")
            self._database.touched = False
            try:
                job.answer, job.error = job.work(self.db), None
            except StoreError as error:
                self.db.execute("ROLLBACK TO job")
                job.error = error
                continue
            finally:
                self.db.execute("RELEASE job")
            if self._database.touched:
                self._committed(self.db)


class Job:
    def __init__(self, work: Callable[[Any], Any], future: Any) -> None:
        self.work = work
        self.future = future
        self.answer: Any = None
        self.error: StoreError | None = None

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.answer)


class Troubles:
    """How often what goes wrong, for now."""

    def __init__(self) -> None:
        self.fails = self.fails_behind = self.runs_twice = 0.0
        self.slow = 1.0


class Store:
    """A server's store (rollout.rollout.RolloutStore), as far as the rollout service uses it."""

    parameter_style = "named"

    def __init__(self, disk: Disk, loop: VirtualLoop, process: Process, troubles: Troubles, rng: random.Random) -> None:
        self._disk = disk
        self._loop = loop
        self._process = process
        self._troubles = troubles
        self._rng = rng
        self._waiting: list[Job] = []
        self._writing = False
        self._answered = 0.0  # when the last answer comes

    def _delay(self) -> float:
        return self._rng.expovariate(1 / (0.003 * self._troubles.slow))

    async def transact(self, work: Callable[[Any], Any]) -> Any:
        job = Job(work, self._loop.create_future())
        self._waiting.append(job)
        if not self._writing:
            self._write()
        return await job.future

    def _write(self) -> None:
        self._writing = bool(self._waiting)
        if self._writing:
            self._loop.later(self._delay(), self._commit)

    def _commit(self) -> None:
        if self._process.frozen:  # its writer, too
            self._loop.later(0.1, self._commit)
            return
        if self._process.dead and self._rng.random() < 0.5:
            return  # else the database had heard already
        batch, self._waiting = self._waiting, []
        fate = self._rng.random()
        troubles = self._troubles
        if fate < troubles.fails:
            for job in batch:
                job.error = StoreError("The disk is full: make room.")
        else:
            self._disk.run(batch)
            fate -= troubles.fails
            if fate < troubles.runs_twice:
                self._disk.run(batch)
            elif fate < troubles.runs_twice + troubles.fails_behind:
                for job in batch:
                    job.error = job.error or StoreError("The server went away in the middle of a commit.")
        self._answered = max(self._answered + 1e-6, self._loop.time() + self._delay())
        for job in batch:
            self._answered += 1e-9
            self._loop.call_at(self._answered, job.settle, context=self._loop.nobody)
        self._write()

    async def query(self, work: Callable[[Any], Any]) -> Any:
        job = Job(work, self._loop.create_future())
        self._loop.later(self._delay(), self._read, job)
        return await job.future

    def _read(self, job: Job) -> None:
        if self._rng.random() < self._troubles.fails:
            job.error = StoreError("The server is away.")
        else:
            job.answer = job.work(self._disk.db)
        self._loop.later(self._delay(), job.settle)

    async def set_policy_versions(self, versions: Mapping[str, int]) -> None:
        rows = [{"replica": url, "version": version} for url, version in versions.items()]
        statement = (
            "INSERT INTO policies (replica, version) VALUES (:replica, :version) "
            "ON CONFLICT (replica) DO UPDATE SET version = excluded.version"
        )
        await self.transact(lambda db: db.executemany(statement, rows) and None)

    async def read_policy_versions(self) -> dict[str, int]:
        return dict(await self.query(lambda db: db.execute("SELECT replica, version FROM policies").fetchall()))

    async def import_session(self, data: bytes) -> str:
        session_id = data.decode()
        await self.transact(lambda _: self._disk.copies.add(session_id))
        return session_id

    async def revoke_session_reward(self, session_id: str, reason: str) -> None:
        await self.transact(lambda _: self._disk.disowned.setdefault(session_id, reason) and None)
