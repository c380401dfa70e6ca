"""Things that happen at the same moment: ends, retries, pauses, updates, stops.

However they fall, a token is recorded once and as it was sampled, what was delivered is recorded, and nobody waits for
ever.
"""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from polar.config import EngineSettings
from polar.dialects.openai_chat import OpenAIChat
from polar.engines.pool import EnginePool
from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.errors import EngineError
from polar.gateway.call import HarnessCall
from polar.gateway.call_journal import CallJournal
from polar.gateway.data_plane import DataPlane
from polar.gateway.generation import GenerationContext, GenerationRegistry
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.gateway.prompt_renderer import PromptRenderer
from polar.gateway.session_registry import SessionRegistry
from polar.records.exchange import VersionSpan
from polar.records.session import Verdict
from polar.store import open_store
from polar.types import Text
from tests.attack.parts import CHAT, Bench, ByteEngine, Wire, ask, bench, comes_true, is_error, sampled, still_works
from tests.attack.replies import (
    DONE,
    GOOD,
    STREAM_HEAD,
    begin,
    chunked,
    encode,
    finish,
    response,
    stream,
    token,
    usage,
    whole,
)
from tests.integration.stack import settings


class Steps:
    """An engine that samples a token of a call each time it is told to. Calls are numbered as they come."""

    def __init__(self) -> None:
        self._told: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        self.begun = 0
        self.ended = 0

    def go(self, call: int, tokens: int = 1) -> None:
        for _ in range(tokens):
            self._told[call].release()

    async def __call__(self, _: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        told = self._told[self.begun]
        self.begun += 1
        writer.write(STREAM_HEAD + chunked(begin(), end=False))
        for piece in (token("one ", 11), token("two", 12), finish() + usage() + DONE):
            await told.acquire()
            writer.write(chunked(piece, end=False))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        self.ended += 1


@asynccontextmanager
async def streaming(it: Bench, text: str = "hi") -> AsyncIterator[Wire]:
    """A harness that asks for a stream, the same one each time unless it says something else."""
    async with Wire.open(it.url) as wire:
        path, body = CHAT.call(stream=True, text=text)
        data = encode(body)
        await wire.send(wire.head("POST", path, {"Authorization": f"Bearer {it.key}"}, len(data)) + data)
        yield wire


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nothing can be written to the store meanwhile."""
    other = sqlite3.connect(folder / "polar.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


async def until(wire: Wire, text: bytes) -> None:
    async with asyncio.timeout(120):
        await wire.reader.readuntil(text)


async def leave(it: Bench, wire: Wire) -> None:
    """Hangs up, and waits until the gateway knows."""
    wire.writer.transport.abort()
    await comes_true(lambda: bool(it.orphans()))


# Retries


async def test_two_retries_at_once(tmp_path: Path) -> None:
    """One gets the generation that runs, from its first byte; the other is a sample of its own."""
    async with bench(tmp_path, gateway={"grace": 600}) as it:
        it.engine.script = steps = Steps()
        async with streaming(it) as first:
            steps.go(0)
            await until(first, b"one ")
            await leave(it, first)
        async with streaming(it) as one, streaming(it) as two:
            await comes_true(lambda: steps.begun == 2)
            steps.go(0, 2)
            steps.go(1, 3)
            answers = [await one.answer(), await two.answer()]
        assert all(answer.body.count(b"one ") == 1 and answer.body.endswith(DONE) for answer in answers)
        found = await it.recorded(2)
        assert [(exchange.status, sampled(exchange)) for exchange in found] == [("complete", [11, 12, 2])] * 2
        assert (steps.begun, steps.ended) == (2, 2)


async def test_a_retry_that_goes_away_as_well(tmp_path: Path) -> None:
    async with bench(tmp_path, gateway={"grace": 600}) as it:
        it.engine.script = steps = Steps()
        for text in (b"one ", b"two"):
            async with streaming(it) as wire:
                steps.go(0)
                await until(wire, text)
                await leave(it, wire)
        async with streaming(it) as last:
            steps.go(0)
            answer = await last.answer()
        assert b"one " in answer.body
        assert answer.body.endswith(DONE)
        (exchange,) = await it.recorded(1)
        assert (exchange.status, exchange.delivered, steps.begun) == ("complete", 3, 1)


async def test_a_retry_after_the_grace(tmp_path: Path) -> None:
    """Too late: the first is recorded as far as it was delivered, the retry is a new call."""
    async with bench(tmp_path, gateway={"grace": 0.05}) as it:
        it.engine.script = steps = Steps()
        async with streaming(it) as first:
            steps.go(0)
            await until(first, b"one ")
            first.writer.transport.abort()
            await it.recorded(1)
        async with streaming(it) as again:
            steps.go(1, 3)
            assert (await again.answer()).body.endswith(DONE)
        cut, whole_one = await it.recorded(2)
        assert (cut.status, cut.delivered, sampled(cut)) == ("partial", 1, [11])
        assert cut.prompt_ids is not None
        assert cut.untrainable is None
        assert (whole_one.status, sampled(whole_one)) == ("complete", [11, 12, 2])


async def test_an_orphan_that_ends_and_is_asked_for_too_late(tmp_path: Path) -> None:
    """It was sampled to its end, and read to its middle."""
    async with bench(tmp_path, gateway={"grace": 600}) as it:
        it.engine.script = steps = Steps()
        async with streaming(it) as first:
            steps.go(0)
            await until(first, b"one ")
            await leave(it, first)
        steps.go(0, 2)
        (exchange,) = await it.recorded(1)
        assert (exchange.status, sampled(exchange)) == ("partial", [11, 12, 2])
        it.orphans()[0].give_up()  # as it does itself after its grace
        steps.go(1, 3)
        assert (await it.ask(stream=True)).body.endswith(DONE)
        first_one, second = await it.recorded(2)
        assert (first_one.status, first_one.delivered) == ("partial", 1)
        assert second.status == "complete"


async def test_a_retry_while_the_first_is_being_recorded(tmp_path: Path) -> None:
    async with bench(tmp_path, gateway={"grace": 600}) as it:
        it.engine.script = steps = Steps()
        async with streaming(it) as first:
            steps.go(0)
            await until(first, b"one ")
            await leave(it, first)
        with locked(tmp_path):  # recording waits from here on
            steps.go(0, 2)
            await comes_true(lambda: steps.ended == 1)
            again = asyncio.create_task(it.ask(stream=True))
            await comes_true(lambda: not it.orphans())
        assert (await again).body.endswith(DONE)
        await it.service.sessions.end(it.session_id)
        (exchange,) = await it.exchanges()
        assert (exchange.status, exchange.delivered, steps.begun) == ("complete", 3, 1)


async def test_a_retry_of_what_failed_is_a_new_try(tmp_path: Path) -> None:
    """A harness that went away before it heard of the failure is not told of it on its retry."""
    async with bench(tmp_path, gateway={"grace": 600}) as it:
        it.engine.script = steps = Steps()
        async with streaming(it) as first:
            steps.go(0)
            await until(first, b"one ")
            await leave(it, first)
        await it.engine.hang_up()
        await it.recorded(1)
        await still_works(it)
        failed, good = await it.recorded(2)
        assert (failed.status, good.status) == ("partial", "complete")


# Ends


async def test_a_call_that_is_given_up_before_it_begins(tmp_path: Path) -> None:
    """A session may end between a call's arrival and its first step."""
    async with bench(tmp_path) as it:
        store, pools = it.service.store, it.service.pools
        opened = await it.service.sessions.find_by_key(it.key)
        assert opened is not None
        dialect = OpenAIChat()
        body = encode(CHAT.body)
        wire = dialect.split(body)
        call = HarnessCall(dialect, {}, {}, body, wire, dialect.decode_request(wire, {}))
        prompting = PromptRenderer(EngineSettings(), pools, store)
        journal = CallJournal(tmp_path / "calls.jsonl")
        generations = GenerationRegistry(
            GenerationContext(pools, store, journal, GatewayMetrics(), PromptIdParser(), prompting, True, 0.1)
        )
        generation = generations.start(opened, call)
        generation.give_up()
        async with asyncio.timeout(120):
            await generation.wait_until_recorded()
            await generation.wait_for_events(0)
        assert generation.finished
        assert generation.error is not None
        assert not generations._running
        assert journal.running == []
        journal.close()
        (exchange,) = await it.exchanges()
        assert exchange.status == "failed"


async def test_a_session_that_ends_under_fire(tmp_path: Path) -> None:
    """While harnesses go on asking, the end is an end: the key opens nothing after it, and no call is lost."""
    async with bench(tmp_path) as it:
        it.engine.replay(response(whole()), close=False)
        for _ in range(15):
            session, key = await it.service.sessions.create({})
            ended = asyncio.Event()
            answered = 0

            async def fire(key: str = key, ended: asyncio.Event = ended) -> None:
                nonlocal answered
                while True:
                    after = ended.is_set()
                    answer = await ask(it.url, key)
                    assert answer.status in ((401,) if after else (200, 401, 504)), answer
                    answered += answer.status == 200
                    if after:
                        return

            callers = [asyncio.create_task(fire()) for _ in range(6)]
            await asyncio.sleep(0.01)
            assert await it.service.sessions.end(session.session_id)
            ended.set()
            await asyncio.gather(*callers)
            found = [exchange async for exchange in it.service.store.read_exchanges(session.session_id)]
            assert sum(exchange.status == "complete" for exchange in found) >= answered
            assert len({exchange.seq for exchange in found}) == len(found)


async def test_a_session_that_ends_while_its_calls_are_being_recorded(tmp_path: Path) -> None:
    """The key can't bring it back to life meanwhile."""
    async with bench(tmp_path) as it:
        it.engine.script = steps = Steps()
        async with streaming(it) as wire:
            steps.go(0)
            await until(wire, b"one ")
            with locked(tmp_path):
                end = asyncio.create_task(it.service.sessions.end(it.session_id, Verdict(1.0)))
                await asyncio.sleep(0.05)
                it.engine.replay(response(whole()))
                meanwhile = asyncio.create_task(it.ask())
                await asyncio.sleep(0.05)
            session = await end
            assert session is not None
            assert (session.status, session.reward) == ("ended", 1.0)
            is_error(CHAT, await it.ask(), 401)
            assert len(it.service.sessions) == 0
            answer = await meanwhile
        found = await it.exchanges()
        assert (found[0].status, sampled(found[0])) == ("partial", [11])
        assert answer.status != 200 or found[1].status == "complete"


async def test_a_session_from_before_a_restart_that_ends_as_it_is_found(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}")
    for _ in range(30):
        session, key = await SessionRegistry(store).create({})
        fresh = SessionRegistry(store)
        found, _ = await asyncio.gather(fresh.find_by_key(key), fresh.end(session.session_id))
        assert found is None or found.ended
        assert await fresh.find_by_key(key) is None
        assert len(fresh) == 0
    await store.close()


# Pauses and updates


async def test_harnesses_that_go_away_while_all_is_paused(tmp_path: Path) -> None:
    """Held calls are given up; nothing is sampled for them when the pause ends."""
    async with bench(tmp_path, gateway={"grace": 0.05}) as it:
        it.engine.script = steps = Steps()
        await it.service.pool.pause(freeze=False)
        for number in range(3):
            async with streaming(it, f"call {number}") as wire:
                await comes_true(lambda: it.service.pool.gate.held == 1)
                wire.writer.transport.abort()
                await comes_true(lambda: it.service.pool.gate.held == 0)
        found = await it.recorded(3)
        assert {exchange.status for exchange in found} == {"failed"}
        assert it.service.pool.gate.held == 0
        async with streaming(it) as stays:
            await comes_true(lambda: it.service.pool.gate.held == 1)
            await it.service.pool.resume()
            steps.go(0, 3)
            assert (await stays.answer()).body.endswith(DONE)
        assert steps.begun == 1


OK = response(b"{}")


async def test_tokens_on_their_way_when_all_froze_have_the_old_version(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.engine.script = steps = Steps()
        it.engine.fixed = {"/pause?mode=keep": OK, "/resume": OK}
        pool = it.service.pool
        async with streaming(it) as wire:
            steps.go(0)
            await until(wire, b"one ")
            assert await pool.pause()
            pool.set_version(1)
            steps.go(0)  # sampled before the pause, and late on the wire
            await until(wire, b"two")
            await pool.resume()
            steps.go(0)
            await until(wire, DONE)
        (exchange,) = await it.recorded(1)
        assert exchange.versions == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)]
        assert exchange.untrainable is None


