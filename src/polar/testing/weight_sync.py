"""What every transport of weights must keep:

    class TestMine(WeightSyncContract):
        plugin = Mine

        def make_server(self):
            return MyWeightServer()           # answers like your engine: a subclass of WeightServer

The server stands for an engine: it takes weights by the routes of its kind, can be made to fail, and loses what it was
given when it is started again. `EmbeddedWeightServer` and `VllmWeightServer` answer like Polar's own engine and vLLM.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

from polar.engines.http_client import EngineHttpClient
from polar.errors import EngineError
from polar.testing.contract import Contract, assert_helpful
from polar.weight_sync.base import WeightTransport

FIRST, SECOND, THIRD = 11, 12, 13
"""Versions that no engine has by itself."""

_UNREACHABLE = "http://127.0.0.1:1"
_TIMEOUT_SECONDS = 30.0


class WeightServer(ABC):
    """An engine's routes for weights, on loopback. `requests` are those that came: path and body."""

    load_path: ClassVar[str]  # the route by which it takes weights

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, Any]] = []
        self.failing: set[str] = set()  # routes that answer with an error
        self.missing: set[str] = set()  # routes that there are not
        self.answers_nonsense = False
        self.weights: dict[str, Tensor] | None = None  # those that it was given, as it has them
        self.source: Path | None = None  # the file that they are from

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    @abstractmethod
    async def answer(self, path: str, body: Any) -> web.Response:
        """What a route says that neither fails nor is missing."""

    @abstractmethod
    def restart(self) -> None:
        """It has what it began with: another process, which was given nothing."""

    def read_file(self, file: Path) -> None:
        self.weights, self.source = load_file(file), file

    async def handle(self, request: web.Request) -> web.Response:
        path, data = request.path, await request.read()
        if self.answers_nonsense:
            return web.Response(text="<html>Welcome!</html>")
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = msgspec.json.decode(data) if data else None
        self.requests.append((path, body))
        if path in self.failing:
            return web.json_response({"error": {"message": "it went wrong"}}, status=500)
        return await self.answer(path, body)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EngineHttpClient]:
        """Served, and a client of it."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = EngineHttpClient(self.url, None, _TIMEOUT_SECONDS)
        try:
            yield client
        finally:
            await client.close()
            await runner.cleanup()


class EmbeddedWeightServer(WeightServer):
    """Polar's own engine: one route takes a file and its version."""

    load_path = "/update_weights"

    def __init__(self) -> None:
        super().__init__()
        self.version = 0

    async def answer(self, path: str, body: Any) -> web.Response:
        if path == self.load_path:
            self.read_file(Path(body["path"]))
            self.version = body["version"]
        return web.json_response({"version": self.version})

    def restart(self) -> None:
        self.version, self.weights = 0, None


class VllmWeightServer(WeightServer):
    """vLLM's development routes. `keeps_label`: as newer releases, which say what they were told of their weights; of
    others the start of the process is known."""

    load_path = "/collective_rpc"
    LABEL_PATHS = frozenset({"/update_weight_version", "/weight_info"})

    def __init__(self, *, keeps_label: bool = False) -> None:
        super().__init__()
        self.missing = set() if keeps_label else set(self.LABEL_PATHS)
        self.label = "default"
        self.process_start = 1_500_000_000
        self.is_updating = False

    async def answer(self, path: str, body: Any) -> web.Response:
        if path == "/metrics":
            return web.Response(text=f"process_start_time_seconds {self.process_start}\n")
        if path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/collective_rpc":
            self.read_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        if path == "/start_weight_update" and self.is_updating:
            return web.json_response({"error": {"message": "an update has begun already"}}, status=500)
        if path in ("/start_weight_update", "/finish_weight_update"):
            self.is_updating = path == "/start_weight_update"
        return web.json_response({})

    def restart(self) -> None:
        self.label, self.weights = "default", None
        self.process_start += 1
        self.is_updating = False


