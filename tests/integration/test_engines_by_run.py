"""Engines by run, replicas that come and go under calls, and engines that sleep: over HTTP, as in real life."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.engines.base import DesiredEngines, DesiredPool, DesiredReplica
from polar.engines.scripted import TOKENIZER_FOLDER, Play, ScriptedServer, ScriptedTurn
from polar.gateway.data_plane import DataPlane
from polar.gateway.meter import Meter
from polar.records.exchange import Exchange
from polar.records.policy import PauseState
from tests.integration.stack import running, settings
from tests.integration.test_policy import SLOW, control

SHORT = Play([ScriptedTurn(text="short")])


class Bench:
    """A data plane that nobody else steers, which knows of the first of two engines."""

    def __init__(self, plane: DataPlane, one: ScriptedServer, two: ScriptedServer) -> None:
        self.plane, self.one, self.two = plane, one, two
        self.pool = plane.pools.default

    async def apply(
        self, generation: int, paused: PauseState | None = None, version: int = 0, **runs: list[ScriptedServer]
    ) -> dict[str, list[str]]:
        pools = {
            run: DesiredPool([DesiredReplica(server.url, version) for server in servers], paused)
            for run, servers in runs.items()
        }
        return await self.plane.pools.apply(DesiredEngines(generation, pools))

    async def exchanges(self, session_id: str) -> list[Exchange]:
        return [exchange async for exchange in self.plane.store.read_exchanges(session_id)]


@asynccontextmanager
async def bench(data: Path, first: Play = SHORT, second: Play = SHORT) -> AsyncIterator[Bench]:
    async with (
        ScriptedServer(first) as one,
        ScriptedServer(second) as two,
        DataPlane(settings([one.url]), data) as plane,
    ):
        yield Bench(plane, one, two)


async def ask(http: aiohttp.ClientSession, gateway_url: str, key: str, *, stream: bool = True) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{gateway_url}/v1/chat/completions", json=body, headers=headers) as response:
        return await response.read()


async def comes_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def get(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        return await response.json()


async def test_calls_go_to_the_engines_of_their_run(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        await it.apply(1, version=4, default=[it.one], mine=[it.two])
        other, other_key = await it.plane.sessions.create({})
        mine, my_key = await it.plane.sessions.create({}, "mine")
        for key in (other_key, my_key):
            await ask(http, it.plane.gateway_url, key)
        (theirs,) = await it.exchanges(other.session_id)
        (ours,) = await it.exchanges(mine.session_id)
        assert (theirs.replica, ours.replica) == (it.one.url, it.two.url)
        assert [span.version for span in ours.versions] == [4]


async def test_a_session_from_before_a_restart_knows_its_run(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        session, key = await it.plane.sessions.create({}, "mine")
        async with DataPlane(settings([it.one.url]), tmp_path) as again:
            resumed = Bench(again, it.one, it.two)
            await resumed.apply(1, default=[it.one], mine=[it.two])
            await ask(http, again.gateway_url, key)
            assert [exchange.replica for exchange in await resumed.exchanges(session.session_id)] == [it.two.url]


async def test_a_call_outlives_the_removal_of_its_replica(tmp_path: Path) -> None:
    async with bench(tmp_path, SLOW) as it, aiohttp.ClientSession() as http:
        session, key = await it.plane.sessions.create({})
        call = asyncio.create_task(ask(http, it.plane.gateway_url, key))
        await comes_true(lambda: bool(it.pool.replicas[0].running))
        await it.apply(1, default=[it.two])
        await ask(http, it.plane.gateway_url, key)
        assert b"[DONE]" in await call
        first, second = sorted(await it.exchanges(session.session_id), key=lambda exchange: exchange.seq)
        assert [first.status, second.status] == ["complete", "complete"]
        assert [first.replica, second.replica] == [it.one.url, it.two.url]
        await comes_true(lambda: not it.pool.has_departing_replicas)


async def test_without_an_engine_harnesses_are_told_to_try_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        await it.apply(1, default=[])
        _, key = await it.plane.sessions.create({})
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{it.plane.gateway_url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 503
            assert "no engine" in await response.text()
        await it.apply(2, default=[it.two])
        assert b"short" in await ask(http, it.plane.gateway_url, key)


async def test_calls_that_are_held_without_an_engine_are_rendered_all_the_same(tmp_path: Path) -> None:
    """What the gateway renders must not depend on whether an engine was there when the call came."""
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        await it.apply(1, "hold", default=[])
        session, key = await it.plane.sessions.create({})
        call = asyncio.create_task(ask(http, it.plane.gateway_url, key))
        await comes_true(lambda: it.pool.gate.held == 1)
        await it.apply(2, default=[it.two])
        assert b"short" in await call
        (exchange,) = await it.exchanges(session.session_id)
        assert exchange.continuation == "rendered"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_is_held_when_its_engine_dies_during_a_pause(tmp_path: Path, stream: bool) -> None:
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        meter = Meter()
        await http.post(f"{it.one.url}/pause?mode=keep")  # so that nothing is sampled there
        _, key = await it.plane.sessions.create({}, meter=meter)
        meter.clock.start()
        call = asyncio.create_task(ask(http, it.plane.gateway_url, key, stream=stream))
        await comes_true(lambda: bool(it.pool.replicas[0].running))
        await it.apply(1, "hold", default=[it.one])
        await it.one.stop()
        await comes_true(lambda: it.pool.gate.held == 1)
        stopped = meter.clock.get_elapsed_seconds()
        await asyncio.sleep(0.05)
        assert meter.clock.get_elapsed_seconds() == stopped
        await it.apply(2, default=[it.two])
        assert b"short" in await call


async def test_an_engine_wakes_when_calls_may_go_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        assert await it.apply(1, "sleep", default=[it.one]) == {}
        assert await get(http, f"{it.one.url}/is_sleeping") == {"is_sleeping": True}
        assert await it.apply(2, default=[it.one]) == {}
        _, key = await it.plane.sessions.create({})
        assert b"short" in await ask(http, it.plane.gateway_url, key)


async def test_engines_sleep_while_calls_are_held(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW, gateway={"keep_alive": 0.1}) as stack, aiohttp.ClientSession() as http:
        pool, meter = stack.service.pool, Meter()
        session, key = await stack.service.sessions.create({}, meter=meter)
        runs_on = asyncio.create_task(ask(http, stack.url, stack.key))
        await comes_true(lambda: bool(pool.replicas[0].running))
        await control(stack, http, "/policy/pause", {"mode": "sleep"})
        assert await get(http, f"{stack.engine.url}/is_sleeping") == {"is_sleeping": True}
        assert pool.replicas[0].asleep
        assert b"[DONE]" in await runs_on
        meter.clock.start()
        held = asyncio.create_task(ask(http, stack.url, key))
        await comes_true(lambda: pool.gate.held == 1)
        await asyncio.sleep(0.01)  # the clock is told a moment later
        stopped = meter.clock.get_elapsed_seconds()
        await asyncio.sleep(0.05)
        assert meter.clock.get_elapsed_seconds() == stopped
        await control(stack, http, "/policy/pause", {"mode": "hold"})  # to load the new weights
        assert await get(http, f"{stack.engine.url}/is_sleeping") == {"is_sleeping": False}
        assert not held.done()
        await control(stack, http, "/policy", {"version": 1})
        await http.post(f"{stack.engine.url}/update_weight_version", json={"new_version": "1"})
        await control(stack, http, "/policy/resume", {})
        assert b"[DONE]" in await held
        (exchange,) = await stack.exchanges(session.session_id)
        assert [span.version for span in exchange.versions] == [1]
        assert exchange.untrainable is None
        assert (await get(http, f"{stack.engine.url}/scripted/log"))["aborted"] == 0


@pytest.mark.parametrize("paused", ["sleep", "freeze"])
async def test_an_engine_that_stands_still_outlives_a_restart(tmp_path: Path, paused: PauseState) -> None:
    async with bench(tmp_path) as it, aiohttp.ClientSession() as http:
        await it.apply(1, paused, default=[it.one])
        asked = (await get(http, f"{it.one.url}/scripted/log"))["requests"]
        async with DataPlane(settings([it.one.url]), tmp_path, hold_calls=True) as again:
            resumed = Bench(again, it.one, it.two)
            _, key = await again.sessions.create({})
            call = asyncio.create_task(ask(http, again.gateway_url, key))
            await comes_true(lambda: resumed.pool.gate.held == 1)
            assert await resumed.apply(1, paused, default=[it.one]) == {}
            assert (await get(http, f"{it.one.url}/scripted/log"))["requests"] == asked
            assert await resumed.apply(2, default=[it.one]) == {}
            assert b"short" in await call


async def test_versions_of_engines_that_were_added_outlive_a_restart(tmp_path: Path) -> None:
    """One that is launched anew has nothing from before, also where it comes back at the same address."""
    async with DataPlane(settings([]), tmp_path) as plane:
        (launched,) = [replica.url for replica in plane.pool.replicas]
        await plane.store.set_policy_versions({launched: 3, "http://added": 4})
    again = settings([], engine={"options": {"port": int(launched.rsplit(":", 1)[1])}})
    async with DataPlane(again, tmp_path) as plane:
        assert [(replica.url, replica.version) for replica in plane.pool.replicas] == [(launched, 0)]
        assert await plane.load_policy_versions() == {launched: 0, "http://added": 4}


async def test_a_part_of_the_scripted_engine_can_be_woken_first() -> None:
    async with ScriptedServer(SHORT) as engine, aiohttp.ClientSession() as http:
        await http.post(f"{engine.url}/sleep?level=1")
        for tags, asleep in (("weights", True), ("kv_cache", False)):
            await http.post(f"{engine.url}/wake_up?tags={tags}")
            assert await get(http, f"{engine.url}/is_sleeping") == {"is_sleeping": asleep}
        async with http.post(f"{engine.url}/wake_up?tags=nothing") as response:
            assert response.status == 400


def make_other_vocabulary(folder: Path) -> Path:
    """The scripted engine's tokenizer, with two of its control tokens interchanged."""
    shutil.copytree(TOKENIZER_FOLDER, folder)
    file = folder / "tokenizer.json"
    text = file.read_text().replace("<think>", "<swap>").replace("</think>", "<think>").replace("<swap>", "</think>")
    file.write_text(text)
    return folder


