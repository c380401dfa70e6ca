"""The contract of weight sync, kept by Polar's transports. Engines are stood in for; `make test-engines` asks vLLM."""

import base64
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import Tensor

from polar.plugins import load
from polar.testing import WeightSyncContract
from polar.testing.weight_sync import EmbeddedWeightServer, VllmWeightServer
from polar.weight_sync import vllm


class TestEmbedded(WeightSyncContract):
    plugin = load("weight_sync", "embedded")

    def make_server(self) -> EmbeddedWeightServer:
        return EmbeddedWeightServer()


class TestEmbeddedInMemory(TestEmbedded):
    """Where the file of the version before the last is written over."""

    @pytest.fixture(autouse=True)
    def memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("polar.weight_sync.files._SHARED_MEMORY", tmp_path)


class TestVllm(WeightSyncContract):
    """Of a release that keeps no label of its weights."""

    plugin = load("weight_sync", "vllm")

    def make_server(self) -> VllmWeightServer:
        return VllmWeightServer()


class TestVllmWithLabels(TestVllm):
    def make_server(self) -> VllmWeightServer:
        return VllmWeightServer(keeps_label=True)


class TensorOnGpu(Tensor):
    is_cuda = True  # type: ignore[assignment]


class IpcServer(VllmWeightServer):
    """Handles are lists of numbers here, which it copies as vLLM copies what handles lead to."""

    load_path = "/update_weights"

    async def answer(self, path: str, body: Any) -> web.Response:
        if path == self.load_path:
            assert self.is_updating
            update = body["update_info"]
            handles = pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))
            self.weights = {
                name: torch.tensor(handle["GPU-1"], dtype=getattr(torch, dtype)).reshape(shape)
                for name, dtype, shape, handle in zip(
                    update["names"], update["dtype_names"], update["shapes"], handles, strict=True
                )
            }
        return await super().answer(path, body)


class TestVllmIpc(WeightSyncContract):
    """Without a GPU: tensors count as one's, and their handles have what is in them."""

    plugin = load("weight_sync", "vllm_ipc")
    leaves_latest_files = False

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("synchronize", "ipc_collect"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
        monkeypatch.setattr(vllm, "reduce_tensor", lambda tensor: (None, tensor.flatten().tolist()))

    def make_server(self) -> IpcServer:
        return IpcServer(keeps_label=True)

    def make_weights(self, version: int) -> dict[str, Tensor]:
        return {name: tensor.as_subclass(TensorOnGpu) for name, tensor in super().make_weights(version).items()}
