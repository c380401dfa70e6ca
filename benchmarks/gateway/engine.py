"""A stand-in engine: vLLM's chat API with answers that were made beforehand.

It is never the bottleneck: a request is not parsed beyond its length and its last mark, and an answer is one write.
A stream is a few tokens, or many at a given pace, each with the time at which it was sent.

Answers are made once, with `return_token_ids` and log-probabilities. The token ids of a session are one sequence: the
prompt of a call is the prompt of the one before, what was sampled then, and the tool's result. So capture finds the
same shared prefixes as with a real model.
"""

import asyncio
import random
import re
import time
from functools import cache
from types import TracebackType
from typing import Any, cast

import msgspec
from msgspec import Struct

from benchmarks.calls import SIZES, TURNS, CallSize, find_mark, make_reply_text

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
                make_reply(size, turn)
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
            self._write(_encode_response(_MODELS))
            return
        found = find_mark(request)
        if found is None:
            self._write(_encode_response(b'{"error":{"message":"no mark in this request"}}', b"400 Bad Request"))
            return
        size, turn = SIZES[found[0]], found[1]
        if not _STREAM.search(request):
            self._write(_encode_response(make_reply(size, turn).whole))
        elif self._pace.tokens:
            _Pacer(self, size, self._pace)
        else:
            # vLLM sends the first event, with the prompt's ids, when it has the first token; the others come later.
            events = [*map(_encode_chunk, make_reply(size, turn).events)]
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
        first, before, self._after, self._end = make_stamped_stream(size)
        length = len(before) + STAMP_DIGITS + len(self._after)
        self._before = b"%x\r\n%b" % (length, before)
        self._after += b"\r\n"
        self._connection = connection
        self._left = pace.tokens
        self._interval = pace.interval
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + pace.interval
        connection._write(_STREAM_HEAD + _encode_chunk(first))
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        if not self._left:
            self._connection._write(_encode_chunk(self._end) + _LAST_CHUNK)
            return
        self._left -= 1
        stamp = b"%0*d" % (STAMP_DIGITS, time.monotonic_ns())
        if self._connection._write(self._before + stamp + self._after):
            self._due += self._interval
            self._loop.call_at(self._due, self._tick)


def _encode_response(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _encode_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# What it answers

RESULT_TOKENS = 200
STREAMED_TOKENS = 8
STAMP_DIGITS = 18


class EngineReply(Struct, frozen=True):
    """One reply in both forms; `events` are the stream's, first chunk first."""

    whole: bytes
    events: list[bytes]


@cache
def make_reply(size: CallSize, turn: int) -> EngineReply:
    ids = _draw_session_ids(size)
    growth = size.sampled_tokens + RESULT_TOKENS
    first = max(1, size.prompt_tokens - growth * (TURNS - 1) // 2)
    start = first + growth * turn
    prompt, sampled = ids[:start], ids[start : start + size.sampled_tokens]
    text = make_reply_text(size, turn)
    step = -(-len(text) // size.sampled_tokens)
    tokens = [text[step * index : step * (index + 1)] for index in range(size.sampled_tokens)]
    logprobs = [_make_logprob(token, index) for index, token in enumerate(tokens)]
    usage = {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(sampled),
        "completion_tokens": len(sampled),
    }
    call = {
        "id": f"call_{turn}",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "ls", "timeout": 30}'},
    }
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [call],
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": sampled,
    }
    whole = {
        **_make_head("chat.completion"),
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "kv_transfer_params": None,
    }
    shown = min(STREAMED_TOKENS, size.sampled_tokens)
    events = [
        _encode_first_event(prompt),
        *(_encode_token_event(tokens[n], logprobs[n], sampled[n]) for n in range(shown)),
        *_encode_last_events(usage),
    ]
    return EngineReply(msgspec.json.encode(whole), events)


@cache
def make_stamped_stream(size: CallSize) -> tuple[bytes, bytes, bytes, bytes]:
    """A stream whose tokens say when they were sent: its first event, what stands before and after the stamp in
    each token's event, and its end."""
    prompt = _draw_session_ids(size)[: size.prompt_tokens]
    stamp = "~" + "0" * STAMP_DIGITS
    before, after = _encode_token_event(stamp, _make_logprob(" token", 0), 4711).split(stamp.encode())
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt), "completion_tokens": 0}
    return _encode_first_event(prompt), before + b"~", after, b"".join(_encode_last_events(usage))


def _make_head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-b2c9a7d1e5f04c63", "object": kind, "created": 1_760_000_000, "model": "bench"}


def _encode_event(choices: list[Any], **more: Any) -> bytes:
    return (
        b"data: " + msgspec.json.encode({**_make_head("chat.completion.chunk"), "choices": choices, **more}) + b"\n\n"
    )


def _make_choice(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None, **more}


def _encode_first_event(prompt: list[int]) -> bytes:
    return _encode_event([_make_choice({"role": "assistant", "content": ""})], prompt_token_ids=prompt)


def _encode_token_event(text: str, logprob: dict[str, Any], token_id: int) -> bytes:
    return _encode_event([_make_choice({"content": text}, logprobs={"content": [logprob]}, token_ids=[token_id])])


def _encode_last_events(usage: dict[str, int]) -> list[bytes]:
    last = _encode_event([_make_choice({"content": ""}, finish_reason="stop", stop_reason=None, token_ids=[])])
    return [last, _encode_event([], usage=usage), b"data: [DONE]\n\n"]


def _make_logprob(token: str, index: int) -> dict[str, Any]:
    value = -((index * 7919) % 1000 + 1) / 317.0
    return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}


@cache
def _draw_session_ids(size: CallSize) -> list[int]:
    rng = random.Random(size.name)
    length = size.prompt_tokens + (size.sampled_tokens + RESULT_TOKENS) * (TURNS + 1)
    return [rng.randrange(100, 151_000) for _ in range(length)]