async def test_an_engine_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = make_other_vocabulary(tmp_path / "other")
    async with (
        running(tmp_path / "data") as stack,
        ScriptedServer(SHORT, model="other", tokenizer=other) as engine,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(f"{stack.service.control_url}/engines", json={"url": engine.url, "run": "mine"}) as answer:
            refusal = (await answer.json())["detail"]
            assert answer.status == 502
        assert refusal.startswith(f"{engine.url} serves other with another vocabulary than {TOKENIZER_FOLDER}")
        assert "the run mine" in refusal
        shown = await get(http, f"{stack.service.control_url}/engines?run=mine")
        assert [replica["url"] for replica in shown["replicas"]] == [stack.engine.url]
        assert (await get(http, f"{engine.url}/scripted/log"))["requests"] == 0


async def test_each_run_has_the_model_that_it_names(tmp_path: Path) -> None:
    other = make_other_vocabulary(tmp_path / "other")
    async with (
        running(tmp_path / "data", SHORT) as stack,
        ScriptedServer(SHORT, model="other", tokenizer=other) as engine,
        ScriptedServer() as third,
        aiohttp.ClientSession() as http,
    ):
        control = stack.service.control_url
        named = {"engine": {"model": "other", "tokenizer": str(other)}}
        async with http.put(f"{control}/runs/mine", json=named) as answer:
            assert (answer.status, (await answer.json())["engine"]["model"]) == (200, "other")
        session, key = await stack.service.sessions.create({}, "mine")
        assert b"no engine" in await ask(http, stack.url, key)  # those of the default run have another model
        async with http.post(f"{control}/engines", json={"url": stack.engine.url, "run": "mine"}) as answer:
            assert answer.status == 422
        async with http.post(f"{control}/engines", json={"url": third.url, "run": "mine"}) as answer:
            refusal = (await answer.json())["detail"]
            assert answer.status == 502
        assert refusal.startswith(f"{third.url} serves scripted, and the run mine has the model other")
        async with http.post(f"{control}/engines", json={"url": engine.url, "run": "mine"}) as answer:
            assert answer.status == 200, await answer.text()
        for of_run in (key, stack.key):
            await ask(http, stack.url, of_run)
        ours = (await stack.exchanges(session.session_id))[-1]
        (theirs,) = await stack.exchanges()
        assert (ours.replica, theirs.replica) == (engine.url, stack.engine.url)
        for exchange, tokenizer in ((ours, engine.tokenizer), (theirs, stack.engine.tokenizer)):
            assert exchange.continuation == "rendered"
            assert exchange.prompt_ids is not None
            assert tokenizer.decode(exchange.prompt_ids.tolist()).startswith("<|im_start|>user\nhi<|im_end|>")
