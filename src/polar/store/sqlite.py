"""The embedded store: one SQLite file in WAL mode.

One thread writes and another reads, each on a connection of its own. WAL lets both go on at once, and a commit that
reached the log survives the end of the process. `durability="power"` syncs the log at every commit, so that it survives
loss of power too. A third thread moves what is committed from the log to the database file, so that no commit waits
for the disk.
"""

import errno
import logging
import sqlite3
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from polar.errors import StoreError
from polar.folders import make_private_file
from polar.store.reader import Reader
from polar.store.recorder import Recorder
from polar.store.relational import LINEAGE_MEMORY_BYTES, RelationalStore
from polar.store.schema import SchemaSql, ensure_schema
from polar.store.sql import load_queries

log = logging.getLogger(__name__)

Durability = Literal["process", "power"]
"""What a write survives once it is confirmed: the end of the process (kill -9), or loss of power as well."""

_RETRY_SECONDS = 0.01
_PROBE_BYTES = 1024 * 1024
CHECKPOINT_SECONDS = 1.0
"""How long commits gather in the write-ahead log before they are moved to the database file."""
MAX_LOG_PAGES = 65_536
"""256 MB. The writing thread moves a longer log itself: commits came without a pause, so it could not be restarted."""

SCHEMA_SQL = SchemaSql(
    begin_exclusive=("BEGIN IMMEDIATE",),
    select_tables="SELECT name FROM sqlite_master WHERE type = 'table'",
    alternative="another path",
)


def open_sqlite_store(
    path: str | Path,
    durability: Durability = "process",
    *,
    lock_timeout_s: float = 5.0,
    max_lineage_bytes: int = LINEAGE_MEMORY_BYTES,
) -> RelationalStore:
    """Opens or creates the file. `lock_timeout_s` is how long to wait for another process that is writing."""
    path = Path(path).absolute()
    sql_queries = load_queries("named")
    with ExitStack() as opened:  # what is open where it fails midway
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_private_file(path)  # SQLite gives the files beside it the same permissions
            connection = opened.enter_context(closing(_connect(path, lock_timeout_s)))
            ensure_schema(connection, sql_queries, SCHEMA_SQL, str(path))
            _set_durability(connection, durability, path, lock_timeout_s)
            reader = opened.enter_context(closing(_connect(path, lock_timeout_s)))
            reader.execute("PRAGMA query_only = ON")
            checkpoint_connection = opened.enter_context(closing(_connect(path, lock_timeout_s)))
            _set_sync(checkpoint_connection, durability)
        except (sqlite3.Error, OSError) as error:
            raise _to_store_error(error, path) from error
        recorder = Recorder(connection, sql_queries, max_lineage_bytes=max_lineage_bytes)
        readers = _SqliteReaders(reader, Reader(reader, sql_queries), path)
        writer = _SqliteWriter(connection, recorder, Checkpointer(checkpoint_connection, path), path)
        opened.pop_all()
    return RelationalStore(writer, readers, str(path), "named")


