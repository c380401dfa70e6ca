"""A relay that breaks one connection: to a harness, a reply that never arrived."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def relay_breaking_call(url: str, call: int) -> AsyncIterator[str]:
    """The URL of a relay to `url` that breaks the connection of call number `call`, from 0, when its reply begins."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    relay = _Relay(host, int(port), call)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await _cancelled(relay.connections)


class _Relay:
    def __init__(self, host: str, port: int, call: int) -> None:
        self._host = host
        self._port = port
        self._call = call
        self._calls = 0
        self.connections: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)
        to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
        cut = asyncio.Event()
        ways = {
            asyncio.create_task(self._requests(reader, to_writer, cut)),
            asyncio.create_task(self._replies(to_reader, writer, cut)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # where one side goes, the other goes
        finally:
            await _cancelled(ways)
            for side in (writer, to_writer):
                if cut.is_set():
                    side.transport.abort()
                else:
                    side.close()

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        while data := await source.read(1 << 16):
            if data.startswith(b"POST "):
                if self._calls == self._call:
                    cut.set()
                self._calls += 1
            sink.write(data)
            await sink.drain()

    async def _replies(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        while (data := await source.read(1 << 16)) and not cut.is_set():
            sink.write(data)
            await sink.drain()


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """What they raised is how their connections ended, which is of no interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
