"""OpenAI's own client, fed with our bytes."""

from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai

from polar.dialects.base import EncodedError, StreamEncoder
from polar.types import (
    Part,
    Reasoning,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    Text,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)

EXCHANGE = "x0123456789abcdefghjkmnpq"


def client(status: int, chunks: Iterable[bytes], headers: dict[str, str]) -> openai.OpenAI:
    """A client whose every call is answered so. It never tries again."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, content=iter(chunks))

    http: Any = httpx.Client(transport=httpx.MockTransport(answer))  # newer clients name another type, and take this
    return openai.OpenAI(api_key="sk-polar", base_url="http://gateway/v1", max_retries=0, http_client=http)


def whole(body: bytes) -> openai.OpenAI:
    return client(200, [body], {"content-type": "application/json"})


def streaming(body: bytes, size: int) -> openai.OpenAI:
    """The stream arrives in pieces of `size` bytes: with 1, cut at every position there is."""
    return client(200, cut(body, size), {"content-type": "text/event-stream"})


def failing(error: EncodedError) -> openai.OpenAI:
    return client(error.status, [error.body], error.headers)


def cut(body: bytes, size: int) -> Iterator[bytes]:
    return (body[start : start + size] for start in range(0, len(body), size))


def written(encoder: StreamEncoder, events: Iterable[ReplyEvent], reply: Reply) -> bytes:
    """A stream with a keep-alive wherever one may stand."""
    out = encoder.keep_alive() + encoder.start(None)
    for event in events:
        out += encoder.keep_alive() + encoder.feed(event)
    return out + encoder.keep_alive() + encoder.finish(reply)


def parts(events: Iterable[ReplyEvent]) -> list[Part]:
    """The turn that these events are."""
    turn: list[Part] = []
    for event in events:
        last = turn[-1] if turn else None
        match event:
            case TextDelta():
                if isinstance(last, Text):
                    last.text += event.text
                else:
                    turn.append(Text(event.text))
            case ReasoningDelta():
                if isinstance(last, Reasoning):
                    last.text += event.text
                else:
                    turn.append(Reasoning(event.text))
            case ToolCallStart():
                turn.append(ToolCall(event.id, event.name, "", event.kind, event.namespace))
            case ToolCallDelta():
                assert isinstance(last, ToolCall)
                last.arguments += event.arguments
    return turn
