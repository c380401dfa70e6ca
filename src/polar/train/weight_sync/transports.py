"""How weights get into an engine, by its kind.

Both kinds here read a file on the same machine. A kind that sends tensors from GPU to GPU has nothing to write
beforehand, and its `load` does what the engine's own API asks for (docs/weights.md).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from torch import Tensor

from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, EngineError
from polar.train.weight_sync.staging import WeightStaging

_LOAD_SECONDS = 600.0  # seconds that an engine may take to read its weights


class WeightTransport(Protocol):
    """Weights on their way to the replicas of a run. Failures of an engine are EngineErrors."""

    def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """While engines still sample; called in a thread."""
        ...

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        """What was prepared is in place at one replica, and labelled, and nothing computed from older weights is left
        there. Generation stands still meanwhile. It may be asked for again after a failure."""
        ...

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        """The version that the replica says it has; None where that is none of ours."""
        ...

    def release_previous(self, version: int) -> None:
        """All replicas have it: what was prepared earlier may go, or be written over."""
        ...

    def close(self) -> None:
        """No more updates come from here; what the latest one has prepared is still needed."""
        ...


class _FileTransport:
    def __init__(self, folder: Path) -> None:
        self.staging = WeightStaging(folder)

    def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.staging.write(weights, version)

    def release_previous(self, version: int) -> None:
        self.staging.keep_only(version)

    def close(self) -> None:
        self.staging.drop_spare()


class _VersionReply(Struct):
    version: int | None = None
    weight_version: str | int | None = None


async def _read_version(engine: EngineHttpClient, path: str) -> int | None:
    body = await engine.request("GET", path)
    try:
        told = msgspec.json.decode(body, type=_VersionReply)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{engine.url}{path} did not answer with a version: {error}.") from error
    version = told.version if told.version is not None else told.weight_version
    return int(str(version)) if str(version).isdecimal() else None


class EmbeddedTransport(_FileTransport):
    """Polar's own engine: one call does all of it."""

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        body = {"path": str(self.staging.weights_file(version)), "version": version}
        await engine.request("POST", "/update_weights", msgspec.json.encode(body), timeout=_LOAD_SECONDS)

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        return await _read_version(engine, "/weight_version")


class VllmTransport(_FileTransport):
    """vLLM, by its development routes: the weights are read anew from a folder; then the calls that stand frozen and
    the prefix cache lose their keys and values, which are computed again when generation goes on."""

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.staging.version_folder(version))}}
        await _post(engine, "/collective_rpc", reload)
        await _post(engine, "/reset_prefix_cache?reset_running_requests=true")
        await _post(engine, "/update_weight_version", {"new_version": str(version)})

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        return await _read_version(engine, "/weight_info")


async def _post(engine: EngineHttpClient, path: str, body: Mapping[str, object] | None = None) -> None:
    data = None if body is None else msgspec.json.encode(body)
    if not await engine.post_if_supported(path, data, timeout=_LOAD_SECONDS):
        route = path.partition("?")[0]
        raise EngineError(f"{engine.url} has no {route}: start vLLM with VLLM_SERVER_DEV_MODE=1.", kind="unsupported")


_TRANSPORTS: dict[str, Callable[[Path], WeightTransport]] = {"embedded": EmbeddedTransport, "vllm": VllmTransport}


def create_transport(kind: str, folder: Path) -> WeightTransport:
    """For engines of this kind; `folder` is where files of weights go."""
    if kind not in _TRANSPORTS:
        known = ", ".join(sorted(_TRANSPORTS))
        raise ConfigError(f"Engines of the kind {kind} can't be given new weights; those that can: {known}.")
    return _TRANSPORTS[kind](folder)
