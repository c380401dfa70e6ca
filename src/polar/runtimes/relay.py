"""The one way out of a sandbox: a socket that listens inside, accepted by us, whose bytes go to the gateway.

A sandbox's network namespace has nothing but loopback. A socket belongs to the namespace that it was made in, whoever
holds it: so a thread of ours, which has nothing else to do, steps into the namespace, makes the listening socket there
and steps back; the event loop accepts from it like from any other. No helper runs inside, and nothing inside can ask
for another address.
"""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from polar.errors import ConfigError
from polar.runtimes import linux
from polar.runtimes.files import NamespaceCaller

GATEWAY_PORT = 8100  # inside, where every sandbox has its ports to itself: the same in every session
_CHUNK_BYTES = 1 << 16
_MAX_CONNECTIONS = 128  # connections of one sandbox at a time: each takes two of the node's descriptors
_BACKLOG = 128
_namespace_executor = ThreadPoolExecutor(1, "polar-relay")


class GatewayRelay:
    """Serves one listening socket until it is closed."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        """Takes the socket over: it is closed with the relay, or here and now."""
        try:
            self._server = await asyncio.start_server(self._handle_connection, sock=listening, backlog=_BACKLOG)
        except BaseException:
            listening.close()
            raise

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await _cancel_all(self._connections)
        await asyncio.sleep(0)  # in which the event loop closes what was broken off

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.suppress(asyncio.CancelledError):  # by `close`; the event loop would log it
            await _close_after(writer, self._relay_to_gateway(reader, writer))

    async def _relay_to_gateway(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await _connect(self._gateway)
        except OSError:  # the gateway is not there: inside, the connection closes
            return
        await _close_after(to_writer, _run_both(_copy(reader, to_writer), _copy(to_reader, writer)))


async def _close_after(writer: asyncio.StreamWriter, work: Awaitable[None]) -> None:
    """Closes a connection behind the work: with all that was written, or at once where the work is broken off."""
    try:
        await work
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _run_both(first: Coroutine[None, None, None], second: Coroutine[None, None, None]) -> None:
    ways = {asyncio.create_task(first), asyncio.create_task(second)}
    try:
        await asyncio.wait(ways)
    finally:
        await _cancel_all(ways)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until the source ends; then the sink hears so too, and may still answer. Where either breaks, both end."""
    try:
        while data := await source.read(_CHUNK_BYTES):
            sink.write(data)
            await sink.drain()
        sink.write_eof()
    except OSError:
        sink.transport.abort()


async def _connect(gateway: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if gateway.startswith("unix:"):
        return await asyncio.open_unix_connection(gateway.removeprefix("unix:"))
    host, port = parse_address(gateway)
    return await asyncio.open_connection(host, port)


def parse_address(gateway: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`."""
    parts = urlsplit(gateway)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise ConfigError(f"The gateway's address must be http://HOST:PORT or unix:PATH, not {gateway!r}.")
    return parts.hostname, parts.port


async def _cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    """What they raised is how their connections ended, which is of no interest."""
    ended = set(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


async def listen_in_namespace(pidfd: int, worker: NamespaceCaller | None = None) -> socket.socket:
    """A socket that listens on loopback in the network namespace of a process (its pidfd). A node without root has a
    worker step in."""
    step = _listen_from_thread if worker is None else functools.partial(worker.call, enter_and_listen.__name__)
    making: asyncio.Future[socket.socket] = asyncio.get_running_loop().run_in_executor(_namespace_executor, step, pidfd)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if making.exception() is None:
            making.result().close()
        raise


def enter_and_listen(pidfd: int) -> socket.socket:
    """For a fork, which stays in the network of the process."""
    linux.setns(pidfd, linux.CLONE_NEWNET)
    return listen(GATEWAY_PORT)


def _listen_from_thread(pidfd: int) -> socket.socket:
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return enter_and_listen(pidfd)
        finally:
            linux.setns(own, linux.CLONE_NEWNET)
    finally:
        os.close(own)


def listen(port: int = 0) -> socket.socket:
    listening = socket.socket()
    with contextlib.ExitStack() as undone:
        undone.callback(listening.close)
        listening.bind(("127.0.0.1", port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        undone.pop_all()
    return listening
