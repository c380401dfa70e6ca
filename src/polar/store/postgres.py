"""The store that several machines share: a PostgreSQL server.

A write is confirmed after its COMMIT, with `synchronous_commit` on: it survives the end of this process, and of the
server. Where the connection is lost, the transaction is made again on a new one. If it was lost during the COMMIT
itself, that may have happened or not: the recorder looks, so that nothing is written twice. A server that stays away
for too long is an error to the callers, whose last writes may then be there or not.
"""

from contextlib import ExitStack, closing, suppress

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from polar.errors import StoreError
from polar.store.postgres_link import Address, Link, Pool, explain, went_on
from polar.store.reading import Reader
from polar.store.recorder import Recorder
from polar.store.relational import MEMORY, RelationalStore
from polar.store.schema import Words, settle_schema
from polar.store.sql import Queries, queries

READING_THREADS = 4
PATIENCE_S = 30.0
"""How long callers wait for a server that has gone away."""

_CANNOT_WRITE = ("08", "53", "55", "57", "58")
"""Classes of SQLSTATE: connection, resources, locks, intervention, system."""

WORDS = Words(
    begin_alone=("BEGIN", "SELECT pg_advisory_xact_lock(7102853467290175)"),  # any number, but the same for all
    tables="SELECT table_name FROM information_schema.tables "
    "WHERE table_schema = current_schema() AND table_type = 'BASE TABLE'",
    elsewhere="another database",
)


class PostgresStore(RelationalStore):
    @classmethod
    def open(cls, url: str, *, patience_s: float = PATIENCE_S, memory: int = MEMORY) -> "PostgresStore":
        """Opens the database, whose tables are made where it is empty."""
        address = Address.parse(url)
        named = queries("pyformat")
        try:
            with closing(Link(address, patience_s=0)) as link:
                link.connect()
                settle_schema(link, named, WORDS, address.name)
        except psycopg.Error as error:
            raise explain(error, address) from error
        writer = _Writer(address, named, patience_s=patience_s, memory=memory)
        return cls(writer, _Readers(address, named, patience_s), address.name, "pyformat")


class _Writer:
    """PostgreSQL's side of group commit. Statements go out in a pipeline, so that a transaction of many takes two
    round trips: one that shows whether all of them worked, and the COMMIT."""

    def __init__(self, address: Address, named: Queries, *, patience_s: float, memory: int) -> None:
        self._address = address
        self.connection = Link(address, patience_s=patience_s, transactions=True)
        self.recorder = Recorder(self.connection, named, memory=memory)
        self._pipeline: psycopg.Pipeline | None = None  # for as long as all goes well
        self._ending = ExitStack()  # of the pipeline

    def begin(self) -> None:
        if self.connection.lost:
            self._leave_pipeline()
            self.connection.connect()
        if self._pipeline is None:
            self._pipeline = self._ending.enter_context(self.connection.driver.pipeline())

    def commit(self) -> None:
        assert self._pipeline is not None
        self.recorder.finish()
        self._pipeline.sync()  # raises what any statement did; and from here on the server's patience with us runs
        if self.connection.driver.info.transaction_status == TransactionStatus.INERROR:  # a COMMIT would undo it all
            raise went_on()
        self.connection.driver.commit()
        self.recorder.committed()

    def undo(self, error: Exception) -> bool:
        lost = self.connection.lost_by(error)
        self._leave_pipeline()
        lost = lost or not self._rolled_back()
        again = lost or isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure))
        if self.recorder.again and isinstance(error, errors.UniqueViolation):
            again = True  # the lost transaction has just been committed: now it can be seen
        self.recorder.rolled_back(perhaps=lost)
        return again

    def _leave_pipeline(self) -> None:
        self._pipeline = None
        with suppress(psycopg.Error):  # every statement behind one that failed tells of it once more
            self._ending.close()

    def _rolled_back(self) -> bool:
        try:
            self.connection.driver.rollback()
        except psycopg.Error:
            self.connection.close()  # the server rolls back
            return False
        return True

    def settled(self) -> None:
        self.recorder.settled()

    def explain(self, error: Exception) -> StoreError:
        return explain(error, self._address)

    def cannot_write(self, error: Exception) -> bool:
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return True
        if not isinstance(error, psycopg.OperationalError) or isinstance(error, errors.PipelineAborted):
            return False
        return error.sqlstate is None or error.sqlstate.startswith(_CANNOT_WRITE)

    def probe(self) -> None:
        self.recorder.write_probe()

    def close(self) -> None:
        self._leave_pipeline()
        self.connection.close()


class _Readers:
    """A few threads, each on its own connection."""

    threads = READING_THREADS
    failure: type[Exception] = psycopg.Error

    def __init__(self, address: Address, named: Queries, patience_s: float) -> None:
        self._address = address
        self.connection = Pool(address, patience_s)
        self.reader = Reader(self.connection, named)

    def explain(self, error: Exception) -> StoreError:
        return explain(error, self._address)

    def close(self) -> None:
        self.connection.close()
