"""Updates vLLM's weights through its development routes (VLLM_SERVER_DEV_MODE=1), while it is paused.

    VllmFileTransport   vLLM reads files from a folder that both processes can access
    VllmIpcTransport    vLLM copies the trainer's tensors on the same GPU (CUDA IPC), without files or host memory

Afterwards the KV cache of paused calls and the prefix cache are dropped; they are computed again with the new weights
when generation resumes.

Newer releases store a label of their weights (`/update_weight_version`). For others this process remembers which engine
process has which version; a restarted engine has lost it.
"""

import base64
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, EngineError
from polar.weight_sync.files import LOAD_SECONDS, FileTransport, parse_version

_PROCESS_START_METRIC = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)


class _LoadedVersion(Struct, frozen=True):
    version: int
    process_start: bytes  # the start time of the engine's process, from its metrics


class _WeightLabels:
    """Reads and writes the version label of each engine."""

    def __init__(self) -> None:
        self._loaded: dict[str, _LoadedVersion] = {}  # by address, for engines without labels

    async def write(self, engine: EngineHttpClient, version: int) -> None:
        body = msgspec.json.encode({"new_version": str(version)})
        if not await engine.post_if_supported("/update_weight_version", body):
            self._loaded[engine.url] = _LoadedVersion(version, await _read_process_start(engine))

    async def read(self, engine: EngineHttpClient) -> int | None:
        path = "/weight_info"
        body = await engine.get_if_supported(path)
        if body is not None:
            return parse_version(engine, path, body)
        loaded = self._loaded.get(engine.url)
        if loaded is None or loaded.process_start != await _read_process_start(engine):
            return None
        return loaded.version


class VllmFileTransport(FileTransport):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._labels = _WeightLabels()

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.staging.get_version_folder(version))}}
        await _post(engine, "/collective_rpc", reload)
        await _reset_caches(engine)
        await self._labels.write(engine, version)

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        return await self._labels.read(engine)


class VllmIpcTransport:
    """The engine runs on this GPU, with `--weight-transfer-config '{"backend": "ipc"}'`. Handles of the tensors travel
    as a pickle, which vLLM takes only with VLLM_ALLOW_INSECURE_SERIALIZATION=1: leave its port on loopback."""

    def __init__(self, folder: Path) -> None:  # noqa: ARG002  nothing is written
        self._version: int | None = None
        self._tensors: dict[str, Tensor] = {}
        self._labels = _WeightLabels()

    def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Keeps the tensors until the next version: an engine may be asked to load them again."""
        on_host = next((name for name, tensor in weights.items() if not tensor.is_cuda), None)
        if on_host is not None:
            raise ConfigError(
                f"{on_host} is not on a GPU, and the transport vllm_ipc hands over GPU memory: train on the engine's "
                'GPU and leave it room for the weights, or use the transport "vllm", which goes through files.'
            )
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
        self._version = version

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        if version != self._version:
            raise EngineError(f"Version {version} is not prepared.")
        await _post(engine, "/init_weight_transfer_engine", {"init_info": {}}, hint=_IPC_HINT)
        await _post(engine, "/start_weight_update", {"is_checkpoint_format": True})
        try:
            torch.cuda.synchronize()  # pending kernels must finish before the engine reads the memory
            await _post(engine, "/update_weights", {"update_info": _make_update(self._tensors)})
        finally:
            # Also after a failure: vLLM refuses further updates until this one is finished.
            await _post(engine, "/finish_weight_update")
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        await _reset_caches(engine)
        await self._labels.write(engine, version)

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        return await self._labels.read(engine)

    def release_previous(self, version: int) -> None:
        """Nothing earlier is kept."""

    def close(self) -> None:
        self._tensors, self._version = {}, None


_IPC_HINT = """start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "ipc"}'"""


def _make_update(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    device = next(iter(tensors.values())).device
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]  # type: ignore[no-untyped-call]
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "packed": False,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


async def _reset_caches(engine: EngineHttpClient) -> None:
    await _post(engine, "/reset_prefix_cache?reset_running_requests=true")


async def _read_process_start(engine: EngineHttpClient) -> bytes:
    match = _PROCESS_START_METRIC.search(await engine.get_if_supported("/metrics") or b"")
    if match is None:
        raise EngineError(
            f"{engine.url} has neither /update_weight_version nor process_start_time_seconds in /metrics, so its "
            "weights can't be identified.",
            kind="unsupported",
        )
    return match[1]


async def _post(
    engine: EngineHttpClient,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    hint: str = "start vLLM with VLLM_SERVER_DEV_MODE=1",
) -> None:
    data = None if body is None else msgspec.json.encode(body)
    if not await engine.post_if_supported(path, data, timeout=LOAD_SECONDS):
        route = path.partition("?")[0]
        raise EngineError(f"{engine.url} has no {route}: {hint}.", kind="unsupported")
