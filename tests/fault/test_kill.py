"""kill -9 of the gateway at random moments under load: every reply that a client got whole is in the store."""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from polar import ids
from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.gateway.call_journal import read_journal
from polar.gateway.session_registry import SessionRegistry
from polar.store import open_store
from tests.conditions import wait_until

ROUNDS = 4
CALLERS = 8
TEXT = "all of this text must be in the store once somebody has read it to its end"


def requests(number: int) -> tuple[str, dict[str, object]]:
    """A call of some dialect, whole or streamed, and different each time."""
    words, stream = f"call {number}", number % 2 == 0
    messages = [{"role": "user", "content": words}]
    match number % 3:
        case 0:
            return "/v1/chat/completions", {"model": "m", "messages": messages, "stream": stream}
        case 1:
            return "/v1/messages", {"model": "m", "messages": messages, "max_tokens": 500, "stream": stream}
        case _:
            return "/v1/responses", {"model": "m", "input": words, "stream": stream}


ENDS = (b"data: [DONE]\n\n", b'{"type":"message_stop"}\n\n')


def is_whole(body: bytes) -> bool:
    """Whether a client would take this answer for complete. Broken connections raise before it comes to that."""
    return body.endswith(ENDS) or b'"response.completed"' in body or body.endswith(b"}")


async def caller(url: str, key: str, numbers: "list[int]", received: "set[str]") -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        while True:
            numbers[0] += 1
            path, body = requests(numbers[0])
            try:
                async with http.post(url + path, json=body) as response:
                    answer = await response.read()
            except aiohttp.ClientError:
                return  # the gateway is dead
            assert response.status == 200, answer
            assert is_whole(answer)
            exchange_id = ids.find_exchange_id(answer.decode())
            assert exchange_id is not None
            received.add(exchange_id)


async def start_gateway(data: Path, engine_url: str) -> tuple[asyncio.subprocess.Process, str]:
    variables = os.environ | {
        "POLAR_ENGINE__KIND": "vllm",
        "POLAR_ENGINE__URLS": json.dumps([engine_url]),
        "POLAR_GATEWAY__PORT": "0",
        "POLAR_SERVER__PORT": "0",
    }
    command = [sys.executable, "-c", "from polar.cli.main import main; main()", "up", "--json", "--data", str(data)]
    process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    return process, json.loads(await process.stdout.readline())["gateway"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 5))])
async def test_nothing_that_was_received_is_lost(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}", "process")
    session, key = await SessionRegistry(store).create({})
    await store.close()
    received: set[str] = set()
    numbers = [0]
    async with ScriptedServer(Play([ScriptedTurn(text=TEXT, token_delay=0.001)])) as engine:
        for _ in range(ROUNDS):
            process, url = await start_gateway(tmp_path, engine.url)
            callers = [asyncio.create_task(caller(url, key, numbers, received)) for _ in range(CALLERS)]
            before = len(received)
            await wait_until(lambda before=before: len(received) > before + 1)
            await asyncio.sleep(moments.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.gather(*callers)
    assert len(received) > ROUNDS
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}", "process")
    kept = {exchange.exchange_id: exchange async for exchange in store.read_exchanges(session.session_id)}
    await store.close()
    assert received <= kept.keys()
    for exchange_id in received:
        exchange = kept[exchange_id]
        assert exchange.status == "complete"
        assert exchange.reply is not None
        assert exchange.reply.parts[0].text == TEXT
        assert exchange.sampled_ids is not None
        assert exchange.logprobs is not None
        assert len(exchange.sampled_ids) == len(exchange.logprobs)
    assert len({exchange.seq for exchange in kept.values()}) == len(kept)


async def test_a_call_in_flight_is_listed_as_interrupted(tmp_path: Path) -> None:
    database = f"sqlite:{tmp_path / 'polar.db'}"
    store = open_store(database, "process")
    session, key = await SessionRegistry(store).create({})

    def is_noted() -> bool:
        return any(read_journal(path) for path in tmp_path.glob("gateways/*/calls.jsonl"))

    async with ScriptedServer(Play([ScriptedTurn(text=TEXT, token_delay=1e6)])) as engine:
        process, url = await start_gateway(tmp_path, engine.url)
        calling = asyncio.create_task(caller(url, key, [0], set()))
        await wait_until(is_noted)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await calling
        process, _ = await start_gateway(tmp_path, engine.url)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    (found,) = [it async for it in store.read_exchanges(session.session_id)]
    await store.close()
    assert (found.status, found.untrainable, found.dialect) == ("interrupted", "no_reply", "anthropic")
    assert found.reply is None
    assert found.sampled_ids is None
