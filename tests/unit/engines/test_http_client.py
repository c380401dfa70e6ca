"""The connection to an engine: a real server on a socket, which closes connections when it likes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from polar.engines.http_client import EngineHttpClient
from polar.errors import EngineError

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class ClosingServer:
    """Answers the first request of a connection, and closes the connection at the second one without a word."""

    def __init__(self, answers: int) -> None:
        self.requests = 0
        self._answers = answers  # of a connection
        self._together = asyncio.Event()

    async def hold(self, count: int, engine: EngineHttpClient) -> None:
        """Has the engine's pool keep so many connections."""
        calls = [asyncio.ensure_future(engine.post("/x", b"{}")) for _ in range(count)]
        while self.requests < count:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)
        self._together.set()
        for response in await asyncio.gather(*calls):
            await engine.read(response)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(self._answers):
                await reader.readuntil(b"\r\n\r\n{}")
                self.requests += 1
                await self._together.wait()
                writer.write(ANSWER)
            await reader.readuntil(b"\r\n\r\n{}")
            self.requests += 1
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answers: int) -> AsyncIterator[tuple[ClosingServer, EngineHttpClient]]:
    closing = ClosingServer(answers)
    server = await asyncio.start_server(closing.serve, "127.0.0.1", 0)
    engine = EngineHttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 60.0)
    try:
        yield closing, engine
    finally:
        await engine.close()
        server.close()


async def test_many_kept_connections_that_close_at_once_fail_no_call() -> None:
    async with serving(answers=1) as (server, engine):
        await server.hold(4, engine)
        assert await engine.read(await engine.post("/x", b"{}")) == b"{}"
        assert server.requests == 4 + 4 + 1  # each kept connection was tried once, then a new one


async def test_a_new_connection_that_closes_is_a_failure() -> None:
    """A request that ends the engine is not sent again and again."""
    async with serving(answers=0) as (server, engine):
        with pytest.raises(EngineError):
            await engine.post("/x", b"{}")
        assert server.requests == 1
