"""An engine whose weights can be changed, and where each step of that can fail.

It stands before a scripted one, whose log-probabilities depend on a version: that is its weights. They change when they
are reloaded, and not when they are labelled: so whoever labels tokens wrongly is found out by their log-probabilities.
What the engine itself would say of versions is left out of its replies.
"""

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
from aiohttp import web
from safetensors import safe_open

from polar.engines.scripted import Play, ScriptedServer

Failure = Literal["refuses", "breaks", "lies", "missing"]
_SPANS = re.compile(rb'"weight_versions":\[[^\]]*\]')


class Unhurried(ScriptedServer):
    """Samples at the pace of its play until it is told to hurry."""

    def hurry(self) -> None:
        for generation in self.backend.running:
            generation.interval = 0.0


class EngineWithWeights:
    def __init__(self, server: Unhurried, http: aiohttp.ClientSession) -> None:
        self.hurry = server.hurry
        self._upstream = server.url
        self._http = http
        self.url = ""
        self.label = "default"
        self.failing: dict[str, tuple[Failure, int]] = {}  # by path: how, and how many times more
        self.asked: Counter[str] = Counter()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked[request.path] += 1
        how, left = self.failing.get(request.path, ("refuses", 0))
        if left:
            self.failing[request.path] = (how, left - 1)
            if how == "refuses":
                return web.json_response({"error": {"message": "it went wrong"}}, status=500)
            if how == "missing":
                return web.json_response({"detail": "Not Found"}, status=404)
            if how == "breaks":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        body = await request.read()
        if request.path == "/collective_rpc":
            if not left:  # else it lies
                await self._load(Path((await request.json())["kwargs"]["weights_path"]))
            return web.json_response({"results": [None]})
        if request.path == "/update_weight_version":
            if not left:
                self.label = (await request.json())["new_version"]
            return web.json_response({"success": True})
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        return await self._passed(request, body)

    async def _load(self, folder: Path) -> None:
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}  # transformers asks for that
        told_version = {"new_version": folder.name}
        async with self._http.post(f"{self._upstream}/update_weight_version", json=told_version) as told:
            assert told.status == 200

    async def _passed(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        url = self._upstream + request.path_qs
        async with self._http.request(request.method, url, data=body or None, headers=headers) as reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            await response.prepare(request)
            async for line in reply.content:
                await response.write(_SPANS.sub(b'"weight_versions":null', line))
            await response.write_eof()
        return response


@asynccontextmanager
async def engine_with_weights(play: Play) -> AsyncIterator[EngineWithWeights]:
    async with (
        Unhurried(play) as upstream,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20) as http,
    ):
        engine = EngineWithWeights(upstream, http)
        runner = web.ServerRunner(web.Server(engine.handle, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        engine.url = f"http://{host}:{port}"
        try:
            yield engine
        finally:
            await runner.cleanup()
