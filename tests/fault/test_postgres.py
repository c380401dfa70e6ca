"""A PostgreSQL server that goes away, comes back, or cuts the line at the worst moment: nothing that was confirmed is
lost, and nothing is written twice."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import psycopg
import pytest

from polar.cli.verify import verify_sessions
from polar.config import load
from polar.engines.scripted import ScriptedServer
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.errors import StoreError
from polar.gateway.session_registry import SessionRegistry
from polar.node.local import LocalRollout
from polar.records.exchange import Exchange
from polar.records.result import SessionResult
from polar.records.session import Verdict
from polar.store import open_store, postgres
from polar.store.postgres import open_postgres_store
from polar.store.relational import RelationalStore
from polar.store.sql import Connection, WritingConnection
from tests.conditions import wait_until
from tests.fault.test_kill import start_gateway
from tests.fault.test_restart import PLAYS, TOOLS, Harness, check_goes_on
from tests.integration.agents import task
from tests.unit.store.samples import conversation, exchange, fingerprint, session
from tests.unit.store.servers import Server, postgres_server
from tests.unit.store.test_transact import Held

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as running:
        yield running


async def read(store: RelationalStore, session_id: str) -> list[Exchange]:
    return [found async for found in store.read_exchanges(session_id)]


async def check_talks(store: RelationalStore, confirmed: dict[str, int]) -> None:
    """Each is there whole, to the bit, with at most one more than was confirmed: written as its writer died."""
    for session_id, count in confirmed.items():
        found = [fingerprint(it) for it in await read(store, session_id)]
        assert len(found) in (count, count + 1)
        for number, (it, expected) in enumerate(zip(found, conversation(session_id, len(found)), strict=True)):
            expected.parent = f"x-{session_id}-{number - 1}" if number else None
            assert it == fingerprint(expected)


@pytest.mark.faults
async def test_the_server_is_restarted_while_many_write(server: Server) -> None:
    """Callers wait; they don't hear of it."""
    store = open_postgres_store(server.new_database())
    confirmed: defaultdict[str, int] = defaultdict(int)
    over = asyncio.Event()

    async def talk(name: str) -> None:
        await store.create_session(session(name))
        for turn in conversation(name, 10_000):
            await store.append(turn)
            confirmed[name] += 1
            assert await store.find_session(name) is not None
            if over.is_set():
                return

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(talk(f"s{number}"))
        for _ in range(2):
            await asyncio.sleep(random.uniform(0.1, 0.4))
            written = sum(confirmed.values())
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(120):
                while sum(confirmed.values()) < written + 16:  # noqa: ASYNC110 (what is waited for has no event)
                    await asyncio.sleep(0.01)
        over.set()
    for name, count in confirmed.items():
        assert len(await read(store, name)) == count
    await check_talks(store, confirmed)
    await store.close()


async def test_a_server_that_is_away_or_read_only_shows(server: Server) -> None:
    """In `write_failure`, until a probe of ours succeeds: nobody else writes."""
    url = server.new_database()
    store = open_postgres_store(url, max_outage_seconds=0.1)
    try:
        await store.create_session(session("s"))
        assert store.write_failure is None
        await asyncio.to_thread(server.stop)
        with pytest.raises(StoreError):
            await store.create_session(session("t"))
        assert store.write_failure is not None
        await asyncio.to_thread(server.start)
        await wait_until(lambda: store.write_failure is None)
        with psycopg.connect(url, autocommit=True) as admin:
            name = admin.info.dbname
            admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            with pytest.raises(StoreError, match="read-only"):
                await store.create_session(session("u"))
            assert "read-only" in (store.write_failure or "")
            admin.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'.encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        await wait_until(lambda: store.write_failure is None)
        with pytest.raises(StoreError, match="used once"):
            await store.create_session(session("s"))
        assert store.write_failure is None
    finally:
        await store.close()


async def test_a_server_that_stays_away_is_reported_and_may_come_back(server: Server) -> None:
    store = open_postgres_store(server.new_database(), max_outage_seconds=0.3)
    await store.create_session(session("s"))
    turns = list(conversation("s", 6))
    await store.append(turns[0])
    await asyncio.to_thread(server.stop)
    try:
        writes = [store.append(turn) for turn in turns[1:3]]
        for result in await asyncio.gather(*writes, store.find_session("s"), read(store, "s"), return_exceptions=True):
            assert isinstance(result, StoreError)
            assert "no server listens there; start it" in str(result)
    finally:
        await asyncio.to_thread(server.start)
    for turn in turns[1:]:
        await store.append(turn)
    assert [fingerprint(it) for it in await read(store, "s")] == [fingerprint(turn) for turn in turns]
    await store.close()