async def test_a_call_that_is_cut_while_frozen_has_the_old_version(tmp_path: Path) -> None:
    async with bench(tmp_path, gateway={"grace": 0.05}) as it:
        it.engine.script = steps = Steps()
        it.engine.fixed = {"/pause?mode=keep": OK, "/resume": OK}
        async with streaming(it) as wire:
            steps.go(0)
            await until(wire, b"one ")
            await it.service.pool.pause()
            it.service.pool.set_version(5)
            wire.writer.transport.abort()
        (exchange,) = await it.recorded(1)
        assert exchange.versions == [VersionSpan(0, 0, 1)]
        await it.service.pool.resume()
        steps.go(1, 3)
        assert (await it.ask(stream=True)).body.endswith(DONE)
        assert (await it.recorded(2))[1].versions == [VersionSpan(5, 0, 3)]


@asynccontextmanager
async def two_engines(tmp_path: Path) -> AsyncIterator[tuple[DataPlane, ByteEngine, ByteEngine]]:
    async with ByteEngine() as one, ByteEngine() as two:
        for engine in (one, two):
            engine.replay(stream(*GOOD))
            engine.fixed = {"/pause?mode=keep": OK, "/resume": OK}
        async with DataPlane(
            settings([one.url, two.url], engine={"kind": "vllm", "timeout": 120}), tmp_path
        ) as service:
            yield service, one, two


