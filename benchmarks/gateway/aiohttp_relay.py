"""A bare pass-through in aiohttp: bytes in, bytes out, nothing parsed and nothing kept. The floor for this stack.

python -m benchmarks.gateway.aiohttp_relay ENGINE_URL PORT
"""

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


class Relay:
    def __init__(self, engine_url: str) -> None:
        self._url = engine_url
        self._http: aiohttp.ClientSession | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(text="ok")
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20)
        headers = {"Content-Type": "application/json"}
        async with self._http.post(self._url + request.path, data=await request.read(), headers=headers) as upstream:
            if upstream.content_type == "application/json":
                return web.Response(body=await upstream.read(), status=upstream.status, content_type="application/json")
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for piece in upstream.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


async def serve(engine_url: str, port: int) -> None:
    relay = Relay(engine_url)
    runner = web.ServerRunner(web.Server(relay.handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