class Wire:
    """Between a store and its server. It can be cut at the moment of a COMMIT: before the server has it, or after, so
    that the store does not hear what came of it; or the store alone is cut off, and the server notices nothing; or the
    COMMIT waits for `wake`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._target = psycopg.conninfo.conninfo_to_dict(server.url)["host"]
        self._folder = folder
        self.cut: str | None = None
        self.cuts = 0
        self.wake = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/.s.PGSQL.5432")
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, database: str) -> str:
        return database.replace(str(self._target), str(self._folder))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{self._target}/.s.PGSQL.5432")
                threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._back, args=(server, client), daemon=True)
        with client, server:
            back.start()
            self._forward(client, server)
            back.join()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if self.cut is not None and b"COMMIT" in data:
                    cut, self.cut = self.cut, None
                    self.cuts += 1
                    if cut == "after":
                        client.shutdown(socket.SHUT_WR)  # what the server answers goes nowhere
                        server.sendall(data)
                        server.shutdown(socket.SHUT_WR)
                        return
                    if cut == "before":
                        break
                    if cut == "unnoticed":
                        _hang_up(client)
                        return
                    self.wake.wait()
                server.sendall(data)
        _hang_up(client, server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        _hang_up(client, server)


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):  # the other side was faster
            end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_commit_whose_answer_is_lost(server: Server, tmp_path: Path, moment: str) -> None:
    """It is done again, and what it finds written it leaves."""
    database = server.new_database()
    wire = Wire(server, tmp_path)
    store = open_postgres_store(wire.url(database))
    turns = list(conversation("s", 6))
    wire.cut = moment
    await store.create_session(session("s"))
    for turn in turns:
        wire.cut = moment
        await store.append(turn)
    wire.cut = moment
    await asyncio.gather(*(store.create_session(session(f"t{number}")) for number in range(20)))
    wire.cut = moment
    ended = await store.end_session("s", ended_at=5.0, verdict=Verdict())
    assert ended is not None
    assert ended.ended_at == 5.0
    assert wire.cuts == 9
    assert [turn.parent for turn in turns[1:]] == [turn.exchange_id for turn in turns[:-1]]
    assert [fingerprint(it) for it in await read(store, "s")] == [fingerprint(turn) for turn in turns]
    assert len(await store.list_sessions()) == 21
    wire.cut = moment
    with pytest.raises(StoreError, match="already"):  # a fault of the caller's stays one
        await store.append(exchange("s", 0, [b"1"]))
    await store.close()
    wire.close()


async def test_a_transaction_that_the_server_still_holds_is_ended_first(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has locks on what is to be written again, and the server would keep it for long."""
    monkeypatch.setattr(postgres, "IDLE_TRANSACTION_SECONDS", 1000.0)
    database = server.new_database()
    wire = Wire(server, tmp_path)
    store = open_postgres_store(wire.url(database))
    await store.create_session(session("s"))
    turns = list(conversation("s", 3))
    for turn in turns:
        wire.cut = "unnoticed"
        await store.append(turn)
    assert wire.cuts == 3
    assert [fingerprint(it) for it in await read(store, "s")] == [fingerprint(turn) for turn in turns]
    await store.close()
    wire.close()


async def test_work_beside_a_failure_after_a_lost_commit(server: Server, tmp_path: Path) -> None:
    """All of it is there, though the store doesn't know; then one fails, and each is tried alone."""
    wire = Wire(server, tmp_path)
    store = open_postgres_store(wire.url(server.new_database()))
    runs = 0

    def works_once(_: WritingConnection) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            raise StoreError("not again")

    async with Held(store):
        wire.cut = "after"
        works = [
            asyncio.create_task(it)
            for it in (
                store.create_session(session("a")),
                store.transact(works_once),
                store.create_session(session("b")),
            )
        ]
    results = await asyncio.gather(*works, return_exceptions=True)
    assert wire.cuts == 1
    assert [str(it) for it in results] == ["None", "not again", "None"]
    assert {it.session_id for it in await store.list_sessions()} == {"a", "b"}
    await store.close()
    wire.close()


