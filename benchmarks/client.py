"""The load generator's side of HTTP: a connection that writes ready-made requests and notes when bytes come back."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from polar.errors import PolarError

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class BenchmarkError(PolarError):
    """A server did not do what is to be measured; figures would mean nothing."""


class HttpAnswer(Struct):
    status: int
    body: bytes  # as it stands on the wire; empty where `on_data` got it
    sent_at: float
    first_at: float  # the first byte of the body
    ended_at: float
    chunked: bool = False

    def read_content(self) -> bytes:
        """The body without its chunks' frames."""
        if not self.chunked:
            return self.body
        pieces, at = [], 0
        while length := int(self.body[at : (line := self.body.index(b"\r\n", at))], 16):
            pieces.append(self.body[line + 2 : line + 2 + length])
            at = line + 4 + length
        return b"".join(pieces)


class Connection(asyncio.Protocol):
    """Keep-alive, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[HttpAnswer] | None = None
        self._on_data: Callable[[bytes], None] | None = None
        self._reset()

    @classmethod
    async def open(cls, port: int) -> "Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    async def call(self, request: bytes, on_data: Callable[[bytes], None] | None = None) -> HttpAnswer:
        """Sends a request and waits for the whole answer; `on_data` gets the body's bytes as they come."""
        if self._transport is None:
            raise BenchmarkError("A server closed its connection.")
        self._reset()
        self._on_data = on_data
        self._waiter = asyncio.get_running_loop().create_future()
        self._sent_at = time.monotonic()
        self._transport.write(request)
        answer = await self._waiter
        if answer.status != 200:
            raise BenchmarkError(f"A server answered {answer.status}: {answer.body[:500].decode(errors='replace')}")
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _reset(self) -> None:
        self._head: bytes | None = None
        self._pieces: list[bytes] = []
        self._missing = 0
        self._chunked = False
        self._tail = b""
        self._sent_at = self._first_at = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(BenchmarkError(f"A server closed its connection before its answer: {exc}."))

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self._pieces.append(data)
            received = b"".join(self._pieces)
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head, data = received[:end], received[end + 4 :]
            self._pieces = []
            self._chunked = _CHUNKED.search(self._head) is not None
            length = _LENGTH.search(self._head)
            self._missing = int(length[1]) if length else 0
        if data:
            if not self._first_at:
                self._first_at = time.monotonic()
            if self._on_data is None:
                self._pieces.append(data)
            else:
                self._on_data(data)
            self._missing -= len(data)
            if self._chunked:
                self._tail = (self._tail + data[-5:])[-5:]
        if self._tail == _LAST_CHUNK if self._chunked else self._missing <= 0:
            self._finish()

    def _finish(self) -> None:
        assert self._head is not None
        if self._waiter is not None and not self._waiter.done():
            status = int(self._head[9:12])
            body = b"".join(self._pieces)
            self._waiter.set_result(
                HttpAnswer(status, body, self._sent_at, self._first_at, time.monotonic(), self._chunked)
            )


def get_port(url: str) -> int:
    return int(url.rpartition(":")[2])


def encode_post(path: str, body: bytes, key: str = "none") -> bytes:
    """A request's bytes. The key stands in every provider's auth slot but the path."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nUser-Agent: bench\r\n"
    head += f"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def encode_get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n".encode()
