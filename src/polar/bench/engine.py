"""A stand-in engine: vLLM's chat API with answers that were made beforehand.

It is never the bottleneck: a request is not parsed beyond its length and its last mark, and an answer is one write.
A stream is a few tokens, or many at a given pace, each with the time at which it was sent.
"""

import asyncio
import re
import time
from types import TracebackType
from typing import cast

from polar.bench import replies
from polar.bench.calls import SIZES, TURNS, CallSize, find_mark

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm","max_model_len":131072}]}'
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_SECOND_TOKEN = 0.003  # seconds after the first one, where streams have no pace


class StreamPace:
    """How streams are sent: `tokens` tokens with `interval` seconds between them; a few at once where it is 0."""

    def __init__(self) -> None:
        self.tokens = 0
        self.interval = 0.0


class FakeEngine:
    """Use as an async context manager; `url` and `port` are known inside."""

    def __init__(self) -> None:
        self.pace = StreamPace()
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeEngine":
        for size in SIZES.values():
            for turn in range(TURNS):
                replies.make_reply(size, turn)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self.pace), "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, pace: StreamPace) -> None:
        self._pace = pace
        self._pieces: list[bytes] = []
        self._missing = -1  # bytes of the request that is coming in; -1 where its head is not whole yet
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._missing < 0:
            request = b"".join(self._pieces)
            end = request.find(b"\r\n\r\n")
            if end < 0:
                self._pieces = [request]
                return
            length = _LENGTH.search(request, 0, end)
            self._missing = end + 4 + (int(length[1]) if length else 0) - len(request)
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            request = b"".join(self._pieces)
            self._pieces, self._missing = [], -1
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if request.startswith(b"GET"):
            self._write(_whole(_MODELS))
            return
        found = find_mark(request)
        if found is None:
            self._write(_whole(b'{"error":{"message":"no mark in this request"}}', b"400 Bad Request"))
            return
        size, turn = SIZES[found[0]], found[1]
        if not _STREAM.search(request):
            self._write(_whole(replies.make_reply(size, turn).whole))
        elif self._pace.tokens:
            _Pacer(self, size, self._pace)
        else:
            # vLLM sends the first event, with the prompt's ids, when it has the first token; the others come later.
            events = [*map(_chunk, replies.make_reply(size, turn).events)]
            self._write(_STREAM_HEAD + b"".join(events[:2]))
            rest = b"".join(events[2:]) + _LAST_CHUNK
            asyncio.get_running_loop().call_later(_SECOND_TOKEN, self._write, rest)

    def _write(self, data: bytes) -> bool:
        if self._transport is None:
            return False
        self._transport.write(data)
        return True


class _Pacer:
    """One stream, token by token."""

    def __init__(self, connection: _Connection, size: CallSize, pace: StreamPace) -> None:
        first, before, self._after, self._end = replies.make_stamped_stream(size)
        length = len(before) + replies.STAMP_DIGITS + len(self._after)
        self._before = b"%x\r\n%b" % (length, before)
        self._after += b"\r\n"
        self._connection = connection
        self._left = pace.tokens
        self._interval = pace.interval
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + pace.interval
        connection._write(_STREAM_HEAD + _chunk(first))
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        if not self._left:
            self._connection._write(_chunk(self._end) + _LAST_CHUNK)
            return
        self._left -= 1
        stamp = b"%0*d" % (replies.STAMP_DIGITS, time.monotonic_ns())
        if self._connection._write(self._before + stamp + self._after):
            self._due += self._interval
            self._loop.call_at(self._due, self._tick)


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