@pytest.mark.faults
@pytest.mark.parametrize("how", ["terminated", "killed"])
async def test_processes_of_the_server_end(server: Server, how: str) -> None:
    """Those that write and read for the store, each in the middle of something. Callers don't hear of it."""
    url = server.new_database()
    store = open_postgres_store(url)
    turns = list(conversation("s", 400))
    written = 0

    def backend(db: Connection) -> int:
        pid: int = db.execute("SELECT pg_backend_pid()", {}).fetchone()[0]
        return pid

    async def end_some() -> None:
        for count in (20, 60, 100):
            while written < count:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.001)
            for pid in (await store.transact(backend), await store.query(backend)):
                if how == "killed":
                    with contextlib.suppress(ProcessLookupError):  # all of them end when one is killed
                        os.kill(pid, signal.SIGKILL)
                else:
                    with psycopg.connect(url) as other:
                        other.execute("SELECT pg_terminate_backend(%s)", (pid,))

    await store.create_session(session("s"))
    async with asyncio.timeout(120):
        ending = asyncio.create_task(end_some())
        for turn in turns:
            await store.append(turn)
            written += 1
            assert await store.read_next_seq("s") == written
            if ending.done():
                break
        await ending
    assert written > 100
    assert [fingerprint(it) for it in await read(store, "s")] == [fingerprint(turn) for turn in turns[:written]]
    await store.close()


async def test_a_server_without_a_free_connection(server: Server) -> None:
    url = server.new_database()
    store = open_postgres_store(url, max_outage_seconds=0.2)
    await store.create_session(session("s"))
    others: list[psycopg.Connection] = []
    try:
        with pytest.raises(psycopg.OperationalError):  # noqa: PT012 (at which of them is the server's to say)
            while True:
                others.append(psycopg.connect(url))
        assert (await store.end_session("s", ended_at=1.0, verdict=Verdict())) is not None  # what it has it keeps
        with pytest.raises(StoreError, match="no connection left; raise its max_connections"):
            await store.find_session("s")
    finally:
        for other in others:
            other.close()
    await wait_until(lambda: has_room(url))  # its processes for them end by and by
    assert await store.find_session("s") is not None
    await store.close()


