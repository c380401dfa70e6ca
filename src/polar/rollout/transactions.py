"""Transactions of the one server that writes to a queue."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from polar.errors import StoreError
from polar.rollout.queue_sql import Queries, queries
from polar.store.sql import Connection, ParameterStyle, WritingConnection

T = TypeVar("T")


class QueueDatabase(Protocol):
    """What the queue needs of a store."""

    @property
    def parameter_style(self) -> ParameterStyle: ...

    async def transact(self, work: Callable[[WritingConnection], T]) -> T: ...

    async def query(self, work: Callable[[Connection], T]) -> T: ...


class Superseded(StoreError):
    """Another server has been started on this database."""


class QueueTransactions:
    def __init__(self, database: QueueDatabase, epoch: int) -> None:
        self.db = database
        self.q: Queries = queries(database.parameter_style)
        self.epoch = epoch
        self.uncertain_commits = 0  # times that something may have changed that nobody was told of
        self.reconciled_commits = 0  # so many of them; as long as there are more, what is counted is to be counted anew

    @classmethod
    async def open(cls, database: QueueDatabase) -> Self:
        """From here on this one writes, and no earlier one."""
        q = queries(database.parameter_style)

        def take(db: WritingConnection) -> int:
            return fetch_number(db, q.advance_counter, name="epoch", count=1)

        return cls(database, await database.transact(take))

    @property
    def is_uncertain(self) -> bool:
        return self.uncertain_commits > self.reconciled_commits

    async def transact(self, work: Callable[[WritingConnection], T]) -> T:
        runs = 0

        def guarded(db: WritingConnection) -> T:
            nonlocal runs
            runs += 1
            if fetch_number(db, self.q.lock_counter, name="epoch") != self.epoch:
                raise Superseded("Another server has been started on this database: this one stops.")
            return work(db)

        try:
            return await self.db.transact(guarded)
        except BaseException:  # and yet it may be written
            self.uncertain_commits += 1
            raise
        finally:
            self.uncertain_commits += runs > 1  # the first may have been written, and the last found nothing to do

    async def check_epoch(self) -> None:
        """Raises Superseded where another server has been started since."""
        await self.transact(lambda _: None)

    def execute_each(
        self, db: Connection, query: str, parameters: Sequence[Mapping[str, object]]
    ) -> list[Sequence[Any]]:
        """The rows of each. PostgreSQL gets all statements before the first answer is waited for; SQLite is better off
        with one after the other."""
        if self.db.parameter_style == "named":
            return [db.execute(query, one).fetchall() for one in parameters]
        return [cursor.fetchall() for cursor in [db.execute(query, one) for one in parameters]]

    async def fetch_rows(self, make_row: Callable[..., T], query: str, **parameters: object) -> list[T]:
        return await self.db.query(lambda db: [make_row(*row) for row in db.execute(query, parameters).fetchall()])

    async def write(self, query: str, **parameters: object) -> None:
        def write(db: WritingConnection) -> None:
            db.execute(query, parameters)

        await self.transact(write)


def fetch_number(db: Connection, query: str, **parameters: object) -> int:
    value: int = db.execute(query, parameters).fetchone()[0]
    return value
