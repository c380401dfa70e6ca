"""What vLLM is asked to do for an update, of a server that keeps no label of its weights; and of CUDA IPC what can be
seen without a GPU."""

import base64
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, EngineError
from polar.weight_sync import vllm
from polar.weight_sync.base import create_transport
from polar.weight_sync.vllm import VllmFileTransport, VllmIpcTransport

LABELS = ("/update_weight_version", "/weight_info")


class Vllm:
    """Its development routes, as 0.24 has them."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.failing: set[str] = set()
        self.missing: set[str] = set(LABELS)
        self.process_start = "1.5e9"
        self.label = "default"
        self.is_updating = False

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/metrics":
            return web.Response(text=f"process_start_time_seconds {self.process_start}\n")
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.read()
        self.requests.append((path, msgspec.json.decode(body) if body else None))
        if path in self.failing or (path == "/start_weight_update" and self.is_updating):
            return web.json_response({"error": {"message": "it went wrong"}}, status=500)
        if path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        if path == "/update_weight_version":
            self.label = self.requests[-1][1]["new_version"]
        if path in ("/start_weight_update", "/finish_weight_update"):
            self.is_updating = path == "/start_weight_update"
        return web.json_response({})


@pytest.fixture
def server() -> Vllm:
    return Vllm()


@pytest.fixture
async def engine(server: Vllm) -> AsyncIterator[EngineHttpClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        client = EngineHttpClient(str(running.make_url("/")).rstrip("/"), None, 10)
        yield client
        await client.close()


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


async def test_without_labels_an_engine_has_what_its_process_was_given(
    server: Vllm, engine: EngineHttpClient, tmp_path: Path
) -> None:
    transport = VllmFileTransport(tmp_path)
    assert await transport.read_version(engine) is None
    transport.prepare({"a": torch.ones(2)}, 3)
    await transport.load(engine, 3)
    assert server.paths == ["/collective_rpc", "/reset_prefix_cache"]
    assert await transport.read_version(engine) == 3
    server.process_start = "1.6e9"
    assert await transport.read_version(engine) is None


async def test_an_engines_own_label_counts(server: Vllm, engine: EngineHttpClient, tmp_path: Path) -> None:
    server.missing.clear()
    transport = VllmFileTransport(tmp_path)
    transport.prepare({"a": torch.ones(2)}, 3)
    await transport.load(engine, 3)
    assert await transport.read_version(engine) == 3
    server.label = "default"
    assert await transport.read_version(engine) is None


async def test_tensors_are_handed_over_by_their_handles(
    server: Vllm, engine: EngineHttpClient, gpu: dict[str, Any], tmp_path: Path
) -> None:
    transport = create_transport("vllm_ipc", tmp_path)
    transport.prepare(gpu, 7)
    await transport.load(engine, 7)
    assert server.paths == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    update = server.requests[2][1]["update_info"]
    assert update["names"] == ["a.weight", "b.weight"]
    assert update["dtype_names"] == ["float32", "bfloat16"]
    assert update["shapes"] == [[2, 3], [4]]
    handles = pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))
    assert handles == [{"GPU-1": ("handle", (2, 3))}, {"GPU-1": ("handle", (4,))}]
    assert await transport.read_version(engine) == 7


async def test_an_update_that_failed_can_be_tried_again(
    server: Vllm, engine: EngineHttpClient, gpu: dict[str, Any], tmp_path: Path
) -> None:
    transport = VllmIpcTransport(tmp_path)
    transport.prepare(gpu, 1)
    server.failing = {"/update_weights"}
    with pytest.raises(EngineError):
        await transport.load(engine, 1)
    assert await transport.read_version(engine) is None
    assert not server.is_updating
    server.failing = set()
    await transport.load(engine, 1)
    assert await transport.read_version(engine) == 1


async def test_an_engine_without_weight_transfer_says_how_to_start_it(
    server: Vllm, engine: EngineHttpClient, gpu: dict[str, Any], tmp_path: Path
) -> None:
    transport = VllmIpcTransport(tmp_path)
    transport.prepare(gpu, 1)
    server.missing.add("/init_weight_transfer_engine")
    with pytest.raises(EngineError, match="--weight-transfer-config"):
        await transport.load(engine, 1)


def test_tensors_in_main_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a is not on a GPU"):
        VllmIpcTransport(tmp_path).prepare({"a": torch.ones(2)}, 1)
