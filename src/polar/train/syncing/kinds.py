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

from polar.engines.http import EngineHttp
from polar.errors import ConfigError, EngineError
from polar.train.syncing.staging import Staging

_LOADING = 600.0  # seconds that an engine may take to read its weights


class Sync(Protocol):
    """Weights on their way to the replicas of a run. Failures of an engine are EngineErrors."""

    def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """While engines still sample; called in a thread."""
        ...

    async def load(self, engine: EngineHttp, version: int) -> None:
        """What was prepared is in place at one replica, and labelled, and nothing computed from older weights is left
        there. Generation stands still meanwhile. It may be asked for again after a failure."""
        ...

    async def held(self, engine: EngineHttp) -> int | None:
        """The version that the replica says it has; None where that is none of ours."""
        ...

    def arrived(self, version: int) -> None:
        """All replicas have it: what was prepared earlier may go, or be written over."""
        ...

    def close(self) -> None:
        """No more updates come from here; what the latest one has prepared is still needed."""
        ...


class _FileSync:
    def __init__(self, folder: Path) -> None:
        self.staging = Staging(folder)

    def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.staging.write(weights, version)

    def arrived(self, version: int) -> None:
        self.staging.keep_only(version)

    def close(self) -> None:
        self.staging.drop_spare()


class _Held(Struct):
    version: int | None = None
    weight_version: str | int | None = None


async def _held(engine: EngineHttp, path: str) -> int | None:
    body = await engine.request("GET", path)
    try:
        told = msgspec.json.decode(body, type=_Held)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{engine.url}{path} did not answer with a version: {error}.") from error
    version = told.version if told.version is not None else told.weight_version
    return int(str(version)) if str(version).isdecimal() else None


class EmbeddedSync(_FileSync):
    """Polar's own engine: one call does all of it."""

    async def load(self, engine: EngineHttp, version: int) -> None:
        body = {"path": str(self.staging.file(version)), "version": version}
        await engine.request("POST", "/update_weights", msgspec.json.encode(body), timeout=_LOADING)

    async def held(self, engine: EngineHttp) -> int | None:
        return await _held(engine, "/weight_version")


class VllmSync(_FileSync):
    """vLLM, by its development routes: the weights are read anew from a folder; then the calls that stand frozen and
    the prefix cache lose their keys and values, which are computed again when generation goes on."""

    async def load(self, engine: EngineHttp, version: int) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.staging.of(version))}}
        await _order(engine, "/collective_rpc", reload)
        await _order(engine, "/reset_prefix_cache?reset_running_requests=true")
        await _order(engine, "/update_weight_version", {"new_version": str(version)})

    async def held(self, engine: EngineHttp) -> int | None:
        return await _held(engine, "/weight_info")


async def _order(engine: EngineHttp, path: str, body: Mapping[str, object] | None = None) -> None:
    data = None if body is None else msgspec.json.encode(body)
    if not await engine.order(path, data, timeout=_LOADING):
        route = path.partition("?")[0]
        raise EngineError(f"{engine.url} has no {route}: start vLLM with VLLM_SERVER_DEV_MODE=1.", kind="unsupported")


_KINDS: dict[str, Callable[[Path], Sync]] = {"embedded": EmbeddedSync, "vllm": VllmSync}


def sync_of(kind: str, folder: Path) -> Sync:
    """For engines of this kind; `folder` is where files of weights go."""
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ConfigError(f"Engines of the kind {kind} can't be given new weights; those that can: {known}.")
    return _KINDS[kind](folder)
