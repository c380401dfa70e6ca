"""Work of others in the store's own transactions."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg
import pytest

from polar.errors import StoreError
from polar.store.postgres import open_postgres_store
from polar.store.relational import RelationalStore
from polar.store.sql import Connection, WritingConnection
from tests.unit.store.places import Place
from tests.unit.store.samples import conversation, session
from tests.unit.store.servers import Server

INSERT = {
    "named": "INSERT INTO policies (replica, version) VALUES (:replica, :version)",
    "pyformat": "INSERT INTO policies (replica, version) VALUES (%(replica)s, %(version)s)",
}


def adding(store: RelationalStore, *replicas: str) -> Callable[[WritingConnection], None]:
    """Work that does not look whether its statements succeeded."""

    def work(db: WritingConnection) -> None:
        for replica in replicas:
            db.execute(INSERT[store.parameter_style], {"replica": replica, "version": 1})

    return work


def names(db: Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT replica FROM policies ORDER BY replica", {}).fetchall()]


class Held:
    """Holds the writing thread, so that what is handed in meanwhile goes into one transaction."""

    def __init__(self, store: RelationalStore) -> None:
        self._store = store
        self._go_on = threading.Event()

    async def __aenter__(self) -> None:
        started = threading.Event()

        def wait(_: WritingConnection) -> None:
            started.set()
            self._go_on.wait()

        self._holding = asyncio.create_task(self._store.transact(wait))
        await asyncio.to_thread(started.wait)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # what was started has been handed in
        self._go_on.set()
        await self._holding


async def test_work_is_durable_and_can_be_queried(place: Place) -> None:
    store = place.open()

    def work(db: WritingConnection) -> list[str]:
        adding(store, "b", "a")(db)
        return names(db)

    assert await store.transact(work) == ["a", "b"]
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.transact(work)
    store = place.open()
    assert await store.query(names) == ["a", "b"]
    await store.close()


async def test_many_share_a_transaction(store: RelationalStore) -> None:
    before = store.commits
    async with Held(store):
        works = [asyncio.create_task(store.transact(adding(store, f"{n:03}"))) for n in range(100)]
    await asyncio.gather(*works)
    assert store.commits - before == 2
    assert await store.query(names) == [f"{n:03}" for n in range(100)]


async def test_work_that_fails_does_so_alone(store: RelationalStore) -> None:
    """Whatever else is in its transaction, and whether it notices the failure itself."""

    class Refused(StoreError):
        pass

    def refusing(db: WritingConnection) -> None:
        adding(store, "refused")(db)
        raise Refused("no")

    def looking(db: WritingConnection) -> list[str]:
        adding(store, "looked", "a", "b")(db)
        return names(db)

    await store.create_session(session("s"))
    turn = next(conversation("s", 1))
    await store.transact(adding(store, "a"))
    async with Held(store):
        works = [
            asyncio.create_task(it)
            for it in (
                store.transact(adding(store, "b1")),
                store.transact(adding(store, "a", "lost", "too")),
                store.append(turn),
                store.transact(refusing),
                store.transact(looking),
                store.transact(lambda _: 1 // 0),
                store.transact(adding(store, "b2")),
            )
        ]
    results = await asyncio.gather(*works, return_exceptions=True)
    assert [type(it) for it in results] == [
        type(None),
        StoreError,
        type(None),
        Refused,
        StoreError,
        StoreError,
        type(None),
    ]
    assert "already" in str(results[1])
    assert "already" in str(results[4])
    assert await store.query(names) == ["a", "b1", "b2"]
    assert await store.read_next_seq("s") == 1


async def test_a_failure_does_not_cost_the_connection(server: Server) -> None:
    store = open_postgres_store(server.new_database())

    def backend(db: WritingConnection) -> int:
        pid: int = db.execute("SELECT pg_backend_pid()").fetchone()[0]
        return pid

    before = await store.transact(backend)
    with pytest.raises(StoreError, match="already"):
        await store.transact(adding(store, "a", "a", "b", "c"))
    assert await store.transact(backend) == before
    await store.close()


@pytest.mark.parametrize("more", [False, True])
async def test_a_failure_that_is_passed_over_is_no_success(server: Server, more: bool) -> None:
    store = open_postgres_store(server.new_database())

    def stubborn(db: WritingConnection) -> None:
        with suppress(psycopg.Error):
            db.execute("SELECT 1 / 0").fetchone()
        if more:
            adding(store, "a")(db)

    async with Held(store):
        works = [asyncio.create_task(store.transact(it)) for it in (adding(store, "b"), stubborn)]
    fine, failed = await asyncio.gather(*works, return_exceptions=True)
    assert fine is None
    assert isinstance(failed, StoreError)
    assert "went on after one of its statements had failed" in str(failed)
    assert await store.query(names) == ["b"]
    await store.close()