def has_room(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


async def test_a_session_that_moves_to_and_fro(server: Server) -> None:
    """The first writer does not know of the second one's exchange: it is told so, and goes on behind it."""
    url = server.new_database()
    first, second = open_postgres_store(url), open_postgres_store(url)
    turns = list(conversation("s", 4))
    await first.create_session(session("s"))
    await first.append(turns[0])
    await second.append(turns[1])
    stale = msgspec.structs.replace(turns[2], seq=1)
    with pytest.raises(StoreError, match="of this id, key or seq is there already"):
        await first.append(stale)
    for turn in turns[2:]:
        await first.append(turn)
    assert [turn.parent for turn in turns[1:]] == [turn.exchange_id for turn in turns[:-1]]
    assert [fingerprint(it) for it in await read(second, "s")] == [fingerprint(turn) for turn in turns]
    await first.close()
    await second.close()


def deadlocks(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


async def test_stores_that_write_the_same_pieces_wait_in_no_circle(server: Server) -> None:
    url = server.new_database()
    before = deadlocks(url)
    stores = [open_postgres_store(url) for _ in range(3)]
    for number, store in enumerate(stores):
        await store.create_session(session(f"s{number}"))
    for seq in range(15):
        items = [b'"%d of %d"' % (number, seq) for number in range(300)]
        turns = [exchange(f"s{number}", seq, random.sample(items, len(items))) for number in range(3)]
        await asyncio.gather(*(store.append(turn) for store, turn in zip(stores, turns, strict=True)))
    for store in stores:
        await store.close()
    assert deadlocks(url) == before


async def test_a_deadlock_is_tried_again(server: Server) -> None:
    """Somebody who takes the same rows in another order."""
    url = server.new_database()
    store = open_postgres_store(url)
    await store.set_policy_versions({"a": 1, "b": 1})
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("UPDATE policies SET version = 5 WHERE replica = 'b'")
        writing = asyncio.create_task(store.set_policy_versions({"a": 2, "b": 2}))
        while True:
            waiting = await other.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            if (await waiting.fetchone()) != (0,):
                break
        # The one that finds the circle gives way, and that may be either of the two.
        with contextlib.suppress(psycopg.errors.DeadlockDetected):
            await other.execute("UPDATE policies SET version = 5 WHERE replica = 'a'")
        await other.commit()
    await writing
    assert await store.read_policy_versions() == {"a": 2, "b": 2}
    await store.close()


async def test_processes_that_are_killed_leave_what_they_confirmed(server: Server) -> None:
    """Two at a time on one database, whose sessions have tools and system prompt in common."""
    url = server.new_database()
    confirmed: defaultdict[str, int] = defaultdict(int)

    async def live_and_die(life: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.unit.store.written_until_killed", url, life, cwd=ROOT, stdout=-1
        )
        assert process.stdout is not None
        lines = [await process.stdout.readline() for _ in range(random.randint(20, 80))]
        process.send_signal(signal.SIGKILL)
        lines += (await process.stdout.read()).splitlines(keepends=True)
        await process.wait()
        for line in lines:
            if line.endswith(b"\n"):
                name, seq = line.decode().split()
                confirmed[name] = int(seq) + 1

    for round_ in range(3):
        await asyncio.gather(live_and_die(f"{round_}a"), live_and_die(f"{round_}b"))
    assert len(confirmed) >= 6
    store = open_postgres_store(url)
    await check_talks(store, confirmed)
    await store.close()


async def test_a_process_that_is_frozen_holds_nobody_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still before its COMMIT, with pieces that another wants to write too."""
    url = server.new_database()
    store = open_postgres_store(url)
    await store.create_session(session("s"))
    wire = Wire(server, tmp_path)
    monkeypatch.setattr(postgres, "IDLE_TRANSACTION_SECONDS", 1.0)
    frozen = open_postgres_store(wire.url(url))
    await frozen.create_session(session("t"))
    turns = [exchange(name, 0, [b"1"]) for name in ("s", "t")]
    wire.cut = "freeze"
    waiting = asyncio.create_task(frozen.append(turns[1]))
    async with asyncio.timeout(120):
        while not wire.cuts:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)
        await store.append(turns[0])
    assert not waiting.done()
    wire.wake.set()
    await waiting  # it has lost that transaction, and made another
    for turn in turns:
        assert [fingerprint(it) for it in await read(store, turn.session_id)] == [fingerprint(turn)]
    await frozen.close()
    await store.close()
    wire.close()


# The service on it


async def test_a_session_goes_on_at_another_gateway_when_its_own_is_killed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes know its key: the one that made it, and two gateways in turn."""
    url = server.new_database()
    monkeypatch.setenv("POLAR_ENGINE__TOKENIZER", str(TOKENIZER_FOLDER))
    monkeypatch.setenv("POLAR_STORE__URL", url)
    store = open_store(url)
    session, key = await SessionRegistry(store).create({})
    harness = Harness("PLAY:tools Do it.", TOOLS)
    async with ScriptedServer(PLAYS, drift=0.5) as engine:
        for folder in ("first", "second"):  # one after the other: a server that finds a newer one stops
            process, gateway_url = await start_gateway(tmp_path / folder, engine.url)
            try:
                for _ in range(3):
                    await harness.turn(gateway_url, key)
            finally:
                process.kill()
                await process.wait()
    exchanges = [exchange async for exchange in store.read_exchanges(session.session_id)]
    assert [exchange.seq for exchange in exchanges] == list(range(6))
    for before, after in pairwise(exchanges):
        check_goes_on(before, after)
    await store.close()
    assert not (tmp_path / "first" / "polar.db").exists()
    settings = load(None, dict(os.environ), {})
    assert (await verify_sessions(settings, tmp_path / "first", [])).traces["prefix_merging"] == 1


async def test_tasks_run_to_their_end(server: Server, tmp_path: Path) -> None:
    url = server.new_database()
    settings = load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}, "store": {"url": url}})
    wanted = task("print(ask()); print(ask())", num_samples=3, evaluator={"strategy": "session_completed"})
    async with LocalRollout(settings, tmp_path) as opened:
        plans = await opened.plan([wanted])
        finished = [it async for it in opened.run(plans)]
        results = [SessionResult.model_validate(await opened.build_result(plans[0], it)) for it in finished]
    assert [result.status for result in results] == ["COMPLETED"] * 3
    assert all(result.trajectory is not None and result.trajectory.traces for result in results)
    store = open_store(url)
    kept = await store.list_sessions()
    assert {(it.session_id, it.status, it.reward) for it in kept} == {(it.session_id, "ended", 1.0) for it in finished}
    for it in kept:
        assert len([exchange async for exchange in store.read_exchanges(it.session_id)]) == 2
    copies = open_store(f"sqlite:{tmp_path}/copies/polar.db")
    for it in kept:
        await copies.import_session(await store.export_session(it.session_id))
    assert await copies.list_sessions() == kept
    await copies.close()
    await store.close()
    verified = await verify_sessions(load(None, {}, {}), tmp_path / "copies", [])
    assert verified.traces["prefix_merging"] == sum(len(it.trajectory.traces) for it in results if it.trajectory)