class WeightSyncContract(Contract):
    kind = "weight_sync"
    leaves_latest_files: ClassVar[bool] = True  # after `close`, for an engine that is started again; else nothing

    def make_server(self) -> WeightServer:
        """An engine that this transport is for."""
        raise NotImplementedError(f"{type(self).__name__} has no engine to load weights into: override `make_server`.")

    def make_weights(self, version: int) -> dict[str, Tensor]:
        """A model's, with tied tensors and more than one dtype."""
        tied = torch.arange(6.0).reshape(2, 3) * version
        return {"embed": tied, "head": tied, "norm": torch.full((5,), version / 7).bfloat16()}

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Where files of weights go."""
        return tmp_path / "weights"

    @pytest.fixture
    def transport(self, folder: Path) -> WeightTransport:
        made: WeightTransport = self.plugin(folder)
        return made

    @pytest.fixture
    def server(self) -> WeightServer:
        return self.make_server()

    @pytest_asyncio.fixture
    async def engine(self, server: WeightServer) -> AsyncIterator[EngineHttpClient]:
        async with server.running() as client:
            yield client

    async def update(self, transport: WeightTransport, version: int, *engines: EngineHttpClient) -> None:
        """As the core does it, with engines that are well."""
        await asyncio.to_thread(transport.prepare, self.make_weights(version), version)
        for engine in engines:
            await transport.load(engine, version)
            assert await transport.read_version(engine) == version
        transport.release_previous(version)

    def assert_has(self, server: WeightServer, version: int) -> None:
        assert server.weights is not None
        assert_same_weights(server.weights, self.make_weights(version))

    # An update

    async def test_weights_arrive_to_the_bit_and_are_labelled(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient
    ) -> None:
        for version in (FIRST, SECOND, THIRD):
            await self.update(transport, version, engine)
            self.assert_has(server, version)

    async def test_an_engine_has_none_of_ours_before(
        self, transport: WeightTransport, engine: EngineHttpClient
    ) -> None:
        assert await transport.read_version(engine) not in (FIRST, SECOND, THIRD)

    async def test_preparing_leaves_engines_alone(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient
    ) -> None:
        """They still sample: with the weights from before, and with their label."""
        await self.update(transport, FIRST, engine)
        asked = len(server.requests)
        await asyncio.to_thread(transport.prepare, self.make_weights(SECOND), SECOND)
        assert len(server.requests) == asked
        assert await transport.read_version(engine) == FIRST
        self.assert_has(server, FIRST)

    async def test_preparing_leaves_the_trainers_weights_alone(self, transport: WeightTransport) -> None:
        given = self.make_weights(FIRST)
        await asyncio.to_thread(transport.prepare, given, FIRST)
        assert_same_weights(given, self.make_weights(FIRST))

    async def test_replicas_load_the_same(self, transport: WeightTransport) -> None:
        servers = [self.make_server() for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(server.running()) for server in servers]
            await asyncio.to_thread(transport.prepare, self.make_weights(FIRST), FIRST)
            await asyncio.gather(*(transport.load(engine, FIRST) for engine in engines))
            assert [await transport.read_version(engine) for engine in engines] == [FIRST] * 3
            for server in servers:
                self.assert_has(server, FIRST)

    # Failures

    async def test_a_load_that_failed_can_be_tried_again(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient
    ) -> None:
        """Also with weights that were prepared anew under the same version."""
        await self.update(transport, FIRST, engine)
        await asyncio.to_thread(transport.prepare, self.make_weights(THIRD), SECOND)
        server.failing = {server.load_path}
        with pytest.raises(EngineError) as error:
            await transport.load(engine, SECOND)
        assert_helpful(error.value)
        assert await transport.read_version(engine) != SECOND
        await asyncio.to_thread(transport.prepare, self.make_weights(SECOND), SECOND)
        server.failing = set()
        await transport.load(engine, SECOND)
        assert await transport.read_version(engine) == SECOND
        self.assert_has(server, SECOND)

    async def test_an_update_that_never_arrived_is_followed_by_another(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient
    ) -> None:
        await self.update(transport, FIRST, engine)
        await asyncio.to_thread(transport.prepare, self.make_weights(SECOND), SECOND)
        await self.update(transport, THIRD, engine)
        self.assert_has(server, THIRD)

    async def test_failures_of_an_engine_are_engine_errors(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient
    ) -> None:
        await self.update(transport, FIRST, engine)
        gone = EngineHttpClient(_UNREACHABLE, None, _TIMEOUT_SECONDS)
        for failing in (transport.load(gone, FIRST), transport.read_version(gone)):
            with pytest.raises(EngineError) as error:
                await failing
            assert_helpful(error.value)
        await gone.close()
        server.answers_nonsense = True
        with pytest.raises(EngineError) as error:
            await transport.read_version(engine)
        assert_helpful(error.value)

    async def test_an_engine_that_lost_its_weights_is_seen(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient
    ) -> None:
        """It was started again; and it can be given them again."""
        await self.update(transport, FIRST, engine)
        server.restart()
        assert await transport.read_version(engine) != FIRST
        await transport.load(engine, FIRST)
        assert await transport.read_version(engine) == FIRST
        self.assert_has(server, FIRST)

    # What is kept

    async def test_the_latest_stays_when_earlier_ones_are_released(self, transport: WeightTransport) -> None:
        """A replica that comes late, or again, loads what the others have."""
        early, late = self.make_server(), self.make_server()
        async with early.running() as first, late.running() as second:
            for version in (FIRST, SECOND, THIRD):
                await self.update(transport, version, first)
                transport.release_previous(version)
                await transport.load(second, version)
                self.assert_has(late, version)

    async def test_earlier_weights_do_not_pile_up(
        self, transport: WeightTransport, engine: EngineHttpClient, folder: Path
    ) -> None:
        sizes = []
        for version in range(FIRST, FIRST + 6):
            await self.update(transport, version, engine)
            sizes.append(count_bytes(folder))
        assert sizes[-1] == sizes[2]

    async def test_it_can_be_closed_at_any_time_and_again(self, transport: WeightTransport, folder: Path) -> None:
        transport.close()
        await asyncio.to_thread(transport.prepare, self.make_weights(FIRST), FIRST)
        transport.close()
        transport.close()
        self.plugin(folder).close()

    async def test_closed_it_leaves_what_an_engine_needs_and_nothing_else(
        self, transport: WeightTransport, server: WeightServer, engine: EngineHttpClient, folder: Path
    ) -> None:
        """One that is started again reads the latest weights, where it reads files at all."""
        for version in (FIRST, SECOND, THIRD):
            await self.update(transport, version, engine)
        transport.close()
        if not self.leaves_latest_files:
            assert count_bytes(folder) == 0
            return
        assert server.source is not None
        assert_same_weights(load_file(server.source), self.make_weights(THIRD))
        assert count_bytes(folder) == server.source.stat().st_size


def count_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def assert_same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
