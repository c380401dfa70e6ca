"""The weights of a Hugging Face model that a trainer holds in its own process, in the engines of its run: by files, for
engines on the same machine (docs/weights.md), announced under a version of their own, and proved to be there."""

import atexit
from pathlib import Path
from typing import Any

from polar.bridges.bridge import Bridge
from polar.config import EngineSettings
from polar.train.settings import SyncSettings
from polar.train.syncing.probe import Scorer, scorer
from polar.train.syncing.staging import clear
from polar.train.weights import EngineWeights


class _Learning:
    def __init__(self, model: Any, score: Scorer) -> None:
        self.model = model
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.score = score


class ModelWeights:
    """Whoever calls leaves the model alone meanwhile."""

    def __init__(
        self, bridge: Bridge, engine: EngineSettings, model: Any, output: Path, score: Scorer | None = None
    ) -> None:
        """`engine` has the kind of the run's engines; `output` is where files go that don't fit into memory; `score` is
        how the model says what it thinks of tokens, where a plain forward pass does not."""
        self._bridge = bridge
        learning = _Learning(model, score or scorer(model))
        self._engines = EngineWeights(bridge.rollouts.client, engine, SyncSettings(), learning, output)
        self._version: int | None = None
        self._output = output
        atexit.register(clear, output)  # what lies in memory would outlive a trainer that fails

    @property
    def version(self) -> int:
        """Of the weights that the engines have."""
        assert self._version is not None
        return self._version

    def update(self) -> None:
        """The engines have the model's weights, under a version that stands for no others. The first time they may have
        had them before. Raises SyncError: they did not take them, or sample with others."""
        if self._version is None:
            known = self._bridge.run(self._engines.versions())
            self._version = max(known.labelled | known.held, default=0)
            if known.labelled == {self._version} and self._bridge.run(self._engines.same(self._version)):
                return
        self._version += 1
        self._bridge.run(self._engines.update(self._version))

    def close(self) -> None:
        self._bridge.run(self._engines.close())
        clear(self._output)
