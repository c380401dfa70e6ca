"""The trainer's weights in the engines of its run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.engines.base import normalize_engine_url
from polar.engines.http_client import EngineHttpClient
from polar.errors import EngineError
from polar.train.settings import SyncSettings
from polar.train.sync import SyncError, WeightSync
from polar.train.trainer import EngineVersions, WeightUpdateResult
from polar.train.weight_sync.merged_weights import get_merged_weights
from polar.train.weight_sync.probe import Probe, Tolerance, choose_tolerance
from polar.train.weight_sync.staging import choose_staging_folder, count_weight_bytes, remove_other_stagings
from polar.train.weight_sync.transports import create_transport


class ScoringModel(Protocol):
    """Whoever trains: a Learner, or a bridge to another trainer."""

    model: Any  # of Hugging Face
    vocab_size: int

    def score(self, prompt: list[int], sampled: list[int]) -> Sequence[float]:
        """Log-probabilities of sampled tokens behind a prompt, at temperature 1."""
        ...


class EngineWeightPublisher:
    """The learner must stand still while it is at work: engines are compared with its model."""

    def __init__(
        self, client: AsyncClient, engine: EngineSettings, settings: SyncSettings, learner: ScoringModel, output: Path
    ) -> None:
        self._client = client
        self._engine = engine
        self._learner = learner
        self._output = output
        self._folder = choose_staging_folder(output, count_weight_bytes(learner.model.state_dict()))
        self._transport = create_transport(engine.kind, self._folder)
        probe = Probe(learner.score, learner.vocab_size, _choose_tolerance(engine, settings, learner))
        self._sync = WeightSync(client, self._transport, engine, probe, patience=settings.patience)

    async def read_versions(self) -> EngineVersions:
        replicas = (await self._client.policy())["replicas"]
        held = await asyncio.gather(*(self._read_held_version(str(replica["url"])) for replica in replicas))
        return EngineVersions(
            {int(replica["version"]) for replica in replicas}, {one for one in held if one is not None}
        )

    async def has_trainer_weights(self, version: int) -> bool:
        try:
            await self._sync.check(version)
        except SyncError:
            return False
        return True

    async def publish(self, version: int) -> WeightUpdateResult:
        report = await self._sync.update(get_merged_weights(self._learner.model), version)
        remove_other_stagings(self._output, self._folder)
        return WeightUpdateResult(report.difference.largest, report.paused_seconds, report.seconds)

    async def close(self) -> None:
        await self._sync.close()

    async def _read_held_version(self, url: str) -> int | None:
        """None where it is away: it is waited for when it gets its weights."""
        http = EngineHttpClient(normalize_engine_url(url), self._engine.api_key, self._engine.timeout)
        try:
            return await self._transport.read_version(http) or 0  # none of ours: the model that it began with
        except EngineError:
            return None
        finally:
            await http.close()


def _choose_tolerance(engine: EngineSettings, settings: SyncSettings, learner: ScoringModel) -> Tolerance:
    """Of the coarser of both. An engine that doesn't say how it computes does so in half precision, on a GPU."""
    if settings.tolerance is not None:
        return Tolerance(settings.tolerance, settings.tolerance)
    theirs = engine.options.get("dtype", "auto")
    if theirs == "auto":
        theirs = "float32" if learner.model.device.type == "cpu" else "bfloat16"
    return choose_tolerance(str(theirs), str(learner.model.dtype).removeprefix("torch."))
