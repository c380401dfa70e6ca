"""Policy versions, pause and resume, and several replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.engines.scripted.sampler import expected_logprobs
from polar.gateway.replica_observer import ReplicaObserver
from polar.records.exchange import VersionSpan
from polar.service import Service
from tests.conditions import wait_until
from tests.integration.stack import Stack, running, settings, wait_until_settled

WORDS = " ".join(f"word{number}" for number in range(60))
SLOW = Play([ScriptedTurn(text=WORDS, token_delay=0.01)])


async def ask(stack: Stack, http: aiohttp.ClientSession, *, stream: bool = True, key: str | None = None) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    headers = {"Authorization": f"Bearer {key or stack.key}"}
    async with http.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers) as response:
        return await response.read()


async def control(stack: Stack, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(stack.service.control_url + path, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def has_begun(stack: Stack) -> None:
    """Waits until tokens of a call have come."""
    running = stack.service.pool.replicas[0].running
    await wait_until(lambda: any(isinstance(call, ReplicaObserver) and call.record.sampled for call in running))


async def pause_engine(stack: Stack, http: aiohttp.ClientSession) -> None:
    """Without the service's knowing: no call that runs there can end before the engine is resumed."""
    await http.post(f"{stack.engine.url}/pause?mode=keep")


async def test_calls_carry_the_version_that_sampled_them(tmp_path: Path) -> None:
    async with running(tmp_path, Play([ScriptedTurn(text="short")])) as stack, aiohttp.ClientSession() as http:
        await ask(stack, http)
        await http.post(f"{stack.engine.url}/update_weight_version", json={"new_version": "3", "version": 3})
        await control(stack, http, "/policy", {"version": 3})
        await ask(stack, http)
        before, after = await stack.exchanges()
        assert [span.version for span in before.versions] == [0]
        assert [span.version for span in after.versions] == [3]
        assert after.prompt_ids is not None
        assert after.sampled_ids is not None
        np.testing.assert_array_equal(after.logprobs, expected_logprobs(3, after.prompt_ids, after.sampled_ids))


