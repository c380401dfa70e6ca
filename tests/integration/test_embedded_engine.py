"""The embedded engine behind a real gateway: launched, called with the official client, killed, and given new weights
in mid-call. Every token is checked against plain forward passes."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from openai import AsyncOpenAI

from polar.config import EngineSettings
from polar.engines.embedded.engine import EmbeddedEngine, EngineProcess
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.embedded.weights import WeightUpdate, save_update
from polar.errors import ConfigError
from polar.gateway.data_plane import DataPlane
from polar.records.exchange import VersionSpan
from polar.trajectory import session as sessions
from polar.trajectory.builders import prefix_merging
from polar.trajectory.teacher import LogprobComparison, Teacher, find_logprob_conditions
from tests.integration.stack import settings
from tests.unit.engines.embedded import tiny

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "memory_gib": 0.01, "context_length": 1024}


class InThisProcess(EmbeddedServer):
    """What an engine of this kind launches, but so that a test has a hold on its passes."""

    launched: ClassVar["list[InThisProcess]"] = []

    @classmethod
    async def launch(cls, settings: EngineSettings) -> "InThisProcess":
        server = cls(Path(str(settings.model)), settings.parse_options(EmbeddedOptions))
        await server.start()
        cls.launched.append(server)
        return server

    @property
    def version(self) -> int:
        return self.core.version


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


async def test_a_session_through_the_gateway_is_what_the_model_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine that begins with the weights of an update, and gets others in mid-call."""
    began, update = (tiny.save_perturbed_weights(folder, tmp_path / f"weights{seed}", seed) for seed in (1, 2))
    state = tmp_path / "state.json"
    save_update(state, WeightUpdate(str(began), 5))
    monkeypatch.setattr(InThisProcess, "launched", [])
    monkeypatch.setattr(EmbeddedEngine, "launch", InThisProcess.launch)
    engine = {"kind": "embedded", "urls": [], "model": str(folder), "options": OPTIONS | {"state": str(state)}}
    async with DataPlane(settings([], engine=engine), tmp_path) as plane:
        (url,) = plane.pool.launched_versions
        assert await plane.load_policy_versions() == {url: 5}
        assert [replica.version for replica in plane.pool.replicas] == [5]
        session, key = await plane.sessions.create({})
        async with AsyncOpenAI(api_key=key, base_url=f"{plane.gateway_url}/v1") as client:
            history: list[Any] = [{"role": "user", "content": "hi"}]
            for temperature in (1.0, 0.7):
                reply = await client.chat.completions.create(
                    model="any", messages=history, max_tokens=24, temperature=temperature
                )
                history += [reply.choices[0].message.model_dump(include={"role", "content"})]
                history += [{"role": "user", "content": "go on"}]
            with tiny.PassLimiter(InThisProcess.launched[0].core) as passes:
                passes.allow(20)
                stream = await client.chat.completions.create(
                    model="any", messages=history, max_tokens=200, stream=True
                )
                await anext(aiter(stream))
                async with (
                    aiohttp.ClientSession() as http,
                    http.post(f"{url}/update_weights", json={"path": str(update), "version": 6}) as answer,
                ):
                    assert answer.status == 200
            async for _ in stream:
                pass
        exchanges = [exchange async for exchange in plane.store.read_exchanges(session.session_id)]
        recorded = await plane.store.find_session(session.session_id)
    assert recorded is not None
    assert [exchange.untrainable for exchange in exchanges] == [None] * 3
    assert {exchange.logprob_kind for exchange in exchanges} == {"processed"}
    assert [span.version for span in exchanges[-1].versions] == [5, 6]
    traces = prefix_merging(sessions.read_session_paths(recorded, exchanges)).traces
    how = {exchange.exchange_id: find_logprob_conditions(exchange) for exchange in exchanges}
    models = {
        5: tiny.make_updated_folder(folder, began, tmp_path / "began"),
        6: tiny.make_updated_folder(folder, update, tmp_path / "updated"),
    }
    for version, other in ((5, 6), (6, 5)):
        right, wrong = LogprobComparison(), LogprobComparison()
        Teacher.load(models[version]).compare(traces, how, right, policy_version=version)
        Teacher.load(models[other]).compare(traces, how, wrong, policy_version=version)
        assert right.tokens > 0
        assert right.largest < 1e-4
        assert wrong.largest > 0.05


async def test_a_reply_that_is_given_up_has_the_version_that_sampled_it(folder: Path, tmp_path: Path) -> None:
    """Whatever anybody else says of the engine's weights."""
    update = tiny.save_perturbed_weights(folder, tmp_path / "weights", 1)
    async with EmbeddedServer(folder, EmbeddedOptions(**OPTIONS)) as server:
        await server.core.update_weights(WeightUpdate(str(update), 7))
        engine = {"kind": "embedded", "urls": [server.url]}
        async with DataPlane(settings([], engine=engine, gateway={"grace": 0}), tmp_path) as plane:
            session, key = await plane.sessions.create({})
            async with AsyncOpenAI(api_key=key, base_url=f"{plane.gateway_url}/v1") as client:
                ask = [{"role": "user", "content": "hi"}]
                with tiny.PassLimiter(server.core) as passes:
                    passes.allow(20)
                    stream = await client.chat.completions.create(
                        model="any", messages=ask, max_tokens=900, stream=True
                    )
                    async for _ in stream:
                        break
                    await stream.close()
                    async with asyncio.timeout(120):
                        while not (exchanges := [it async for it in plane.store.read_exchanges(session.session_id)]):  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
    (exchange,) = exchanges
    assert (exchange.status, exchange.untrainable) == ("partial", None)
    assert exchange.sampled_ids is not None
    assert exchange.versions == [VersionSpan(7, 0, len(exchange.sampled_ids))]


@pytest.mark.faults
async def test_a_killed_engine_comes_back_at_its_address_with_its_weights(folder: Path, tmp_path: Path) -> None:
    update = tiny.save_perturbed_weights(folder, tmp_path / "weights", 1)
    process = await EmbeddedEngine.launch(EngineSettings(kind="embedded", model=str(folder), options=OPTIONS))
    try:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{process.url}/update_weights", json={"path": str(update), "version": 7}) as answer:
                assert answer.status == 200
            first = process.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(120):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"{process.url}/weight_version") as answer:
                            if process.pid != first:
                                assert await answer.json() == {"version": 7}
                                break
                    await asyncio.sleep(0.1)
    finally:
        await process.stop()
    assert process.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no readable tokenizer\.json"):
        await EngineProcess(tmp_path, EmbeddedOptions(**OPTIONS)).start()
    with pytest.raises(ConfigError, match=r"\[engine.options\] speed: .* known: device, dtype"):
        await EmbeddedEngine.launch(EngineSettings(kind="embedded", model=str(tmp_path), options={"speed": 3}))


async def test_an_engine_is_not_taken_for_another_at_its_address(folder: Path) -> None:
    async with EmbeddedServer(folder, EmbeddedOptions(**OPTIONS)) as other:
        port = int(other.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"Can't listen on 127.0.0.1:{port}: .*in use"):
            await EngineProcess(folder, EmbeddedOptions(**OPTIONS | {"port": port})).start()
