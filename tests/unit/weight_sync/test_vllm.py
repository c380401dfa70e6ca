"""What vLLM is asked to do for an update; of CUDA IPC what can be seen without a GPU. That weights arrive, and failures
are seen, is the contract's matter."""

import base64
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, EngineError
from polar.testing.weight_sync import VllmWeightServer
from polar.weight_sync import vllm
from polar.weight_sync.base import create_transport
from polar.weight_sync.vllm import VllmFileTransport, VllmIpcTransport


@pytest.fixture
def server() -> VllmWeightServer:
    return VllmWeightServer()


@pytest.fixture
async def engine(server: VllmWeightServer) -> AsyncIterator[EngineHttpClient]:
    async with server.running() as client:
        yield client


def orders(server: VllmWeightServer) -> list[str]:
    """Routes that it was called at to change something."""
    return [path for path in server.paths if path != "/metrics"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tensors that count as a GPU's."""
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(vllm, "reduce_tensor", lambda tensor: (None, ("handle", tuple(tensor.shape))))

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    return {"a.weight": torch.ones(2, 3).as_subclass(OnGpu), "b.weight": torch.ones(4).bfloat16().as_subclass(OnGpu)}


async def test_caches_are_emptied_after_a_file_is_read(
    server: VllmWeightServer, engine: EngineHttpClient, tmp_path: Path
) -> None:
    transport = VllmFileTransport(tmp_path)
    transport.prepare({"a": torch.ones(2)}, 3)
    await transport.load(engine, 3)
    assert orders(server) == ["/collective_rpc", "/reset_prefix_cache"]


async def test_tensors_are_handed_over_by_their_handles(
    server: VllmWeightServer, engine: EngineHttpClient, gpu: dict[str, Any], tmp_path: Path
) -> None:
    transport = create_transport("vllm_ipc", tmp_path)
    transport.prepare(gpu, 7)
    await transport.load(engine, 7)
    assert orders(server) == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    update = next(body for path, body in server.requests if path == "/update_weights")["update_info"]
    assert update["names"] == ["a.weight", "b.weight"]
    assert update["dtype_names"] == ["float32", "bfloat16"]
    assert update["shapes"] == [[2, 3], [4]]
    handles = pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))
    assert handles == [{"GPU-1": ("handle", (2, 3))}, {"GPU-1": ("handle", (4,))}]
    assert await transport.read_version(engine) == 7


async def test_an_update_that_failed_is_finished(
    server: VllmWeightServer, engine: EngineHttpClient, gpu: dict[str, Any], tmp_path: Path
) -> None:
    """Else vLLM would refuse every later one."""
    transport = VllmIpcTransport(tmp_path)
    transport.prepare(gpu, 1)
    server.failing = {"/update_weights"}
    with pytest.raises(EngineError):
        await transport.load(engine, 1)
    assert not server.is_updating


async def test_an_engine_without_weight_transfer_says_how_to_start_it(
    server: VllmWeightServer, engine: EngineHttpClient, gpu: dict[str, Any], tmp_path: Path
) -> None:
    transport = VllmIpcTransport(tmp_path)
    transport.prepare(gpu, 1)
    server.missing.add("/init_weight_transfer_engine")
    with pytest.raises(EngineError, match="--weight-transfer-config"):
        await transport.load(engine, 1)


def test_tensors_in_main_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a is not on a GPU"):
        VllmIpcTransport(tmp_path).prepare({"a": torch.ones(2)}, 1)
