"""A store that can't be written: nothing is delivered that isn't recorded, and all is well when it is well again."""

import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from polar.engines.fleet import EngineFleet
from polar.gateway.app import Gateway
from polar.gateway.call_journal import CallJournal
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.session_registry import SessionRegistry
from polar.store.sqlite import open_sqlite_store
from tests.attack.parts import ANTHROPIC, CHAT, DIALECTS, ByteEngine, ask, bench, ends_in_error, is_error
from tests.attack.replies import DONE, GOOD, response, stream, whole
from tests.integration.stack import settings

NOT_ANSWERING = (503,)


@contextmanager
def disk_full(folder: Path) -> Iterator[None]:
    """No file may grow beyond what the store's log has now. (A limit of the process, and of no mount.)"""
    log = max((path.stat().st_size for path in folder.glob("*-wal")), default=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log + 512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def replying(engine: ByteEngine) -> None:
    async def script(call: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(stream(*GOOD) if call.get("stream") else response(whole()))

    engine.script = script


async def nothing_is_delivered(url: str, key: str) -> None:
    """Every dialect's harness hears of it. A stream may have begun; it does not end as if all were well."""
    for dialect in DIALECTS:
        is_error(dialect, await ask(url, key, dialect), *NOT_ANSWERING)
        if dialect.name != "openai_completions":  # its chunks have another form, which the engine here does not write
            assert ends_in_error(dialect, await ask(url, key, dialect, stream=True))


async def all_is_well(url: str, key: str) -> None:
    for dialect in (CHAT, ANTHROPIC):
        answer = await ask(url, key, dialect)
        assert answer.status == 200
        assert b"one two" in answer.body
    assert (await ask(url, key, stream=True)).body.endswith(DONE)


async def test_a_full_disk(tmp_path: Path) -> None:
    async with bench(tmp_path, control=True) as it, aiohttp.ClientSession() as http:
        replying(it.engine)
        await all_is_well(it.url, it.key)
        with disk_full(tmp_path):
            await nothing_is_delivered(it.url, it.key)
            async with http.post(f"{it.service.control_url}/sessions", json={}) as refused:
                assert refused.status == 503
                assert "space" in (await refused.json())["detail"]
            async with http.post(f"{it.service.control_url}/sessions/{it.session_id}/end") as refused:
                assert refused.status == 503
            async with http.get(f"{it.service.control_url}/sessions/{it.session_id}/exchanges") as shown:
                assert len(await shown.json()) == 3  # reading goes on
            is_error(CHAT, await ask(it.url, "unknown"), 401)
        await all_is_well(it.url, it.key)  # the session that could not be ended is still open
        found = await it.recorded(6)
        assert [exchange.status for exchange in found] == ["complete"] * 6
        async with http.post(f"{it.service.control_url}/sessions/{it.session_id}/end") as ended:
            assert ended.status == 200


async def test_many_at_once_at_a_full_disk(tmp_path: Path) -> None:
    """Writes that share a commit fail together, and each caller hears of it."""
    async with bench(tmp_path) as it:
        replying(it.engine)
        await all_is_well(it.url, it.key)
        with disk_full(tmp_path):
            for answer in await asyncio.gather(*(it.ask(text=str(n)) for n in range(30))):
                is_error(CHAT, answer, *NOT_ANSWERING)
        for answer in await asyncio.gather(*(it.ask(text=str(n)) for n in range(30))):
            assert answer.status == 200
        assert len(await it.recorded(33)) == 33


@asynccontextmanager
async def impatient(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """A gateway whose store waits for locks for a moment only; its address and a key."""
    async with ByteEngine() as engine:
        replying(engine)
        config = settings([engine.url], engine={"kind": "vllm"})
        store = open_sqlite_store(folder / "polar.db", lock_timeout_s=0.1)
        pools = await EngineFleet.from_settings(config.engine)
        await pools.start()
        sessions = SessionRegistry(store)
        journal = CallJournal(folder / "calls.jsonl")
        gateway = Gateway(
            config, store=store, journal=journal, pools=pools, sessions=sessions, metrics=GatewayMetrics()
        )
        url = await gateway.start()
        _, key = await sessions.create({})
        try:
            yield url, key
        finally:
            await gateway.stop()
            journal.close()
            await pools.close()
            await store.close()


async def test_a_store_that_another_process_has_locked(tmp_path: Path) -> None:
    async with impatient(tmp_path) as (url, key):
        await all_is_well(url, key)
        other = sqlite3.connect(tmp_path / "polar.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await nothing_is_delivered(url, key)
        other.execute("ROLLBACK")
        await all_is_well(url, key)
        count = "SELECT count(*), count(DISTINCT seq) FROM exchanges WHERE status = 'complete'"
        assert other.execute(count).fetchone() == (6, 6)
        assert other.execute("SELECT count(*) FROM exchanges").fetchone() == (6,)
        other.close()


async def test_a_store_that_is_locked_for_a_moment(tmp_path: Path) -> None:
    """The reply waits, and comes whole."""
    async with bench(tmp_path) as it:
        replying(it.engine)
        other = sqlite3.connect(tmp_path / "polar.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        calls = [asyncio.create_task(it.ask(stream=streaming)) for streaming in (False, True)]
        await asyncio.sleep(0.2)
        assert not any(call.done() for call in calls)
        other.execute("ROLLBACK")
        other.close()
        one, two = await asyncio.gather(*calls)
        assert one.status == 200
        assert two.body.endswith(DONE)
        assert len(await it.recorded(2)) == 2


async def test_a_store_that_is_closed(tmp_path: Path) -> None:
    async with bench(tmp_path, control=True) as it:
        replying(it.engine)
        await it.service.store.close()
        await nothing_is_delivered(it.url, it.key)
        for dialect in DIALECTS:  # who is this? nobody can say
            is_error(dialect, await ask(it.url, "unknown", dialect), *NOT_ANSWERING)
        async with aiohttp.ClientSession() as http, http.get(f"{it.service.control_url}/sessions") as refused:
            assert refused.status == 503
