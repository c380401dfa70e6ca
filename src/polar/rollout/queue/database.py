"""The database of a queue, for the one server that may write to it.

Each start of a server takes the next epoch. Every transaction locks the row of the epoch and checks that it is still
this server's, so that an older server that wakes up can't write.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from polar.errors import StoreError
from polar.store.sql import Connection, ParameterStyle, WritingConnection, parse_queries, read_sql

T = TypeVar("T")


@dataclass(frozen=True)
class QueueSql:
    """The statements of queue.sql, by name."""

    fact: str
    save_fact: str
    counter: str
    lock_counter: str
    advance_counter: str
    runs: str
    save_run: str
    insert_task: str
    insert_work: str
    task: str
    tasks_after: str
    tasks_awaiting_callback: str
    redirect_callback: str
    recent_tasks: str
    set_callback_state: str
    task_work: str
    work_after: str
    lease_candidates: str
    lease: str
    node_leases: str
    leased_work: str
    leases: str
    finish: str
    work: str
    count_end: str
    retry: str
    release: str
    suspect_work: str
    add_exposure: str
    add_control: str
    add_control_death: str
    suspect_record: str
    retract_kill: str
    requeue: str
    waiting_work: str
    cancel_task: str
    counts: str
    totals: str
    usable_after: str
    usable_in_tasks_after: str
    consumers: str
    save_consumer: str
    tasks_ended_up_to: str
    task_sessions: str
    keep_replaced: str
    replaced_up_to: str
    drop_replaced: str
    drop_exchanges: str
    drop_session: str
    drop_work: str
    drop_task: str


@cache
def load_queue_sql(style: ParameterStyle) -> QueueSql:
    return parse_queries(QueueSql, read_sql(__package__, "queue.sql"), style)


class TransactionalStore(Protocol):
    """What the queue needs of a store."""

    @property
    def parameter_style(self) -> ParameterStyle: ...

    async def transact(self, work: Callable[[WritingConnection], T]) -> T: ...

    async def query(self, work: Callable[[Connection], T]) -> T: ...


class Superseded(StoreError):
    """Another server has been started on this database."""


class QueueDatabase:
    """Runs transactions, and counts uncertain commits: if a connection was lost, a change may have been made without an
    answer. After such a commit, counts in memory must be recomputed (`reconcile`)."""

    def __init__(self, store: TransactionalStore, epoch: int) -> None:
        self.sql = load_queue_sql(store.parameter_style)
        self.epoch = epoch
        self.uncertain_commits = 0
        self._reconciled_commits = 0
        self._store = store

    @classmethod
    async def open(cls, store: TransactionalStore) -> "QueueDatabase":
        """Takes the next epoch: from here on, no earlier server can write."""
        sql = load_queue_sql(store.parameter_style)

        def advance_epoch(db: WritingConnection) -> int:
            return fetch_number(db, sql.advance_counter, name="epoch", count=1)

        return cls(store, await store.transact(advance_epoch))

    @property
    def is_uncertain(self) -> bool:
        return self.uncertain_commits > self._reconciled_commits

    def reconcile(self, commits: int) -> None:
        """Records that memory was recomputed after so many uncertain commits."""
        self._reconciled_commits = max(commits, self._reconciled_commits)

    async def query(self, work: Callable[[Connection], T]) -> T:
        """Reads outside of the transactions."""
        return await self._store.query(work)

    async def transact(self, work: Callable[[WritingConnection], T]) -> T:
        runs = 0

        def check_epoch_and_run(db: WritingConnection) -> T:
            nonlocal runs
            runs += 1
            if fetch_number(db, self.sql.lock_counter, name="epoch") != self.epoch:
                raise Superseded("Another server has been started on this database: this one stops.")
            return work(db)

        try:
            return await self._store.transact(check_epoch_and_run)
        except BaseException:  # the commit may have been made
            self.uncertain_commits += 1
            raise
        finally:
            self.uncertain_commits += runs > 1  # the first run may have been committed

    async def check_epoch(self) -> None:
        """Raises Superseded where another server has been started since."""
        await self.transact(lambda _: None)

    def execute_each(
        self, db: Connection, query: str, parameters: Sequence[Mapping[str, object]]
    ) -> list[Sequence[Any]]:
        """The rows of each statement. PostgreSQL gets all statements before the first answer is awaited; SQLite is
        faster one by one."""
        if self._store.parameter_style == "named":
            return [db.execute(query, values).fetchall() for values in parameters]
        return [cursor.fetchall() for cursor in [db.execute(query, values) for values in parameters]]

    async def fetch_rows(self, make_row: Callable[..., T], query: str, **parameters: object) -> list[T]:
        return await self.query(lambda db: [make_row(*row) for row in db.execute(query, parameters).fetchall()])

    async def write(self, query: str, **parameters: object) -> None:
        def write(db: WritingConnection) -> None:
            db.execute(query, parameters)

        await self.transact(write)


def fetch_number(db: Connection, query: str, **parameters: object) -> int:
    value: int = db.execute(query, parameters).fetchone()[0]
    return value
