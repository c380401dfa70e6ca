"""A proxy between somebody and the server that forwards every request, and then loses some of the answers.

Whoever asked sees a connection that breaks, or nothing at all; the server has heard all the same."""

import asyncio
import contextlib
import random
from types import TracebackType

import aiohttp
from aiohttp import web


class Lossy:
    """Use as an async context manager."""

    def __init__(
        self, server_url: str, share: float, seed: int = 0, *, silent: str | None = None, most: int | None = None
    ) -> None:
        """`silent`: the end of paths whose lost answers leave the connection as it is, for ever. `most`: bytes of a
        request's JSON, as some proxies allow so many."""
        self._silent = silent
        self._most = most
        self._server_url = server_url
        self._share = share
        self._chance = random.Random(seed)
        self._stack = contextlib.AsyncExitStack()
        self._http: aiohttp.ClientSession
        self.url = ""
        self.forwarded = 0
        self.lost = 0
        self.refused = 0

    async def __aenter__(self) -> "Lossy":
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self._most is not None and request.content_type == "application/json" and len(body) > self._most:
            self.refused += 1
            return web.Response(status=413, text="Request Entity Too Large")
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _OWN}
        try:
            async with self._http.request(
                request.method, self._server_url + request.raw_path, data=body, headers=headers
            ) as answer:
                content = await answer.read()
        except aiohttp.ClientError:
            return self._lose(request)
        self.forwarded += 1
        if self._chance.random() < self._share:
            self.lost += 1
            if self._silent is not None and request.path.endswith(self._silent):
                await asyncio.sleep(3600)
            return self._lose(request)
        return web.Response(
            status=answer.status, body=content, headers={"Content-Type": answer.headers.get("Content-Type", "")}
        )

    def _lose(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)


_OWN = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})
