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
from polar.store.postgres_connection import (
    PostgresAddress,
    PostgresConnection,
    PostgresConnectionPool,
    ignored_failure_error,
    to_store_error,
)
from polar.store.reader import Reader
from polar.store.recorder import Recorder
from polar.store.relational import LINEAGE_MEMORY_BYTES, RelationalStore
from polar.store.schema import SchemaSql, ensure_schema
from polar.store.sql import Queries, load_queries

READING_THREADS = 4
MAX_OUTAGE_SECONDS = 30.0
"""How long callers wait for a server that has gone away."""

_WRITE_FAILURE_CLASSES = ("08", "53", "55", "57", "58")
"""Classes of SQLSTATE: connection, resources, locks, intervention, system."""

SCHEMA_SQL = SchemaSql(
    begin_exclusive=("BEGIN", "SELECT pg_advisory_xact_lock(7102853467290175)"),  # any number, but the same for all
    select_tables="SELECT table_name FROM information_schema.tables "
    "WHERE table_schema = current_schema() AND table_type = 'BASE TABLE'",
    alternative="another database",
)


class PostgresStore(RelationalStore):
    @classmethod
    def open(
        cls, url: str, *, max_outage_seconds: float = MAX_OUTAGE_SECONDS, max_lineage_bytes: int = LINEAGE_MEMORY_BYTES
    ) -> "PostgresStore":
        """Opens the database, whose tables are made where it is empty."""
        address = PostgresAddress.parse(url)
        sql_queries = load_queries("pyformat")
        try:
            with closing(PostgresConnection(address, max_outage_seconds=0)) as link:
                link.connect()
                ensure_schema(link, sql_queries, SCHEMA_SQL, address.name)
        except psycopg.Error as error:
            raise to_store_error(error, address) from error
        writer = _PostgresWriter(
            address, sql_queries, max_outage_seconds=max_outage_seconds, max_lineage_bytes=max_lineage_bytes
        )
        return cls(writer, _PostgresReaders(address, sql_queries, max_outage_seconds), address.name, "pyformat")


class _PostgresWriter:
    """PostgreSQL's side of group commit. Statements go out in a pipeline, so that a transaction of many takes two
    round trips: one that shows whether all of them worked, and the COMMIT."""

    def __init__(
        self, address: PostgresAddress, sql_queries: Queries, *, max_outage_seconds: float, max_lineage_bytes: int
    ) -> None:
        self._address = address
        self.connection = PostgresConnection(address, max_outage_seconds=max_outage_seconds, is_transactional=True)
        self.recorder = Recorder(self.connection, sql_queries, max_lineage_bytes=max_lineage_bytes)
        self._pipeline: psycopg.Pipeline | None = None  # for as long as all goes well
        self._pipeline_stack = ExitStack()  # of the pipeline

    def begin(self) -> None:
        if self.connection.is_lost:
            self._leave_pipeline()
            self.connection.connect()
        if self._pipeline is None:
            self._pipeline = self._pipeline_stack.enter_context(self.connection.driver.pipeline())

    def commit(self) -> None:
        assert self._pipeline is not None
        self.recorder.flush_pieces()
        self._pipeline.sync()  # raises what any statement did; and from here on the server's patience with us runs
        if self.connection.driver.info.transaction_status == TransactionStatus.INERROR:  # a COMMIT would undo it all
            raise ignored_failure_error()
        self.connection.driver.commit()
        self.recorder.on_commit()

    def roll_back(self, error: Exception) -> bool:
        lost = self.connection.close_if_lost(error)
        self._leave_pipeline()
        lost = lost or not self._try_rollback()
        again = lost or isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure))
        if self.recorder.may_be_written and isinstance(error, errors.UniqueViolation):
            again = True  # the lost transaction has just been committed: now it can be seen
        self.recorder.on_rollback(outcome_unknown=lost)
        return again

    def _leave_pipeline(self) -> None:
        self._pipeline = None
        with suppress(psycopg.Error):  # every statement behind one that failed tells of it once more
            self._pipeline_stack.close()

    def _try_rollback(self) -> bool:
        try:
            self.connection.driver.rollback()
        except psycopg.Error:
            self.connection.close()  # the server rolls back
            return False
        return True

    def on_settled(self) -> None:
        self.recorder.on_settled()

    def to_store_error(self, error: Exception) -> StoreError:
        return to_store_error(error, self._address)

    def is_write_failure(self, error: Exception) -> bool:
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return True
        if not isinstance(error, psycopg.OperationalError) or isinstance(error, errors.PipelineAborted):
            return False
        return error.sqlstate is None or error.sqlstate.startswith(_WRITE_FAILURE_CLASSES)

    def probe(self) -> None:
        self.recorder.write_probe()

    def close(self) -> None:
        self._leave_pipeline()
        self.connection.close()


class _PostgresReaders:
    """A few threads, each on its own connection."""

    thread_count = READING_THREADS
    driver_error: type[Exception] = psycopg.Error

    def __init__(self, address: PostgresAddress, sql_queries: Queries, max_outage_seconds: float) -> None:
        self._address = address
        self.connection = PostgresConnectionPool(address, max_outage_seconds)
        self.reader = Reader(self.connection, sql_queries)

    def to_store_error(self, error: Exception) -> StoreError:
        return to_store_error(error, self._address)

    def close(self) -> None:
        self.connection.close()
