"""The relay: bytes both ways, ends that are told, and nothing left when it is closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.runtimes import relay
from polar.runtimes.relay import GatewayRelay


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers in capitals once the caller has said all."""
    writer.write((await reader.read()).upper())
    await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def relayed(gateway: str) -> AsyncIterator[int]:
    serving = GatewayRelay(gateway)
    listening = relay.listen()
    await serving.serve(listening)
    try:
        yield listening.getsockname()[1]
    finally:
        await serving.close()


async def say(port: int, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_over_tcp() -> None:
    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    async with server, relayed(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as port:
        text = b"abc" * 1_000_000
        answers = await asyncio.gather(*(say(port, text) for _ in range(3)))
        assert answers == [text.upper()] * 3


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    server = await asyncio.start_unix_server(shout, tmp_path / "s")
    async with server, relayed(f"unix:{tmp_path / 's'}") as port:
        assert await say(port, b"hello") == b"HELLO"


async def test_where_there_is_no_gateway_the_connection_ends(tmp_path: Path) -> None:
    async with relayed(f"unix:{tmp_path / 'none'}") as port:
        with contextlib.suppress(ConnectionResetError):
            assert await say(port, b"hello") == b""


async def test_closing_ends_connections() -> None:
    async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(forever, "127.0.0.1", 0) as server:
        async with relayed(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("gateway", ["127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1", ""])
def test_an_address_that_is_none(gateway: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        relay.parse_address(gateway)
