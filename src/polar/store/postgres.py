"""The store that several machines share: a PostgreSQL server.

A write is confirmed after its COMMIT, with `synchronous_commit` on: it survives the end of this process, and of the
server. Where the connection is lost, the transaction is made again on a new one. If it was lost during the COMMIT
itself, that may have happened or not: the recorder looks, so that nothing is written twice. A server that stays away
for too long is an error to the callers, whose last writes may then be there or not.
"""

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from threading import Lock, local
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from polar.errors import StoreError
from polar.store.reader import Reader
from polar.store.recorder import Recorder
from polar.store.relational import LINEAGE_MEMORY_BYTES, RelationalStore
from polar.store.schema import SchemaSql, ensure_schema
from polar.store.sql import Cursor, Queries, load_queries

TRIES = 5

_CONNECTION_DEFAULTS = {
    "application_name": "polar",
    "connect_timeout": 10,
    "keepalives_idle": 10,  # a host that is gone is noticed within half a minute
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

IDLE_TRANSACTION_SECONDS = 10.0
"""A process that stands still in the middle of a transaction loses it, so that it holds nobody else up for longer."""
LOCK_TIMEOUT_SECONDS = 30.0
FORMER_TRANSACTION_SECONDS = 10.0
"""For a lost connection's transaction to end."""

_SELECT_BACKEND = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_TERMINATE_BACKEND = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"


class PostgresAddress(Struct, frozen=True):
    """The address of a database."""

    parameters: dict[str, Any]
    name: str  # without the password

    @classmethod
    def parse(cls, url: str) -> "PostgresAddress":
        try:
            parameters = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise StoreError(
                "The store's URL can't be read; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
                "with special characters as %XX."
            ) from None  # what the driver says may hold the password
        user = f"{parameters['user']}@" if "user" in parameters else ""
        port = f":{parameters['port']}" if "port" in parameters else ""
        name = f"postgresql://{user}{parameters.get('host', '')}{port}/{parameters.get('dbname', '')}"
        return cls(_CONNECTION_DEFAULTS | dict(parameters), name)


class PostgresConnection:
    """One connection, for one thread at a time, that can be made again after a restart of the server.

    With `is_transactional` it is for writing; else each statement is by itself.
    """

    def __init__(self, address: PostgresAddress, *, max_outage_seconds: float, is_transactional: bool = False) -> None:
        self._address = address
        self._max_outage_seconds = max_outage_seconds
        self._is_transactional = is_transactional
        self._connection: psycopg.Connection[Any] | None = None
        self._down_since: float | None = None
        self._backend: tuple[Any, ...] | None = None  # the server's process for it, where there are transactions

    @property
    def is_lost(self) -> bool:
        return self._connection is None or self._connection.closed

    def close_if_lost(self, error: Exception) -> bool:
        """Closes the connection if the error has ended it (the driver may notice that only at the next statement), and
        returns whether it is lost."""
        if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.PipelineAborted):
            ends = error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))
        else:
            ends = isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout)
        if ends:
            self.close()
        return self.is_lost

    @property
    def driver(self) -> "psycopg.Connection[Any]":
        assert self._connection is not None
        return self._connection

    def connect(self) -> None:
        """Connects. Tries again until the server has been away for `max_outage_seconds`; from then on it tries once, so
        that callers get the error at once."""
        self.close()
        wait_s = 0.02
        while True:
            try:
                self._connection = self._connect()
            except psycopg.OperationalError:
                now = time.monotonic()
                if self._down_since is None:
                    self._down_since = now
                if now + wait_s - self._down_since > self._max_outage_seconds:
                    raise
            else:
                self._down_since = None
                return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1)

    def _connect(self) -> "psycopg.Connection[Any]":
        connection = psycopg.connect(**self._address.parameters, autocommit=True)
        try:
            _configure_session(connection)
            if self._is_transactional:
                self._end_former_transaction(connection)
                self._backend = connection.execute(_SELECT_BACKEND).fetchone()
            connection.autocommit = not self._is_transactional
        except BaseException:
            connection.close()
            raise
        return connection

    def _end_former_transaction(self, connection: "psycopg.Connection[Any]") -> None:
        """Terminates the transaction of the lost connection, which may still run and hold its locks, and waits for its
        end. Only then may its work be done again."""
        deadline = time.monotonic() + FORMER_TRANSACTION_SECONDS
        while (
            self._backend is not None and connection.execute(_TERMINATE_BACKEND, self._backend).fetchone() is not None
        ):
            if time.monotonic() > deadline:
                raise psycopg.OperationalError("the transaction of a lost connection does not end")
            time.sleep(0.005)

    def execute(self, query: str, parameters: Mapping[str, Any] = {}, /) -> Cursor:
        return self.driver.cursor(binary=True).execute(query.encode(), parameters)

    def executemany(self, query: str, parameters: Iterable[Mapping[str, Any]], /) -> None:
        self.driver.cursor().executemany(query.encode(), parameters)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _configure_session(connection: "psycopg.Connection[Any]") -> None:
    if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):  # stricter settings stay
        connection.execute("SET synchronous_commit = on")
    for name, seconds in (
        ("idle_in_transaction_session_timeout", IDLE_TRANSACTION_SECONDS),
        ("lock_timeout", LOCK_TIMEOUT_SECONDS),
    ):
        connection.execute("SELECT set_config(%s, %s, false)", (name, f"{seconds * 1000:.0f}ms"))