async def test_a_replica_that_froze_is_thawed_though_another_could_not_freeze(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (service, one, two):
        two.fixed = {"/pause?mode=keep": response(b"{}", "404 Not Found")}
        assert await service.pool.pause()  # nothing runs, so all stand still
        assert not service.pool.gate.frozen
        await service.pool.resume()
        assert "/resume" in one.paths
        assert "/resume" not in two.paths


async def test_a_replica_that_dies_while_frozen_holds_up_nobody(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (service, one, two):
        _, key = await service.sessions.create({})
        await service.pool.pause()
        await one.stop()
        with pytest.raises(EngineError):
            await service.pool.resume()
        assert not service.pool.gate.paused
        assert (await ask(service.gateway_url, key, stream=True)).body.endswith(DONE)
        assert two.calls


async def test_pauses_and_resumes_at_the_same_time_take_turns(tmp_path: Path) -> None:
    """Whatever comes last counts, and no replica stays frozen behind an open gate."""
    async with two_engines(tmp_path) as (service, one, two):
        pool: EnginePool = service.pool
        await asyncio.gather(*(pool.pause() if turn % 2 else pool.resume() for turn in range(9)))
        assert not pool.gate.paused
        assert not any(replica.frozen for replica in pool.replicas)
        for engine in (one, two):
            switches = [path for path in engine.paths if path in ("/pause?mode=keep", "/resume")]
            assert switches == ["/pause?mode=keep", "/resume"] * 4


# Stops


async def test_stopping_records_all_that_was_sampled(tmp_path: Path) -> None:
    """Also for a harness that left a moment ago, and for those that ask just then."""
    async with bench(tmp_path, gateway={"grace": 600}) as it:
        it.engine.script = steps = Steps()
        session_id = it.session_id

        async def late(number: int) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    await it.ask(stream=True, text=f"late {number}")

        async with streaming(it, "one") as one, streaming(it, "two") as two, streaming(it, "gone") as gone:
            await comes_true(lambda: steps.begun == 3)
            for call in range(3):
                steps.go(call)
            for wire in (one, two, gone):
                await until(wire, b"one ")
            await leave(it, gone)
            callers = [asyncio.create_task(late(number)) for number in range(3)]
            await comes_true(lambda: steps.begun == 6)
            for call in range(3, 6):
                steps.go(call)
            stopped = asyncio.create_task(it.service.__aexit__(None, None, None))
            rest = [await wire.reader.read(-1) for wire in (one, two)]
            await stopped
            await asyncio.gather(*callers)
        assert all(b'"error"' in text for text in rest)
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}")
    found = [exchange async for exchange in store.read_exchanges(session_id)]
    await store.close()
    cut = [exchange for exchange in found if sampled(exchange)]
    assert len(cut) >= 3
    assert all((exchange.status, sampled(exchange), exchange.delivered) == ("partial", [11], 1) for exchange in cut)
    assert {exchange.status for exchange in found} <= {"partial", "failed"}
    assert len(found) == steps.begun


async def test_stopping_while_a_reply_is_on_its_way(tmp_path: Path) -> None:
    """It was recorded as complete before its last byte left; which never did."""
    text = "x" * 16_000_000  # more than any buffer takes
    async with bench(tmp_path) as it:
        it.engine.replay(response(whole(message={"content": text})))
        session_id = it.session_id
        async with Wire.open(it.url) as wire:
            data = encode(CHAT.body)
            await wire.send(wire.head("POST", CHAT.path, {"Authorization": f"Bearer {it.key}"}, len(data)) + data)
            wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
            (exchange,) = await it.recorded(1)
            assert exchange.status == "complete"
            await it.service.__aexit__(None, None, None)
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}")
    (exchange,) = [exchange async for exchange in store.read_exchanges(session_id)]
    await store.close()
    assert (exchange.status, exchange.delivered, sampled(exchange)) == ("partial", 0, [11, 12, 2])


