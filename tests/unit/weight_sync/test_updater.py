"""Weights that change under running calls, and updates that fail at every step: no token is labelled wrongly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from polar.client.async_client import AsyncClient, ClientError
from polar.config import EngineSettings
from polar.engines.scripted import Play, ScriptedTurn
from polar.engines.scripted.sampler import expected_logprobs
from polar.errors import ConfigError
from polar.gateway.replica_observer import ReplicaObserver
from polar.records.exchange import Exchange
from polar.records.policy import PauseMode
from polar.service import Service
from polar.weight_sync.base import ProbeFailedError, SyncError
from polar.weight_sync.probe import Probe, Tolerance
from polar.weight_sync.updater import WeightSender, WeightUpdater
from polar.weight_sync.vllm import VllmFileTransport
from tests.conditions import wait_until
from tests.integration.stack import settings
from tests.selection import leave_to_slow
from tests.unit.weight_sync.engine_with_weights import EngineWithWeights, engine_with_weights

WORDS = Play([ScriptedTurn(text=" ".join(f"word{number}" for number in range(100)), token_delay=0.1)])
"""Said so slowly that a call runs through all updates, until the engine is told to hurry."""
WEIGHTS = {"weight": torch.zeros(4)}
EXACT = Tolerance(1e-6, 1e-6)


class Trainer:
    """One whose model is the scripted engine's: a version."""

    def __init__(
        self, engine: EngineWithWeights, service: Service, client: AsyncClient, folder: Path, patience: float
    ) -> None:
        self.engine, self.service, self.client = engine, service, client
        self.folder = folder
        self.version = 0
        probe = Probe(self._score, 1000, EXACT)
        kind = EngineSettings(kind="vllm", timeout=120)
        self.sync = WeightSender(client, VllmFileTransport(folder), kind, probe, patience=patience)

    def _score(self, prompt: list[int], sampled: list[int]) -> list[float]:
        found: list[float] = expected_logprobs(self.version, _ids(prompt), _ids(sampled)).tolist()
        return found

    async def step(self, version: int) -> Any:
        self.version = version
        return await self.sync.send(WEIGHTS, version)

    async def end(self, call: "asyncio.Task[Exchange]") -> Exchange:
        """Lets a call run to its end."""
        self.engine.hurry()
        return await call

    async def policy(self) -> tuple[bool, int]:
        state = await self.client.policy()
        (replica,) = state["replicas"]
        return state["paused"], replica["version"]