class PostgresConnectionPool:
    """A connection for each thread that reads. A statement whose connection is lost is repeated on a new one."""

    def __init__(self, address: PostgresAddress, max_outage_seconds: float) -> None:
        self._address = address
        self._max_outage_seconds = max_outage_seconds
        self._thread_local = local()
        self._connections: list[PostgresConnection] = []
        self._lock = Lock()

    def execute(self, query: str, parameters: Mapping[str, Any] = {}, /) -> Cursor:
        link = self._get_connection()
        for remaining_tries in reversed(range(TRIES)):
            if link.is_lost:
                link.connect()
            try:
                return link.execute(query, parameters)
            except psycopg.Error as error:
                if not link.close_if_lost(error) or not remaining_tries:
                    raise
        raise AssertionError  # the last try returns or raises

    def _get_connection(self) -> PostgresConnection:
        link: PostgresConnection | None = getattr(self._thread_local, "link", None)
        if link is None:
            link = self._thread_local.link = PostgresConnection(
                self._address, max_outage_seconds=self._max_outage_seconds
            )
            with self._lock:
                self._connections.append(link)
        return link

    def close(self) -> None:
        """Once no thread reads any more."""
        for link in self._connections:
            link.close()


_ADVICE: dict[str, str] = {
    "23503": "a record names a session that is not there; create the session first",
    "23505": "a record of this id, key or seq is there already; they are used once",
    "25006": "the server is read-only; name the primary server, not a standby",
    "42501": "its user may not do this; grant the right to create and write tables",
    "53100": "the server's disk is full; free some space",
    "53200": "the server is out of memory; give it more",
    "53300": "the server has no connection left; raise its max_connections",
    "54000": "a record is too large; a column may have 1 GB",
    "55P03": "another process has held it locked for too long; stop that process, or try again",
}

_CONNECTION_ADVICE = (
    (r"password authentication failed|no password supplied|role .* does not exist", "the user or password is wrong"),
    (r"database .* does not exist", "there is no such database; make it (createdb), or name another"),
    (r"pg_hba\.conf", "the server lets nobody in from here; allow it in its pg_hba.conf"),
    (r"resolve host|translate host name", "there is no such host; correct the URL"),
    (r"refused|No such file", "no server listens there; start it, or correct host and port"),
    (r"timeout|timed out", "the server does not answer; check the host, the port and the firewall"),
    (r"too many clients|connection slots", "the server has no connection left; raise its max_connections"),
    (r"starting up|shutting down|recovery mode", "the server is just starting or stopping; try again in a moment"),
)


def make_ignored_failure_error() -> StoreError:
    return StoreError("A transaction went on after one of its statements had failed; let such errors pass.")


def to_store_error(error: Exception, address: PostgresAddress) -> StoreError:
    """Converts an error to one that says what happened and what to do."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, psycopg.errors.PipelineAborted):
        return make_ignored_failure_error()
    first_line = str(error).strip().partition("\n")[0]
    if not isinstance(error, psycopg.Error):
        return StoreError(f"{address.name}: a record is not what its type promises; correct the caller ({error!r}).")
    advice = _ADVICE.get(error.sqlstate or "")
    if advice is None and isinstance(error, psycopg.OperationalError):
        matching = (advice for pattern, advice in _CONNECTION_ADVICE if re.search(pattern, str(error)))
        advice = next(matching, "the server can't be reached; check that it runs, and the URL")
    if advice is None and "NUL" in first_line:
        advice = "PostgreSQL keeps no NUL characters in a text; correct the caller"
    return StoreError(f"{address.name}: {advice or 'PostgreSQL failed; see its log'} ({first_line}).")


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


def open_postgres_store(
    url: str, *, max_outage_seconds: float = MAX_OUTAGE_SECONDS, max_lineage_bytes: int = LINEAGE_MEMORY_BYTES
) -> RelationalStore:
    """Opens the database, and creates the tables if it is empty."""
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
    return RelationalStore(writer, _PostgresReaders(address, sql_queries, max_outage_seconds), address.name, "pyformat")


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
            raise make_ignored_failure_error()
        self.connection.driver.commit()
        self.recorder.on_commit()

    def roll_back(self, error: Exception) -> bool:
        lost = self.connection.close_if_lost(error)
        self._leave_pipeline()
        lost = lost or not self._try_rollback()
        should_retry = lost or isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure))
        if self.recorder.may_be_written and isinstance(error, errors.UniqueViolation):
            should_retry = True  # the lost transaction has just been committed, and is visible now
        self.recorder.on_rollback(outcome_unknown=lost)
        return should_retry

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
