"""What a way of weights into engines is, and what may go wrong on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from polar import plugins
from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, PolarError

if TYPE_CHECKING:
    from torch import Tensor


class WeightTransport(Protocol):
    """Weights on their way to the replicas of a run. Failures of an engine are EngineErrors.

    A plug-in of the entry-point group `polar.weight_sync`. The one with the name of the engines' kind is used unless
    another is named. It is called with the folder that files of weights go to (docs/weights.md)."""

    def prepare(self, weights: "Mapping[str, Tensor]", version: int) -> None:
        """Gets ready what replicas will load, while engines still sample. Called in a thread."""
        ...

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        """Puts what was prepared in place at one replica and labels it there; nothing computed from older weights is
        left. Generation stands still meanwhile. It may be called again after a failure."""
        ...

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        """The version that the replica says it has; None where that is none of ours."""
        ...

    def release_previous(self, version: int) -> None:
        """All replicas have this version: what was prepared earlier may go, or be written over."""
        ...

    def close(self) -> None:
        """No more updates come from here. What the latest one has prepared is still needed."""
        ...


def create_transport(name: str, folder: Path) -> WeightTransport:
    """By its name, or by the kind of the engines; `folder` is where files of weights go. Raises ConfigError."""
    if name not in plugins.names("weight_sync"):
        known = ", ".join(plugins.names("weight_sync"))
        raise ConfigError(f"There is no transport of weights for {name!r}. Available: {known}.")
    return cast(WeightTransport, plugins.load("weight_sync", name)(folder))


class SyncError(PolarError):
    """Engines did not get their weights. `paused`: generation stands still until an update succeeds. `pause_failure`:
    why generation could not be stopped, though the weights are unknown."""

    def __init__(self, message: str, *, paused: bool, pause_failure: str | None = None) -> None:
        rest = "Generation stands still until an update succeeds." if paused else "Generation goes on as before."
        if pause_failure is not None:
            rest = f"Generation can't be stopped, and goes on with weights that nobody knows: {pause_failure}"
        super().__init__(f"{message} {rest}")
        self.paused = paused


class ProbeFailedError(SyncError):
    """An engine samples with other weights than the trainer's, under their version: never use that version again."""

    def __init__(self, message: str, version: int, *, paused: bool, pause_failure: str | None = None) -> None:
        super().__init__(message, paused=paused, pause_failure=pause_failure)
        self.version = version


class WeightMismatchError(PolarError):
    """An engine samples with other weights than the trainer's."""
