"""Publishes the weights of a model in this process to the engines of a run.

For the reference trainer, and for trainers that hold a Hugging Face model.

    model ─► merged weights ─► transport of the engines' kind ─► WeightSender ─► the model's own scores as the probe
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field

from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.engines.base import normalize_engine_url
from polar.engines.http_client import EngineHttpClient
from polar.errors import EngineError
from polar.weight_sync.base import SyncError, create_transport
from polar.weight_sync.files import choose_staging_folder, count_weight_bytes, remove_other_stagings
from polar.weight_sync.merged_weights import get_merged_weights
from polar.weight_sync.probe import Probe, Scorer, Tolerance, choose_tolerance, make_scorer
from polar.weight_sync.updater import PATIENCE_SECONDS, SyncReport, WeightSender


class ScoringModel(Protocol):
    """A model in training: the reference trainer's Learner, or another trainer's model."""

    model: Any  # a Hugging Face model
    vocab_size: int

    def score(self, prompt: list[int], sampled: list[int]) -> Sequence[float]:
        """The log-probabilities of sampled tokens after a prompt, at temperature 1."""
        ...


class PlainScoringModel:
    """A Hugging Face model, scored by a plain forward pass unless `score` says otherwise."""

    def __init__(self, model: Any, score: Scorer | None = None) -> None:
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._score = score or make_scorer(model)

    def score(self, prompt: list[int], sampled: list[int]) -> Sequence[float]:
        return self._score(prompt, sampled)


class EngineVersions(Struct):
    """Versions of the engines' weights: as labeled by the service, and as reported by the engines."""

    labeled: set[int]
    held: set[int] = field(default_factory=set)


class ModelWeightPublisher:
    """Keeps the engines of a run on the weights of one model. The model must not change while a method runs: engines
    are compared with it."""

    def __init__(
        self,
        client: AsyncClient,
        engine: EngineSettings,
        model: ScoringModel,
        output: Path,
        *,
        transport: str | None = None,
        tolerance: float | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`engine` has the kind of the run's engines; `output` is where files go that don't fit into memory;
        `transport` is a plug-in of polar.weight_sync [default: the one of the engines' kind];
        `tolerance` is the probe's [default: by what engine and model compute in]."""
        self._client = client
        self._engine = engine
        self._model = model
        self._output = output
        self._folder = choose_staging_folder(output, count_weight_bytes(model.model.state_dict()))
        self._transport = create_transport(transport or engine.kind, self._folder)
        allowed = _choose_tolerance(engine, model) if tolerance is None else Tolerance(tolerance, tolerance)
        probe = Probe(model.score, model.vocab_size, allowed)
        self._sender = WeightSender(client, self._transport, engine, probe, patience=patience)
        self._version: int | None = None  # published last by `publish_next`

    async def read_versions(self) -> EngineVersions:
        replicas = (await self._client.policy())["replicas"]
        held = await asyncio.gather(*(self._read_held_version(str(replica["url"])) for replica in replicas))
        return EngineVersions(
            {int(replica["version"]) for replica in replicas}, {version for version in held if version is not None}
        )

    async def has_trainer_weights(self, version: int) -> bool:
        """Whether all engines sample with the model's weights."""
        try:
            await self._sender.check(version)
        except SyncError:
            return False
        return True

    async def publish(self, version: int) -> SyncReport:
        """Sends the model's weights to the engines and probes them. Raises SyncError."""
        report = await self._sender.send(get_merged_weights(self._model.model), version)
        remove_other_stagings(self._output, self._folder)
        return report

    async def publish_next(self) -> int:
        """Publishes under a version that stands for no other weights, and returns it. Engines that have the model's
        weights the first time keep their version. Raises SyncError."""
        if self._version is None:
            versions = await self.read_versions()
            self._version = max(versions.labeled | versions.held, default=0)
            if versions.labeled == {self._version} and await self.has_trainer_weights(self._version):
                return self._version
        self._version += 1
        await self.publish(self._version)
        return self._version

    async def close(self) -> None:
        await self._sender.close()

    async def _read_held_version(self, url: str) -> int | None:
        """None if the engine is unavailable; the next update waits for it."""
        http = EngineHttpClient(normalize_engine_url(url), self._engine.api_key, self._engine.timeout)
        try:
            return await self._transport.read_version(http) or 0  # not one of Polar's: its initial model
        except EngineError:
            return None
        finally:
            await http.close()


def _choose_tolerance(engine: EngineSettings, model: ScoringModel) -> Tolerance:
    """The tolerance for the coarser dtype of both. An engine on a GPU without a configured dtype counts as bfloat16."""
    engine_dtype = engine.options.get("dtype", "auto")
    if engine_dtype == "auto":
        engine_dtype = "float32" if model.model.device.type == "cpu" else "bfloat16"
    return choose_tolerance(str(engine_dtype), str(model.model.dtype).removeprefix("torch."))
