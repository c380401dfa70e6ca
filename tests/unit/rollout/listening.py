"""An app behind a real server, for what a test client can't show: streams, and what goes over the wire."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@contextlib.asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    config = uvicorn.Config(
        app, "127.0.0.1", 0, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = _Quiet(config)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await serving
