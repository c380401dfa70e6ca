"""New weights into a real vLLM, while sessions run through the gateway."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from polar.client.async_client import AsyncClient
from polar.config import Settings
from polar.engines.http_client import EngineHttpClient
from polar.records.exchange import Exchange
from polar.service import Service
from polar.weight_sync.base import ProbeFailedError, SyncError
from polar.weight_sync.merged_weights import get_merged_weights
from polar.weight_sync.probe import Probe, choose_tolerance, make_scorer
from polar.weight_sync.updater import WeightSender
from polar.weight_sync.vllm import VllmFileTransport
from tests.engines.conftest import ROOT

pytestmark = pytest.mark.engines
UPDATES = 3
SESSIONS = 3


def loaded() -> Any:
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(ROOT / "model", dtype=torch.float32).eval()


@torch.no_grad()
def perturb(model: Any, version: int) -> None:
    """A step of training, as far as an engine can tell: each version from the one before it."""
    random = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.add_(0.02 * parameter.std() * torch.randn(parameter.shape, generator=random))


@pytest.fixture
def model() -> Any:
    return loaded()


@pytest.fixture
async def own_weights(vllm_url: str, tmp_path: Path) -> AsyncIterator[None]:
    """The weights that the server began with, afterwards: other tests use them, too."""
    yield
    engine, sync = EngineHttpClient(vllm_url, None, 60), VllmFileTransport(tmp_path / "own")
    await engine.request("POST", "/pause?mode=keep")
    sync.prepare(get_merged_weights(loaded()), 0)
    await sync.load(engine, 0)
    await engine.request("POST", "/update_weight_version", b'{"new_version":"default"}')
    await engine.request("POST", "/resume")
    await engine.close()


class Setup:
    def __init__(self, service: Service, client: AsyncClient, sync: WeightSender) -> None:
        self.service, self.client, self.sync = service, client, sync


@asynccontextmanager
async def setup(url: str, model: Any, data: Path) -> AsyncIterator[Setup]:
    settings = Settings.model_validate(
        {
            "engine": {"kind": "vllm", "urls": [url], "tokenizer": str(ROOT / "model")},
            "gateway": {"port": 0},
            "server": {"port": 0},
        }
    )
    probe = Probe(make_scorer(model), model.config.vocab_size, choose_tolerance("float32"))
    async with Service(settings, data / "service") as service, AsyncClient(service.control_url) as client:
        sync = WeightSender(client, VllmFileTransport(data / "weights"), settings.engine, probe)
        try:
            yield Setup(service, client, sync)
        finally:
            await sync.close()


async def talk(service: Service, number: int, over: asyncio.Event) -> list[Exchange]:
    """One session, turn after turn until all updates are done, and one more."""
    session, key = await service.sessions.create({})
    headers = {"Authorization": f"Bearer {key}"}
    messages = [{"role": "user", "content": f"Tell me a long story about the number {number}."}]
    last = False
    async with aiohttp.ClientSession() as http:
        while not last:
            last = over.is_set()
            body = {"model": "m", "messages": messages, "max_tokens": 48, "temperature": 1.0}
            async with http.post(
                f"{service.gateway_url}/v1/chat/completions", json=body | {"stream": True}, headers=headers
            ) as response:
                assert b"[DONE]" in await response.read()
            told = [exchange async for exchange in service.store.read_exchanges(session.session_id)][-1]
            assert told.reply is not None
            text = "".join(getattr(part, "text", "") for part in told.reply.parts)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return [exchange async for exchange in service.store.read_exchanges(session.session_id)]


def differences(exchanges: list[Exchange], version: int, model: Any) -> Iterator[float]:
    """Of all tokens that one version sampled, by a forward pass with the weights of that version."""
    score = make_scorer(model)
    for exchange in exchanges:
        assert exchange.prompt_ids is not None
        assert exchange.sampled_ids is not None
        assert exchange.logprobs is not None
        spans = [span for span in exchange.versions if span.version == version]
        if spans:
            recomputed = np.array(score(exchange.prompt_ids.tolist(), exchange.sampled_ids.tolist()))
            for span in spans:
                yield from np.abs(recomputed - exchange.logprobs)[span.start : span.stop].tolist()


@pytest.mark.usefixtures("own_weights")
async def test_sessions_run_on_across_updates_and_every_token_is_of_its_version(
    vllm_url: str, model: Any, tmp_path: Path
) -> None:
    async with setup(vllm_url, model, tmp_path) as it:
        assert (await it.sync.check(0)).difference.largest < 1e-3
        over = asyncio.Event()
        sessions = [asyncio.create_task(talk(it.service, number, over)) for number in range(SESSIONS)]
        for version in range(1, UPDATES + 1):
            await asyncio.sleep(4)
            await asyncio.to_thread(perturb, model, version)
            report = await it.sync.send(get_merged_weights(model), version)
            assert report.is_conclusive
            print(
                f"{report.difference}, before {report.previous_difference}, stood still {report.paused_seconds:.2f} s"
            )
            print({step: round(took, 2) for step, took in report.seconds.items()})
        over.set()
        exchanges = [exchange for session in await asyncio.gather(*sessions) for exchange in session]
    assert {exchange.untrainable for exchange in exchanges} == {None}
    crossing = [exchange for exchange in exchanges if len(exchange.versions) > 1]
    assert crossing, "no call stood frozen across an update"
    teacher = loaded()
    tokens = 0
    for version in range(UPDATES + 1):
        if version:
            perturb(teacher, version)
        found = list(differences(exchanges, version, teacher))
        tokens += len(found)
        assert found
        assert max(found) < 1e-3
        print(f"version {version}: {len(found)} tokens, largest difference {max(found):.2g}")
    assert tokens == sum(len(exchange.sampled_ids) for exchange in exchanges if exchange.sampled_ids is not None)
    print(f"{len(exchanges)} calls, {len(crossing)} of them across an update")


@pytest.mark.usefixtures("own_weights")
async def test_an_output_layer_that_stays_behind_is_found_out(vllm_url: str, model: Any, tmp_path: Path) -> None:
    """vLLM packs the output layer on CPUs: where embeddings are tied, it is loaded only if it is named itself."""
    async with setup(vllm_url, model, tmp_path) as it:
        perturb(model, 1)
        weights = get_merged_weights(model)
        del weights["lm_head.weight"]
        with pytest.raises(ProbeFailedError, match="does not have the trainer's weights"):
            await it.sync.send(weights, 1)
        assert (await it.client.policy())["paused"]
        assert (await it.sync.send(get_merged_weights(model), 2)).difference.largest < 1e-3
        assert not (await it.client.policy())["paused"]


@pytest.mark.usefixtures("own_weights")
async def test_weights_of_another_model_leave_generation_standing_still(
    vllm_url: str, model: Any, tmp_path: Path
) -> None:
    async with setup(vllm_url, model, tmp_path) as it:
        with pytest.raises(SyncError, match="did not take the weights") as failed:
            await it.sync.send(get_merged_weights(model) | {"model.other.weight": torch.zeros(3)}, 1)
        assert failed.value.paused
        assert (await it.client.policy())["paused"]
        perturb(model, 1)
        assert (await it.sync.send(get_merged_weights(model), 1)).difference.largest < 1e-3
