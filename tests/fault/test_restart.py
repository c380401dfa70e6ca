"""kill -9 and a restart in the middle of conversations: the next turn goes on from the ids that were recorded."""

import asyncio
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.cli.verify import verify_sessions
from polar.config import Settings
from polar.engines.scripted import Play, PlaySet, ScriptedServer, ScriptedTurn
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.gateway.session_registry import SessionRegistry
from polar.records.exchange import Exchange
from polar.store import open_store
from tests.conditions import wait_until
from tests.fault.test_kill import start_gateway

SAID = "Nothing of it was written by them, or by anybody else who was there."
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "", "parameters": SHELL}}]
PLAYS = PlaySet(
    Play([ScriptedTurn(text=f"{SAID} ({number})") for number in range(20)]),
    {"tools": Play([ScriptedTurn(reasoning=SAID, text=f"Having step {n}.", shell=f"echo {n}") for n in range(20)])},
)


class Harness:
    """A conversation that outlives the gateway. A call that fails is made again."""

    def __init__(self, task: str, tools: list[dict[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
        self._tools = tools

    async def turn(self, url: str, key: str) -> None:
        body = {"model": "m", "messages": self.messages, "tools": self._tools}
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            reply = await response.json()
            assert response.status == 200, reply
        message = {name: value for name, value in reply["choices"][0]["message"].items() if value is not None}
        calls = message.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        self.messages += [message, *(results or [{"role": "user", "content": "Go on."}])]


async def turns_until_killed(harness: Harness, url: str, key: str) -> None:
    while True:
        try:
            await harness.turn(url, key)
        except aiohttp.ClientError:
            return


def check_goes_on(before: Exchange, after: Exchange) -> None:
    assert (after.continuation, after.branch_reason, after.parent) == ("recorded", None, before.exchange_id)
    assert before.prompt_ids is not None
    assert before.sampled_ids is not None
    assert after.prompt_ids is not None
    context = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
    assert after.prompt_ids[: len(context)].tolist() == context


async def recorded(data: Path, session_id: str) -> list[Exchange]:
    store = open_store(f"sqlite:{data / 'polar.db'}", "process")
    try:
        return [exchange async for exchange in store.read_exchanges(session_id)]
    finally:
        await store.close()


async def test_turns_go_on_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations of one session, with tools and without, and a restart after every second turn."""
    monkeypatch.setenv("POLAR_ENGINE__TOKENIZER", str(TOKENIZER_FOLDER))
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}", "process")
    session, key = await SessionRegistry(store).create({})
    await store.close()
    harnesses = [Harness("PLAY:tools Do it.", TOOLS), Harness("Say it.", [])]
    async with ScriptedServer(PLAYS, drift=0.5) as engine:
        for _ in range(3):
            process, url = await start_gateway(tmp_path, engine.url)
            for _ in range(2):
                for harness in harnesses:
                    await harness.turn(url, key)
            process.send_signal(signal.SIGKILL)
            await process.wait()
    exchanges = await recorded(tmp_path, session.session_id)
    assert [exchange.seq for exchange in exchanges] == list(range(12))
    for before, after in zip(exchanges, exchanges[2:], strict=False):
        check_goes_on(before, after)
    assert (await verify_sessions(Settings(), tmp_path, [])).traces["prefix_merging"] == 2


@pytest.mark.faults
async def test_a_call_that_died_with_the_gateway_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any moment: what the harness got whole is there, and it goes on from that."""
    monkeypatch.setenv("POLAR_ENGINE__TOKENIZER", str(TOKENIZER_FOLDER))
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}", "process")
    session, key = await SessionRegistry(store).create({})
    await store.close()
    harnesses = [Harness(f"PLAY:tools Do it. {number}", TOOLS) for number in range(3)]
    async with ScriptedServer(PLAYS, drift=0.5, rate=400) as engine:
        for _ in range(3):
            process, url = await start_gateway(tmp_path, engine.url)
            running = [asyncio.create_task(turns_until_killed(harness, url, key)) for harness in harnesses]
            turns_before = [len(harness.messages) for harness in harnesses]
            await wait_until(
                lambda before=turns_before: all(
                    len(harness.messages) > had for harness, had in zip(harnesses, before, strict=True)
                )
            )
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.gather(*running)
        process, url = await start_gateway(tmp_path, engine.url)
        for harness in harnesses:
            await harness.turn(url, key)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    exchanges = await recorded(tmp_path, session.session_id)
    by_id = {exchange.exchange_id: exchange for exchange in exchanges}
    for harness in harnesses:
        said = [message["tool_calls"][0]["id"] for message in harness.messages if message["role"] == "assistant"]
        turns = [by_id[call_id.removeprefix("call_").rpartition("_")[0]] for call_id in said]
        assert len(turns) > 1
        for before, after in pairwise(turns):
            check_goes_on(before, after)
    found = await verify_sessions(Settings(), tmp_path, [])
    assert found.describe_failure(0) is None
    assert not found.branches