async def test_a_call_that_stood_frozen_across_an_update_has_two_versions(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as stack, aiohttp.ClientSession() as http:
        call = asyncio.create_task(ask(stack, http))
        await has_begun(stack)
        await pause_engine(stack, http)
        paused = await control(stack, http, "/policy/pause", {})
        assert paused["frozen"]
        await control(stack, http, "/policy", {"version": 1})
        await http.post(f"{stack.engine.url}/update_weight_version", json={"new_version": "1", "version": 1})
        await control(stack, http, "/policy/resume", {})
        await call
        (exchange,) = await stack.exchanges()
        old, new = exchange.versions
        assert exchange.sampled_ids is not None
        assert exchange.prompt_ids is not None
        assert exchange.logprobs is not None
        assert old == VersionSpan(0, 0, new.start)
        assert new == VersionSpan(1, old.stop, len(exchange.sampled_ids))
        assert 0 < old.stop < len(exchange.sampled_ids)
        assert exchange.untrainable is None
        for span in exchange.versions:  # the engine's log-probabilities depend on the version: the boundary is exact
            expected = expected_logprobs(span.version, exchange.prompt_ids, exchange.sampled_ids)
            np.testing.assert_array_equal(exchange.logprobs[span.start : span.stop], expected[span.start : span.stop])


async def test_a_call_that_ran_on_across_an_update_is_not_trained(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as stack, aiohttp.ClientSession() as http:
        call = asyncio.create_task(ask(stack, http))
        await has_begun(stack)
        await pause_engine(stack, http)
        await control(stack, http, "/policy", {"version": 1})
        await http.post(f"{stack.engine.url}/resume")
        await call
        (exchange,) = await stack.exchanges()
        assert exchange.versions == []
        assert exchange.untrainable == "version_unknown"


async def test_a_whole_reply_across_an_update_is_not_trained_even_if_frozen(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as stack, aiohttp.ClientSession() as http:
        await pause_engine(stack, http)
        call = asyncio.create_task(ask(stack, http, stream=False))
        await wait_until(lambda: bool(stack.service.pool.replicas[0].running))
        await control(stack, http, "/policy/pause", {})
        await control(stack, http, "/policy", {"version": 1})
        await control(stack, http, "/policy/resume", {})
        await call
        (exchange,) = await stack.exchanges()
        assert exchange.untrainable == "version_unknown"


async def test_a_stream_that_was_frozen_before_its_first_token_is_of_the_new_version(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as stack, aiohttp.ClientSession() as http:
        await pause_engine(stack, http)
        call = asyncio.create_task(ask(stack, http))
        await wait_until(lambda: bool(stack.service.pool.replicas[0].running))
        await control(stack, http, "/policy/pause", {})
        await control(stack, http, "/policy", {"version": 1})
        await control(stack, http, "/policy/resume", {})
        await call
        (exchange,) = await stack.exchanges()
        assert exchange.untrainable is None
        assert exchange.versions == [VersionSpan(1, 0, len(exchange.sampled_ids))]


async def test_new_calls_are_held_and_kept_alive_while_paused(tmp_path: Path) -> None:
    play = Play([ScriptedTurn(text="short")])
    async with running(tmp_path, play, gateway={"keep_alive": 0.1}) as stack, aiohttp.ClientSession() as http:
        await control(stack, http, "/policy/pause", {"mode": "hold"})
        call = asyncio.create_task(ask(stack, http))
        await wait_until(lambda: stack.service.pool.gate.held == 1)
        await asyncio.sleep(0.3)  # the keep-alive is due before this, in the same event loop
        assert not call.done()
        state = await (await http.get(f"{stack.service.control_url}/policy")).json()
        assert (state["paused"], state["held"]) == (True, 1)
        await control(stack, http, "/policy/resume", {})
        text = await call
        assert text.startswith(b": ")
        assert b"short" in text


async def test_draining_waits_for_what_runs(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as stack, aiohttp.ClientSession() as http:
        call = asyncio.create_task(ask(stack, http))
        await has_begun(stack)
        state = await control(stack, http, "/policy/pause", {"mode": "drain"})
        assert [replica["running"] for replica in state["replicas"]] == [0]
        assert call.done() or await asyncio.wait_for(call, 120)
        await control(stack, http, "/policy/resume", {})


@asynccontextmanager
async def two_replicas(data: Path, **engine: Any) -> AsyncIterator[tuple[Stack, ScriptedServer]]:
    async with (
        ScriptedServer(SLOW) as one,
        ScriptedServer(SLOW) as two,
        Service(settings([one.url, two.url], engine=engine), data) as service,
    ):
        await wait_until_settled(service)
        session, key = await service.sessions.create({})
        yield Stack(service, one, session.session_id, key), two


async def test_a_session_stays_with_its_replica_and_sessions_spread(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (stack, _), aiohttp.ClientSession() as http:
        _, other_key = await stack.service.sessions.create({})
        for _ in range(2):
            await asyncio.gather(ask(stack, http), ask(stack, http, key=other_key))
        sessions = await stack.service.store.sessions()
        homes = [{exchange.replica for exchange in await stack.exchanges(s.session_id)} for s in sessions]
        assert [len(home) for home in homes] == [1, 1]
        assert homes[0] != homes[1]


async def test_a_session_moves_when_its_replica_goes_down(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (stack, two), aiohttp.ClientSession() as http:
        await ask(stack, http)
        (first,) = await stack.exchanges()
        await (stack.engine if first.replica == stack.engine.url else two).stop()
        assert b"[DONE]" in await ask(stack, http)
        _, second = await stack.exchanges()
        assert second.status == "complete"
        assert second.replica != first.replica


async def test_a_session_moves_when_its_replica_is_full(tmp_path: Path) -> None:
    async with two_replicas(tmp_path, max_inflight=1) as (stack, _), aiohttp.ClientSession() as http:
        await asyncio.gather(ask(stack, http), ask(stack, http))
        one, other = await stack.exchanges()
        assert one.replica != other.replica


async def test_versions_are_kept_per_replica(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (stack, two), aiohttp.ClientSession() as http:
        await control(stack, http, "/policy", {"version": 5, "replica": two.url})
        _, other_key = await stack.service.sessions.create({})
        await asyncio.gather(ask(stack, http), ask(stack, http, key=other_key))
        for session in await stack.service.store.sessions():
            (exchange,) = await stack.exchanges(session.session_id)
            assert [span.version for span in exchange.versions] == [5 if exchange.replica == two.url else 0]
        async with http.post(
            f"{stack.service.control_url}/policy", json={"version": 6, "replica": "http://127.0.0.1:1"}
        ) as response:
            assert response.status == 404


async def test_versions_outlive_a_restart(tmp_path: Path) -> None:
    async with ScriptedServer(Play([ScriptedTurn(text="short")]), port=0) as engine, aiohttp.ClientSession() as http:
        async with (
            Service(settings([engine.url]), tmp_path) as service,
            http.post(f"{service.control_url}/policy", json={"version": 7}) as response,
        ):
            assert response.status == 200
        async with Service(settings([engine.url]), tmp_path) as service:
            session, key = await service.sessions.create({})
            stack = Stack(service, engine, session.session_id, key)
            await ask(stack, http)
            (exchange,) = await stack.exchanges()
            assert [span.version for span in exchange.versions] == [7]