def content(data: bytes) -> str:
    """The text in some events of a chat stream."""
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b'data: {"id"')]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def test_sigterm_loses_nothing(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(200))
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}")
    session, key = await SessionRegistry(store).create({})
    await store.close()
    texts: list[str] = []
    async with ScriptedServer(Play([ScriptedTurn(text=words, token_delay=0.05)])) as engine:
        variables = os.environ | {
            "POLAR_ENGINE__KIND": "vllm",
            "POLAR_ENGINE__URLS": json.dumps([engine.url]),
            "POLAR_GATEWAY__PORT": "0",
            "POLAR_SERVER__PORT": "0",
        }
        command = [sys.executable, "-c", "from polar.cli.main import main; main()"]
        process = await asyncio.create_subprocess_exec(
            *command, "up", "--json", "--data", str(tmp_path), env=variables, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        url = json.loads(await process.stdout.readline())["gateway"]
        ready = asyncio.Semaphore(0)

        async def read(number: int) -> None:
            async with Wire.open(url) as wire:
                text: list[str] = []
                path, body = CHAT.call(stream=True, text=f"call number {number}")
                data = encode(body)
                await wire.send(wire.head("POST", path, {"Authorization": f"Bearer {key}"}, len(data)) + data)
                for _ in range(5 + number):
                    received = await wire.reader.readuntil(b"\n\n")
                    text.append(content(received))
                ready.release()
                rest = await wire.reader.read(-1)
                text.append(content(rest))
            assert b'"error"' in rest
            texts.append("".join(text))

        readers = [asyncio.create_task(read(number)) for number in range(12)]
        for _ in readers:
            await ready.acquire()
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*readers)
        assert await asyncio.wait_for(process.wait(), 120) == 0
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}")
    found = [exchange async for exchange in store.read_exchanges(session.session_id)]
    await store.close()
    assert len(found) == 12
    replies = []
    for exchange in found:
        assert exchange.status == "partial"
        assert exchange.reply is not None
        assert exchange.prompt_ids is not None
        assert exchange.sampled_ids is not None
        assert exchange.logprobs is not None
        assert len(exchange.logprobs) == len(exchange.sampled_ids)
        assert exchange.delivered == len(exchange.sampled_ids)
        assert exchange.untrainable is None
        (part,) = exchange.reply.parts
        assert isinstance(part, Text)
        replies.append(part.text)
    assert sorted(texts) == sorted(replies)
