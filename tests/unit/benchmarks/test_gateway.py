"""`make bench-gateway`: what is sent and answered is what the figures claim, and a very small run of all of it."""

import asyncio
import io
import os
import re

import msgspec
import pytest
from rich.console import Console

from benchmarks import calls
from benchmarks.calls import SMALL, TURNS, CallSize, L, S
from benchmarks.client import BenchmarkError, Connection, encode_get, encode_post
from benchmarks.gateway import benchmark as gateway
from benchmarks.gateway.engine import FakeEngine, make_reply
from benchmarks.gateway.load import FASTAPI, POLAR, RELAY, Target
from benchmarks.gateway.report import (
    AddedLatency,
    GatewayReport,
    SessionMemory,
    StreamDelays,
    list_promises,
    print_report,
    to_json,
)
from benchmarks.polar_server import LoopMonitor, LoopReport, LoopStall
from polar.dialects.base import Dialect
from polar.plugins import load


def body(size: CallSize, turn: int, dialect: str = "openai_chat", *, stream: bool = False) -> bytes:
    return calls.make_template(size, turn, dialect, stream=stream).body(calls.make_nonce(7))


@pytest.mark.parametrize(("size", "request_bytes", "reply_bytes"), [(S, 59_000, 126_000), (L, 198_000, 522_000)])
def test_calls_have_their_size(size: CallSize, request_bytes: int, reply_bytes: int) -> None:
    requests = [len(body(size, turn)) for turn in range(TURNS)]
    answers = [len(make_reply(size, turn).whole) for turn in range(TURNS)]
    assert sum(requests) / TURNS == pytest.approx(request_bytes, rel=0.03)
    assert sum(answers) / TURNS == pytest.approx(reply_bytes, rel=0.03)


@pytest.mark.parametrize("dialect", calls.DIALECTS)
def test_a_session_grows_in_every_dialect(dialect: str) -> None:
    spoken: Dialect = load("dialects", dialect)()
    earlier = spoken.split(body(S, 3, dialect)).items
    later = spoken.split(body(S, 4, dialect)).items
    assert [bytes(item) for item in later[: len(earlier)]] == [bytes(item) for item in earlier]
    assert len(later) > len(earlier)
    assert calls.find_mark(body(S, 4, dialect)) == ("S", 4)


def test_sessions_differ() -> None:
    template = calls.make_template(S, 0)
    assert template.body(calls.make_nonce(1)) != template.body(calls.make_nonce(2))


def test_ids_of_a_session_are_one_sequence() -> None:
    first, second = (msgspec.json.decode(make_reply(SMALL, turn).whole) for turn in (2, 3))
    choice = first["choices"][0]
    grown = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(grown)] == grown
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == SMALL.sampled_tokens


async def test_engine_answers_whole_and_streamed() -> None:
    async with FakeEngine() as engine:
        connection = await Connection.open(engine.port)
        models = await connection.call(encode_get("/v1/models"))
        assert b"bench" in models.body
        whole = await connection.call(encode_post("/v1/chat/completions", body(SMALL, 4)))
        assert whole.read_content() == make_reply(SMALL, 4).whole
        streamed = await connection.call(encode_post("/v1/chat/completions", body(SMALL, 4, stream=True)))
        assert streamed.read_content() == b"".join(make_reply(SMALL, 4).events)
        assert whole.sent_at <= whole.first_at <= whole.ended_at
        with pytest.raises(BenchmarkError, match="400"):
            await connection.call(encode_post("/v1/chat/completions", b"{}"))
        connection.close()


async def test_paced_streams_carry_the_time_of_each_token() -> None:
    async with FakeEngine() as engine:
        engine.pace.tokens, engine.pace.interval = 5, 0.001
        received: list[bytes] = []
        connection = await Connection.open(engine.port)
        await connection.call(encode_post("/v1/chat/completions", body(SMALL, 4, stream=True)), received.append)
        connection.close()
    stamps = [int(stamp) for stamp in re.findall(rb"~(\d{18})", b"".join(received))]
    assert len(stamps) == 5
    assert stamps == sorted(stamps)


def test_peers_are_asked_for_ids() -> None:
    peer = Target("peer", 1, None).open_session("key").make_request(SMALL, 0)
    polar = Target("polar", 1, None, control_port=2).open_session("key").make_request(SMALL, 0)
    assert b'"return_token_ids":true' in peer
    assert b'"return_token_ids":true' not in polar


async def test_watch_sees_a_stall_and_whose_it_was() -> None:
    watch = LoopMonitor()
    await asyncio.sleep(0.005)
    deadline = asyncio.get_running_loop().time() + 0.05
    while asyncio.get_running_loop().time() < deadline:
        pass
    await asyncio.sleep(0.005)
    watched = watch.make_report()
    assert watched.stalls
    assert max(stall.thread_cpu for stall in watched.stalls) > 0


def test_promises_are_judged() -> None:
    loop = LoopReport(1, 0, 0, 12, [LoopStall(12, 11, 11)], 0, 0, 0)
    report = GatewayReport(
        added=[
            AddedLatency("Polar", "S", True, 10, 0.1, 0.9, 2.0),
            AddedLatency("LiteLLM", "S", True, 10, 0.1, 20, 30),
        ],
        streams=StreamDelays(500, 1, 1, 1, 0.5, 0.1, 1, 49, 60, loop),
        memory=SessionMemory(10_000, 500, 1, 499_000_000, 1),
    )
    assert [promise.reached for promise in list_promises(report)] == [True, True, False, True]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.slow
async def test_run() -> None:
    plan = gateway.GatewayPlan(
        rounds=1,
        calls={POLAR: (1, 1), RELAY: (1, 1), FASTAPI: (1, 1)},
        dialect_calls=1,
        pairs=2,
        streams=10,
        stream_seconds=0.3,
        ramp_seconds=0.1,
        sessions=20,
        large_sessions=2,
        settle_seconds=0.1,
    )
    cores = os.sched_getaffinity(0)
    measured = await gateway.run(plan, None, lambda _: None)
    assert os.sched_getaffinity(0) == cores
    assert set(measured.costs["S"]) == set(measured.costs["L"]) == {POLAR, RELAY, FASTAPI}
    assert all(cost.cpu > 0 for costs in measured.costs.values() for cost in costs.values())
    assert set(measured.dialects) == set(calls.DIALECTS)
    assert len(measured.added) == 3 * 4
    assert measured.streams is not None
    assert measured.streams.tokens == 10 * 3
    assert measured.memory is not None
    assert measured.memory.connected > 0

    assert set(msgspec.json.decode(to_json(measured))) >= {"cpu_per_call", "first_byte", "promises"}
    console = Console(record=True, width=120, file=io.StringIO())
    print_report(measured, console)
    assert "FastAPI" in console.export_text()
