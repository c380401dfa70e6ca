"""The embedded store: one SQLite file in WAL mode.

One thread writes on a connection of its own, with group commit; another reads on a second one. WAL lets both go on at
once, and a commit that reached the log survives the end of the process. `durability="power"` syncs the log at every
commit, so that it survives loss of power too.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from polar.engines.base import Ids
from polar.errors import StoreError
from polar.store.base import Exchange, ExchangeStatus, Session, Verdict
from polar.store.group_commit import GroupCommit, closed
from polar.store.links import damaged
from polar.store.reading import Reader
from polar.store.recorder import Recorder
from polar.store.sql import SCHEMA_VERSION, Queries, migrations, queries, schema

T = TypeVar("T")

Durability = Literal["process", "power"]
"""What a write survives once it is confirmed: the end of the process (kill -9), or loss of power as well."""

MEMORY = 64 * 1024 * 1024
"""For what the writer keeps of sessions, to store the next exchange by difference."""


class SqliteStore:
    """Implements `Store`. A session's exchanges are to be written through one open store at a time; others may read."""

    def __init__(self, writer: "_Writer", reader: sqlite3.Connection, path: Path) -> None:
        self._path = path
        self._recorder = writer.recorder
        self._writing = GroupCommit(writer, f"polar-store-writer {path.name}")
        self._connection = reader
        self._reader = Reader(reader, queries("named"))
        self._reading = ThreadPoolExecutor(1, f"polar-store-reader {path.name}")
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        durability: Durability = "process",
        *,
        lock_timeout_s: float = 5.0,
        memory: int = MEMORY,
    ) -> "SqliteStore":
        """Opens the file, or makes it. `lock_timeout_s` is how long to wait for another process that is writing."""
        path = Path(path).absolute()
        named = queries("named")
        connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = _connect(path, lock_timeout_s)
            _check_schema(connection, named, path)
            _set_durability(connection, durability, path)
            reader = _connect(path, lock_timeout_s)
            reader.execute("PRAGMA query_only = ON")
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, (sqlite3.Error, OSError)):
                raise _explain(error, path) from error
            raise
        return cls(_Writer(connection, Recorder(connection, named, memory=memory), path), reader, path)

    @property
    def commits(self) -> int:
        """Transactions committed so far; usually fewer than records written."""
        return self._writing.commits

    @property
    def lineage_bytes(self) -> int:
        """Memory held for storing by difference, about."""
        return self._recorder.lineages.size

    async def create_session(self, session: Session) -> None:
        await self._writing.submit(lambda: self._recorder.create_session(session))

    async def end_session(self, session_id: str, *, ended_at: float, verdict: Verdict) -> Session | None:
        return await self._writing.submit(lambda: self._recorder.end_session(session_id, ended_at, verdict))

    async def append(self, exchange: Exchange) -> None:
        exchange.parent = await self._writing.submit(lambda: self._recorder.append(exchange))

    async def amend(self, exchange_id: str, *, status: ExchangeStatus, delivered: int) -> None:
        await self._writing.submit(lambda: self._recorder.amend(exchange_id, status, delivered))

    async def set_policy(self, versions: Mapping[str, int]) -> None:
        await self._writing.submit(lambda: self._recorder.set_policy(versions))

    async def policies(self) -> dict[str, int]:
        return await self._read(self._reader.policies)

    async def session(self, session_id: str) -> Session | None:
        return await self._read(lambda: self._reader.session(session_id))

    async def session_by_key(self, key_hash: bytes) -> Session | None:
        return await self._read(lambda: self._reader.session_by_key(key_hash))

    async def sessions(self, *, limit: int = 100, before: str | None = None) -> list[Session]:
        return await self._read(lambda: self._reader.sessions(limit, before))

    async def exchanges(self, session_id: str) -> AsyncIterator[Exchange]:
        reading = self._reader.exchanges(session_id)
        while (exchange := await self._read(reading.next)) is not None:
            yield exchange

    async def context(self, session_id: str, seq: int) -> Ids:
        return await self._read(lambda: self._reader.context(session_id, seq))

    async def next_seq(self, session_id: str) -> int:
        return await self._read(lambda: self._reader.next_seq(session_id))

    async def close(self) -> None:
        """Writes what is waiting, then closes. Calling it again does no harm."""
        self._closed = True
        await self._writing.close()
        await asyncio.to_thread(self._reading.shutdown)
        self._connection.close()

    async def _read(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise closed()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, work)
        except sqlite3.Error as error:
            raise _explain(error, self._path) from error
        except ValueError as error:  # msgspec's among them
            raise damaged(f"{self._path}: {error}") from error


class _Writer:
    """SQLite's side of group commit."""

    def __init__(self, connection: sqlite3.Connection, recorder: Recorder, path: Path) -> None:
        self._db = connection
        self.recorder = recorder
        self._path = path

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._db.execute("COMMIT")
        self.recorder.committed()

    def rollback(self) -> None:
        self.recorder.rolled_back()
        if self._db.in_transaction:  # SQLite itself rolls back where the disk is full or broken
            self._db.execute("ROLLBACK")

    def explain(self, error: Exception) -> StoreError:
        return error if isinstance(error, StoreError) else _explain(error, self._path)

    def close(self) -> None:
        self._db.close()


def _connect(path: Path, lock_timeout_s: float) -> sqlite3.Connection:
    # Each connection is used by one thread at a time, though not by the one that opens it.
    connection = sqlite3.connect(path, timeout=lock_timeout_s, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _check_schema(connection: sqlite3.Connection, named: Queries, path: Path) -> None:
    """Makes an empty database ours; refuses one that is somebody else's, or newer than this version of Polar."""
    if not _tables(connection):
        connection.execute("BEGIN IMMEDIATE")
        if not _tables(connection):  # still: another process may have been faster
            for statement in schema():
                connection.execute(statement)
        connection.execute("COMMIT")
    if "polar_schema" not in _tables(connection):
        raise StoreError(f"{path} is a database, but not one of Polar's; choose another path.")
    _migrate(connection, named)
    version = connection.execute(named.schema_version).fetchone()[0]
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, and this Polar knows version {SCHEMA_VERSION}; "
            f"use the Polar that wrote it, or another path."
        )


def _migrate(connection: sqlite3.Connection, named: Queries) -> None:
    steps = migrations()
    if connection.execute(named.schema_version).fetchone()[0] not in steps:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        while (version := connection.execute(named.schema_version).fetchone()[0]) in steps:
            for statement in steps[version]:
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _set_durability(connection: sqlite3.Connection, durability: Durability, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    connection.execute("PRAGMA wal_autocheckpoint = 8000")  # pages, 32 MB: pages that change often are moved less often
    if mode != "wal":
        raise StoreError(f"{path} can't have a write-ahead log; choose a path on a local disk.")
    if durability == "power":
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # on macOS a plain sync leaves the data in the drive's own memory
    else:
        connection.execute("PRAGMA synchronous = NORMAL")


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


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


def _explain(error: Exception, path: Path) -> StoreError:
    """What happened, and what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        general = code & 0xFF
        advice = _ADVICE.get(code) or _ADVICE.get(general, "SQLite failed; check the disk")
        return StoreError(f"{path}: {advice} ({error}).")
    if isinstance(error, OSError):
        return StoreError(f"{path}: it can't be opened; check the path and its permissions ({error}).")
    return StoreError(f"{path}: a record is not what its type promises; correct the caller ({error!r}).")
