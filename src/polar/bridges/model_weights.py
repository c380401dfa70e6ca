"""The weights of a Hugging Face model that a trainer holds in its own process, in the engines of its run: by files, for
engines on the same machine (docs/weights.md), announced under a version of their own, and proved to be there."""

import atexit
from pathlib import Path
from typing import Any

from polar.bridges.bridge import Bridge
from polar.config import EngineSettings
from polar.train.engine_weights import EngineWeightPublisher
from polar.train.settings import SyncSettings
from polar.train.weight_sync.probe import Scorer, make_scorer
from polar.train.weight_sync.staging import remove_staged_weights


class _ScoringModel:
    def __init__(self, model: Any, score: Scorer) -> None:
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.score = score


class ModelWeightPublisher:
    """Whoever calls leaves the model alone meanwhile."""

    def __init__(
        self, bridge: Bridge, engine: EngineSettings, model: Any, output: Path, score: Scorer | None = None
    ) -> None:
        """`engine` has the kind of the run's engines; `output` is where files go that don't fit into memory; `score` is
        how the model says what it thinks of tokens, where a plain forward pass does not."""
        self._bridge = bridge
        learning = _ScoringModel(model, score or make_scorer(model))
        self._publisher = EngineWeightPublisher(bridge.rollouts.client, engine, SyncSettings(), learning, output)
        self._version: int | None = None
        self._output = output
        atexit.register(remove_staged_weights, output)  # what lies in memory would outlive a trainer that fails

    @property
    def version(self) -> int:
        """Of the weights that the engines have."""
        assert self._version is not None
        return self._version

    def publish(self) -> None:
        """The engines have the model's weights, under a version that stands for no others. The first time they may have
        had them before. Raises SyncError: they did not take them, or sample with others."""
        if self._version is None:
            known = self._bridge.run(self._publisher.read_versions())
            self._version = max(known.labeled | known.held, default=0)
            if known.labeled == {self._version} and self._bridge.run(
                self._publisher.has_trainer_weights(self._version)
            ):
                return
        self._version += 1
        self._bridge.run(self._publisher.publish(self._version))

    def close(self) -> None:
        self._bridge.run(self._publisher.close())
        remove_staged_weights(self._output)
