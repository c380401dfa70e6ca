"""What is SQLite's own: files, locks and disks."""

import asyncio
import resource
import sqlite3
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from polar.errors import StoreError
from polar.store import open_store, sqlite
from polar.store.relational import RelationalStore
from polar.store.sqlite import MAX_LOG_PAGES, Checkpointer, open_sqlite_store
from tests.conditions import wait_until
from tests.unit.store.samples import conversation, session
from tests.unit.store.test_store import check, read


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[RelationalStore]:
    opened = open_sqlite_store(tmp_path / "polar.db", lock_timeout_s=0.05)
    yield opened
    await opened.close()


async def test_a_full_disk_reaches_the_callers_and_goes_by(store: RelationalStore, tmp_path: Path) -> None:
    turns = list(conversation("s", 12))
    await store.create_session(session("s"))
    for turn in turns[:4]:
        await store.append(turn)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wal = (tmp_path / "polar.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal + 5_000, hard))  # no file may grow beyond this
    try:
        results = await asyncio.gather(*(store.append(turn) for turn in turns[4:8]), return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(isinstance(result, StoreError) and "space" in str(result) for result in results), results
    for turn in turns[4:]:
        await store.append(turn)
    await check(store, "s", turns)


async def test_a_lock_held_by_others_reaches_the_callers_and_goes_by(store: RelationalStore, tmp_path: Path) -> None:
    await store.create_session(session("s"))
    turns = list(conversation("s", 3))
    other = sqlite3.connect(tmp_path / "polar.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    results = await asyncio.gather(*(store.append(turn) for turn in turns), return_exceptions=True)
    assert all(isinstance(result, StoreError) and "locked" in str(result) for result in results), results
    assert await read(store, "s") == []
    other.execute("ROLLBACK")
    other.close()
    for turn in turns:
        await store.append(turn)
    await check(store, "s", turns)


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello, this is no database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        open_sqlite_store(tmp_path / "notes.txt")


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "polar.db", tmp_path):
        with pytest.raises(StoreError, match="can't be opened"):
            open_sqlite_store(path)


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
async def test_durability(tmp_path: Path, durability: str, level: int) -> None:
    store = open_sqlite_store(tmp_path / "polar.db", durability)  # type: ignore[arg-type]
    db = store._recorder._db
    assert db.execute("PRAGMA synchronous", {}).fetchone()[0] == level
    assert db.execute("PRAGMA journal_mode", {}).fetchone()[0] == "wal"
    await store.close()


async def test_commits_reach_the_database_file_outside_commits(store: RelationalStore, tmp_path: Path) -> None:
    """A checkpoint inside a commit kept every caller waiting until the disk had 32 MB."""
    empty = (tmp_path / "polar.db").stat().st_size
    turns = list(conversation("s", 12))
    await store.create_session(session("s"))
    for turn in turns:
        await store.append(turn)
    await wait_until(lambda: (tmp_path / "polar.db").stat().st_size > empty)
    (level,) = store._connection.execute("PRAGMA wal_autocheckpoint").fetchone()
    assert level == MAX_LOG_PAGES
    await check(store, "s", turns)


async def test_a_checkpoint_that_fails_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "CHECKPOINT_SECONDS", 0.001)
    tried: list[str] = []

    class Failing(sqlite3.Connection):
        def execute(self, statement: str, *_: object) -> sqlite3.Cursor:
            tried.append(statement)
            raise sqlite3.OperationalError("disk I/O error")

    failing = sqlite3.connect(tmp_path / "polar.db", check_same_thread=False, factory=Failing)
    checkpointer = Checkpointer(failing, tmp_path / "polar.db")
    for count in range(3):
        checkpointer.notify()
        await wait_until(lambda count=count: len(tried) > count)  # type: ignore[misc]
    checkpointer.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'polar.db'}: committed data stays in the write-ahead log for now: disk I/O error"
    ]


async def test_open_store(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path}/data/polar.db")
    await store.create_session(session("s"))
    await store.close()
    assert (tmp_path / "data" / "polar.db").exists()
    for url in ("sqlite:", "mysql://me:secret@db/polar"):
        with pytest.raises(StoreError, match="sqlite:PATH") as refused:
            open_store(url)
        assert "secret" not in str(refused.value)


async def test_whoever_opens_a_new_file_at_the_same_moment_waits(tmp_path: Path) -> None:
    """SQLite does not wait where two want a write-ahead log at once: it says that the file is locked."""
    for name in "abcdefghij":
        together = threading.Barrier(12)

        def opened(path: Path = tmp_path / name, together: threading.Barrier = together) -> RelationalStore:
            together.wait()
            return open_sqlite_store(path)

        with ThreadPoolExecutor(12) as threads:
            stores = [waiting.result() for waiting in [threads.submit(opened) for _ in range(12)]]
        for store in stores:
            await store.close()


@pytest.mark.parametrize("step", ["_set_durability", "_set_sync"])
def test_no_connection_is_left_where_opening_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    connect = sqlite3.connect
    made: list[sqlite3.Connection] = []

    def connecting(*args: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*args, **options))
        return made[-1]

    def failing(*_: Any) -> None:
        if step == "_set_durability" or len(made) == 3:
            raise sqlite3.OperationalError("no")

    monkeypatch.setattr(sqlite3, "connect", connecting)
    monkeypatch.setattr(sqlite, step, failing)
    with pytest.raises(StoreError):
        open_sqlite_store(tmp_path / "polar.db")
    assert made
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
