"""The embedded engine and a trainer's model, for real: updates under a call that runs through the gateway."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.engines.embedded.server import EmbeddedServer
from polar.gateway.replica_observer import ReplicaObserver
from polar.records.exchange import Exchange
from polar.service import Service
from polar.weight_sync.base import create_transport
from polar.weight_sync.merged_weights import get_merged_weights
from polar.weight_sync.probe import Probe, choose_tolerance, make_scorer
from polar.weight_sync.updater import WeightSender
from tests.conditions import wait_until
from tests.integration.stack import settings
from tests.unit.engines.embedded import tiny
from tests.unit.weight_sync.test_updater import harness

UPDATES = 2
PASSES = 100
"""Of the model, for each part of the test: too few for the call to end, and enough for a probe."""


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def perturb(model: Any, version: int) -> None:
    random = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))


async def until_more(service: Service) -> None:
    """The running call has sampled some more tokens, so that the next update falls between."""
    (call,) = service.pool.replicas[0].running
    assert isinstance(call, ReplicaObserver)
    sampled = call.record.sampled
    wanted = len(sampled) + 3
    await wait_until(lambda: len(sampled) >= wanted)


def check(exchange: Exchange, folder: Path) -> None:
    assert exchange.untrainable is None
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    assert exchange.logprobs is not None
    assert [span.version for span in exchange.versions] == list(range(UPDATES + 1))
    model = loaded(folder)
    for span in exchange.versions:
        if span.version:
            perturb(model, span.version)
        expected = make_scorer(model)(exchange.prompt_ids.tolist(), exchange.sampled_ids.tolist())
        found = exchange.logprobs[span.start : span.stop]
        np.testing.assert_allclose(found, expected[span.start : span.stop], atol=1e-4)


async def test_weights_arrive_and_the_old_ones_would_not_pass(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(tiny.make_model_folder, tmp_path / "model")
    model = loaded(folder)
    probe = Probe(make_scorer(model), model.config.vocab_size, choose_tolerance("float32"))
    async with (
        EmbeddedServer(folder, tiny.OPTIONS.model_copy(update={"memory_gib": 0.02})) as engine,
        Service(settings([engine.url], engine={"kind": "embedded"}), tmp_path / "service") as service,
        AsyncClient(service.control_url) as client,
    ):
        files = create_transport("embedded", tmp_path / "weights")
        sync = WeightSender(client, files, EngineSettings(kind="embedded"), probe)
        assert (await sync.check(0)).difference.is_within(probe.tolerance)
        with tiny.PassLimiter(engine.core) as passes:
            passes.allow(PASSES)
            async with harness(service) as (call, _):
                for version in range(1, UPDATES + 1):
                    await until_more(service)
                    perturb(model, version)
                    updating = asyncio.create_task(sync.send(get_merged_weights(model), version))
                    await wait_until(lambda version=version: engine.core.version == version)
                    passes.allow(PASSES)  # for the probe, and for the call to go on
                    report = await updating
                    assert report.is_conclusive
                    assert report.previous_difference is not None
                    assert report.previous_difference.mean > 100 * report.difference.mean
                passes.allow(1000)
                check(await call, folder)
        await sync.close()
