"""The WeightTransport protocol and the errors of weight sync."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from polar import plugins
from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, PolarError

if TYPE_CHECKING:
    from torch import Tensor


class WeightTransport(Protocol):
    """Brings weights to the replicas of a run. Failures of an engine are EngineErrors.

    A plug-in of the entry-point group `polar.weight_sync`. The transport named like the engines' kind is used unless
    another is configured. It is constructed with the folder for weight files (docs/weights.md)."""

    def prepare(self, weights: "Mapping[str, Tensor]", version: int) -> None:
        """Prepares the weights for loading, while engines still sample. Called in a thread."""
        ...

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        """Loads the prepared weights at one replica, labels them there, and drops everything computed from older
        weights. Generation is paused meanwhile. May be called again after a failure."""
        ...

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        """The version that the replica reports; None if it is not one of Polar's."""
        ...

    def release_previous(self, version: int) -> None:
        """Releases or recycles earlier versions, since all replicas have this one."""
        ...

    def close(self) -> None:
        """Called after the last update. What it prepared is still needed."""
        ...


def create_transport(name: str, folder: Path) -> WeightTransport:
    """Creates a transport by its name, or by the engines' kind. `folder` is for weight files. Raises ConfigError."""
    if name not in plugins.list_names("weight_sync"):
        known = ", ".join(plugins.list_names("weight_sync"))
        raise ConfigError(f"Unknown weight transport {name!r}. Available: {known}.")
    return cast(WeightTransport, plugins.load("weight_sync", name)(folder))


class SyncError(PolarError):
    """An update of the engines' weights failed. `paused`: generation is paused until an update succeeds.
    `pause_failure`: why generation could not be paused although the weights are unknown."""

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