def _ids(ids: list[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(ids, np.int32)


@asynccontextmanager
async def trainer(
    data: Path, client: type[AsyncClient] = AsyncClient, *, patience: float = 60
) -> AsyncIterator[Trainer]:
    async with (
        engine_with_weights(WORDS) as engine,
        Service(settings([engine.url]), data / "service") as service,
        client(service.control_url, patience=patience) as control,
    ):
        it = Trainer(engine, service, control, data / "weights", patience)
        try:
            yield it
        finally:
            await it.sync.close()


@asynccontextmanager
async def harness(service: Service) -> AsyncIterator[tuple["asyncio.Task[Exchange]", str]]:
    """A call that runs while all else happens."""
    session, key = await service.sessions.create({})

    async def call() -> Exchange:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{service.gateway_url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            assert b"[DONE]" in await response.read()
        (exchange,) = [exchange async for exchange in service.store.read_exchanges(session.session_id)]
        return exchange

    task = asyncio.create_task(call())
    running = service.pool.replicas[0].running
    await wait_until(lambda: any(isinstance(call, ReplicaObserver) and call.record.sampled for call in running))
    try:
        yield task, key
    finally:
        task.cancel()


def check_labels(exchange: Exchange) -> list[int]:
    """Every token's log-probability is that of the version that it is labelled with; the versions, in order."""
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    assert exchange.logprobs is not None
    assert exchange.untrainable is None
    assert sum(span.stop - span.start for span in exchange.versions) == len(exchange.sampled_ids)
    for span in exchange.versions:
        expected = expected_logprobs(span.version, exchange.prompt_ids, exchange.sampled_ids)
        np.testing.assert_array_equal(exchange.logprobs[span.start : span.stop], expected[span.start : span.stop])
    return [span.version for span in exchange.versions]


async def test_a_call_goes_on_under_new_weights_and_its_tokens_are_labelled(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it, harness(it.service) as (call, _):
        first = await it.step(1)
        second = await it.step(2)
        assert (first.version, first.replicas, first.is_conclusive) == (1, 1, False)
        assert first.previous_difference is None
        assert second.difference.is_within(EXACT)
        assert second.is_conclusive  # the weights of before are known from the first update's probe
        assert list(second.seconds) == ["prepare", "freeze", "load", "policy", "resume", "probe"]
        assert await it.policy() == (False, 2)
        assert check_labels(await it.end(call)) == [0, 1, 2]
        assert it.engine.asked["/reset_prefix_cache"] == 2
        assert [folder.name for folder in it.folder.iterdir()] == ["2"]


async def test_a_check_at_the_start_lets_the_first_update_tell_the_weights_apart(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it:
        found = await it.sync.check(0)
        assert (found.version, found.previous_difference) == (0, None)
        assert (await it.step(1)).is_conclusive
        it.version = 7
        with pytest.raises(ProbeFailedError, match="does not have the trainer's weights") as failed:
            await it.sync.check(1)
        assert not failed.value.paused  # nobody has changed anything
        assert await it.policy() == (False, 1)


BEFORE_LOADING = ["/pause", "/is_paused"]
LOADING = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info"]


@pytest.mark.parametrize("path", BEFORE_LOADING)
async def test_what_fails_before_the_weights_change_lets_generation_go_on(tmp_path: Path, path: str) -> None:
    async with trainer(tmp_path, patience=1) as it, harness(it.service) as (call, _):
        it.engine.failing[path] = ("refuses", 1 if path == "/is_paused" else 1000)
        with pytest.raises(SyncError, match="Generation goes on as before") as failed:
            await it.step(1)
        assert not failed.value.paused
        assert await it.policy() == (False, 0)
        assert check_labels(await it.end(call)) == [0]


@pytest.mark.parametrize("path", leave_to_slow(LOADING, but=["/collective_rpc", "/weight_info"]))
async def test_what_fails_while_weights_change_stops_generation_until_an_update_succeeds(
    tmp_path: Path, path: str
) -> None:
    async with trainer(tmp_path) as it, harness(it.service) as (call, _):
        it.engine.failing[path] = ("refuses", 1)
        with pytest.raises(SyncError, match=r"it went wrong.* stands still until an update succeeds") as failed:
            await it.step(1)
        assert failed.value.paused
        assert await it.policy() == (True, 0)
        await it.step(1)
        assert await it.policy() == (False, 1)
        assert check_labels(await it.end(call)) == [0, 1]


@pytest.mark.parametrize(
    "path", leave_to_slow([*LOADING, "/pause", "/inference/v1/generate"], but=["/collective_rpc", "/pause"])
)
async def test_an_engine_that_is_away_for_a_moment_is_waited_for(tmp_path: Path, path: str) -> None:
    async with trainer(tmp_path) as it, harness(it.service) as (call, _):
        it.engine.failing[path] = ("breaks", 2)
        await it.step(1)
        assert await it.policy() == (False, 1)
        assert check_labels(await it.end(call)) == [0, 1]


async def test_an_engine_without_the_routes_says_how_it_is_started(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it:
        it.engine.failing["/collective_rpc"] = ("missing", 1)
        with pytest.raises(SyncError, match="VLLM_SERVER_DEV_MODE=1"):
            await it.step(1)


async def test_an_engine_that_keeps_its_old_label_is_not_believed(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it:
        await it.step(1)
        it.engine.failing["/update_weight_version"] = ("lies", 1)
        with pytest.raises(SyncError, match="It says that it has version 1") as failed:
            await it.step(2)
        assert failed.value.paused


async def test_an_engine_that_keeps_its_old_weights_is_found_out(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it:
        await it.step(1)
        it.engine.failing["/collective_rpc"] = ("lies", 1)
        with pytest.raises(ProbeFailedError, match="log-probabilities differ by") as failed:
            await it.step(2)
        assert (failed.value.version, failed.value.paused) == (2, True)
        assert (await it.policy())[0]
        assert (await it.step(3)).difference.is_within(EXACT)
        assert await it.policy() == (False, 3)


async def test_an_engine_that_cannot_be_stopped_after_a_failed_probe_is_told_of(tmp_path: Path) -> None:
    async with trainer(tmp_path, _Unheard) as it:
        assert isinstance(it.client, _Unheard)
        it.engine.failing["/collective_rpc"] = ("lies", 1)
        it.client.deaf = "second pause"
        with pytest.raises(ProbeFailedError, match="goes on with weights that nobody knows: no server") as failed:
            await it.step(1)
        assert not failed.value.paused
        assert "as before" not in str(failed.value)


async def test_an_engine_that_was_started_again_meanwhile_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with trainer(tmp_path) as it:
        assert [(await it.step(version)).lost_replicas for version in (1, 2)] == [[], []]
        it.engine.label = "default"
        assert (await it.step(3)).lost_replicas == [it.engine.url]
        assert f"{it.engine.url} was given version 2 and says that it has none of ours" in caplog.text
        it.engine.failing["/weight_info"] = ("breaks", 1)  # one that is away is waited for, and not suspected
        assert (await it.step(4)).lost_replicas == []


class _Unheard(AsyncClient):
    """A service that does not hear of new versions, or of the end of a pause, or of one more pause."""

    deaf = ""
    pauses = 0

    async def pause(self, mode: PauseMode = "freeze", *, timeout: float = 600) -> dict[str, Any]:
        self.pauses += 1
        if self.deaf == "second pause" and self.pauses == 2:
            raise ClientError("no server")
        return await super().pause(mode, timeout=timeout)

    async def set_policy(self, version: int, replica: str | None = None) -> dict[str, Any]:
        if self.deaf == "policy":
            raise ClientError("no server")
        return await super().set_policy(version, replica)

    async def resume(self) -> dict[str, Any]:
        if self.deaf == "resume":
            raise ClientError("no server")
        return await super().resume()


@pytest.mark.parametrize(("step", "announced"), [("policy", 0), ("resume", 1)])
async def test_a_service_that_is_away_leaves_generation_standing_still(
    tmp_path: Path, step: str, announced: int
) -> None:
    async with trainer(tmp_path, _Unheard) as it, harness(it.service) as (call, _):
        assert isinstance(it.client, _Unheard)
        it.client.deaf = step
        with pytest.raises(SyncError, match="no server") as failed:
            await it.step(1)
        assert failed.value.paused
        assert await it.policy() == (True, announced)
        with pytest.raises(SyncError, match="did not end"):
            await it.sync.check(1)
        it.client.deaf = ""
        await it.step(1)
        assert check_labels(await it.end(call)) == [0, 1]


async def test_an_engine_that_cannot_freeze_is_drained(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it, harness(it.service) as (call, _):
        for path in ("/pause", "/is_paused"):
            it.engine.failing[path] = ("missing", 1000)
        updating = asyncio.create_task(it.step(1))
        await wait_until(lambda: it.service.pool.gate.paused)
        assert not call.done()
        it.engine.hurry()
        await updating
        assert check_labels(await it.end(call)) == [0]
        assert await it.policy() == (False, 1)


async def test_a_run_without_engines_is_told_so(tmp_path: Path) -> None:
    async with trainer(tmp_path) as it:
        await it.client.remove_engine(it.engine.url)
        with pytest.raises(SyncError, match="has no engines"):
            await it.step(1)


async def test_a_run_without_engines_can_not_be_probed() -> None:
    async def engines() -> dict[str, list[object]]:
        return {"replicas": []}

    with pytest.raises(ConfigError, match="The run has no engines to probe"):
        await WeightUpdater(SimpleNamespace(engines=engines)).probe(lambda *_: [], 16, EngineSettings())