class _SqliteWriter:
    """SQLite's side of group commit."""

    def __init__(
        self, connection: sqlite3.Connection, recorder: Recorder, checkpointer: "Checkpointer", path: Path
    ) -> None:
        self.connection = connection
        self.recorder = recorder
        self._checkpointer = checkpointer
        self._path = path

    def begin(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.recorder.flush_pieces()
        self.connection.execute("COMMIT")
        self._checkpointer.notify()
        self.recorder.on_commit()

    def roll_back(self, error: Exception) -> bool:  # noqa: ARG002 - whatever it was
        self.recorder.on_rollback()
        if self.connection.in_transaction:  # SQLite itself rolls back where the disk is full or broken
            self.connection.execute("ROLLBACK")
        return False

    def on_settled(self) -> None:
        self.recorder.on_settled()

    def to_store_error(self, error: Exception) -> StoreError:
        return error if isinstance(error, StoreError) else _to_store_error(error, self._path)

    def is_write_failure(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _WRITE_FAILURE_CODES

    def probe(self) -> None:
        """Writes to the database, and a file beside it: the log has room for a small write when the disk is full."""
        file = self._path.with_name(f"{self._path.name}.probe")
        try:
            file.write_bytes(bytes(_PROBE_BYTES))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "the disk is full; free some space" if full else "nothing can be written beside it; check the disk"
            raise StoreError(f"{self._path}: {advice} ({error.strerror}).") from error
        finally:
            with suppress(OSError):
                file.unlink()
        self.recorder.write_probe()

    def close(self) -> None:
        self._checkpointer.close()
        self.connection.close()


class Checkpointer:
    """Moves what is committed from the log to the database file, in a thread and on a connection of its own.

    Writing goes on meanwhile. SQLite would do this inside a commit, which then waits until the disk has all of it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._committed = Event()
        self._closed = Event()
        self._failed = False
        self._thread = Thread(target=self._run, name=f"polar-store-checkpoints {path}", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Something was committed."""
        self._committed.set()

    def close(self) -> None:
        self._closed.set()
        self._committed.set()
        self._thread.join()

    def _run(self) -> None:
        self._committed.wait()
        while not self._closed.wait(CHECKPOINT_SECONDS):
            self._committed.clear()
            self._checkpoint()
            self._committed.wait()
        self._connection.close()

    def _checkpoint(self) -> None:
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            # Nothing is lost: it stays in the log, and the writing thread says so when it can't write.
            if not self._failed:
                log.warning("%s: committed data stays in the write-ahead log for now: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False


class _SqliteReaders:
    """One thread on one connection."""

    thread_count = 1
    driver_error: type[Exception] = sqlite3.Error

    def __init__(self, connection: sqlite3.Connection, reader: Reader, path: Path) -> None:
        self.connection = connection
        self.reader = reader
        self._path = path

    def to_store_error(self, error: Exception) -> StoreError:
        return _to_store_error(error, self._path)

    def close(self) -> None:
        self.connection.close()


def _connect(path: Path, lock_timeout_s: float) -> sqlite3.Connection:
    # Each connection is used by one thread at a time, though not by the one that opens it.
    connection = sqlite3.connect(path, timeout=lock_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _set_durability(connection: sqlite3.Connection, durability: Durability, path: Path, lock_timeout_s: float) -> None:
    mode = _enable_write_ahead_log(connection, lock_timeout_s)
    connection.execute(f"PRAGMA wal_autocheckpoint = {MAX_LOG_PAGES}")
    if mode != "wal":
        raise StoreError(f"{path} can't have a write-ahead log; choose a path on a local disk.")
    _set_sync(connection, durability)


def _set_sync(connection: sqlite3.Connection, durability: Durability) -> None:
    if durability == "power":
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # on macOS a plain sync leaves the data in the drive's own memory
    else:
        connection.execute("PRAGMA synchronous = NORMAL")


def _enable_write_ahead_log(connection: sqlite3.Connection, lock_timeout_s: float) -> str:
    """Switches to write-ahead logging, and returns the resulting journal mode. Tries again while another process opens
    a new file, since SQLite does not wait in that case."""
    deadline = time.monotonic() + lock_timeout_s
    while True:
        try:
            mode: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            return mode
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_IOERR: "the disk can't be read or written; check it, and how much space is left",
    sqlite3.SQLITE_BUSY: "another process has held it locked for too long; stop that process, or try again",
    sqlite3.SQLITE_READONLY: "it is read-only; check the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it can't be opened; check the path, and the permissions of the file and its folder",
    sqlite3.SQLITE_NOTADB: "it is not a database; choose another path",
    sqlite3.SQLITE_CORRUPT: "it is damaged; restore it from a backup",
    sqlite3.SQLITE_TOOBIG: "a record is too large; one may have 1 GB",
    sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY: "a record names a session that is not there; create the session first",
    sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY: "a record of this id is there already; ids and seqs are used once",
    sqlite3.SQLITE_CONSTRAINT_UNIQUE: "a record of this key or seq is there already; keys and seqs are used once",
}

_WRITE_FAILURE_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CORRUPT,
    }
)


def _to_store_error(error: Exception, path: Path) -> StoreError:
    """Converts an error to one that says what happened and what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        general = code & 0xFF
        advice = _ADVICE.get(code) or _ADVICE.get(general, "SQLite failed; check the disk")
        return StoreError(f"{path}: {advice} ({error}).")
    if isinstance(error, OSError):
        return StoreError(f"{path}: it can't be opened; check the path and its permissions ({error}).")
    return StoreError(f"{path}: a record is not what its type promises; correct the caller ({error!r}).")
