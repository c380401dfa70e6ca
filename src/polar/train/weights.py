"""The trainer's weights in the engines of its run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.engines.base import server_root
from polar.engines.http import EngineHttp
from polar.errors import EngineError
from polar.train.settings import SyncSettings
from polar.train.sync import SyncError, WeightSync
from polar.train.syncing.kinds import sync_of
from polar.train.syncing.probe import Probe, Tolerance, tolerance_of
from polar.train.syncing.staging import clear_others, size_of, staging_folder
from polar.train.syncing.weights import weights_of
from polar.train.trainer import Updated, Versions


class Learning(Protocol):
    """Whoever trains: a Learner, or a bridge to another trainer."""

    model: Any  # of Hugging Face
    vocabulary: int

    def score(self, prompt: list[int], sampled: list[int]) -> Sequence[float]:
        """Log-probabilities of sampled tokens behind a prompt, at temperature 1."""
        ...


class EngineWeights:
    """The learner must stand still while it is at work: engines are compared with its model."""

    def __init__(
        self, client: AsyncClient, engine: EngineSettings, settings: SyncSettings, learner: Learning, output: Path
    ) -> None:
        self._client = client
        self._engine = engine
        self._learner = learner
        self._output = output
        self._folder = staging_folder(output, size_of(learner.model.state_dict()))
        self._files = sync_of(engine.kind, self._folder)
        probe = Probe(learner.score, learner.vocabulary, _tolerance(engine, settings, learner))
        self._sync = WeightSync(client, self._files, engine, probe, patience=settings.patience)

    async def versions(self) -> Versions:
        replicas = (await self._client.policy())["replicas"]
        held = await asyncio.gather(*(self._held(str(replica["url"])) for replica in replicas))
        return Versions({int(replica["version"]) for replica in replicas}, {one for one in held if one is not None})

    async def same(self, version: int) -> bool:
        try:
            await self._sync.check(version)
        except SyncError:
            return False
        return True

    async def update(self, version: int) -> Updated:
        report = await self._sync.update(weights_of(self._learner.model), version)
        clear_others(self._output, self._folder)
        return Updated(report.difference.largest, report.stood_still, report.seconds)

    async def close(self) -> None:
        await self._sync.close()

    async def _held(self, url: str) -> int | None:
        """None where it is away: it is waited for when it gets its weights."""
        http = EngineHttp(server_root(url), self._engine.api_key, self._engine.timeout)
        try:
            return await self._files.held(http) or 0  # none of ours: the model that it began with
        except EngineError:
            return None
        finally:
            await http.close()


def _tolerance(engine: EngineSettings, settings: SyncSettings, learner: Learning) -> Tolerance:
    """Of the coarser of both. An engine that doesn't say how it computes does so in half precision, on a GPU."""
    if settings.tolerance is not None:
        return Tolerance(settings.tolerance, settings.tolerance)
    theirs = engine.options.get("dtype", "auto")
    if theirs == "auto":
        theirs = "float32" if learner.model.device.type == "cpu" else "bfloat16"
    return tolerance_of(str(theirs), str(learner.model.dtype).removeprefix("torch."))
