"""What goes back to the harness: whole replies, streams, errors.

A stream, put together by a client, is the same message as the whole reply of that turn, with one exception: arguments
that are not JSON are sent as they are in a stream, since clients parse them themselves and each has its own way to tell
the model of the error; a whole reply has to wrap them (see `anthropic_blocks`).
"""

from typing import Literal

from msgspec import Raw
from msgspec.structs import replace

from polar import ids
from polar.dialects import anthropic_wire as aw
from polar.dialects import sse
from polar.dialects.anthropic_blocks import flat_name, turn_block, turn_part
from polar.dialects.wire import encode
from polar.errors import ApiError, ApiErrorKind
from polar.types import (
    CallDelta,
    CallStart,
    Event,
    FinishReason,
    Part,
    Reasoning,
    Reply,
    Request,
    Text,
    TextDelta,
    ToolCall,
    Usage,
)

FINISH_REASONS: dict[str | None, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Stop reasons that are not a plain `stop`."""


def whole_reply(request: Request, reply: Reply) -> aw.WireReply:
    called = any(isinstance(part, ToolCall) for part in reply.parts)
    return aw.WireReply(
        id=f"msg_{reply.exchange_id}",
        role="assistant",
        model=request.model,
        content=_reply_blocks(reply, request.thinking.visible),
        stop_reason=_stop_reason(reply, called),
        stop_sequence=reply.stop_sequence,
        usage=_wire_usage(reply.usage),
    )


def reply_part(block: aw.ReplyBlock) -> Part:
    if isinstance(block, aw.TextBlock):
        return Text(block.text)
    part = turn_part(block)
    if isinstance(part, ToolCall):
        part.id = part.id.removeprefix("toolu_")
    return part


def reply_usage(usage: aw.WireUsage) -> Usage:
    cached = usage.cache_read_input_tokens or 0
    return Usage(
        prompt=usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0),
        completion=usage.output_tokens,
        cached=cached,
        reasoning=usage.output_tokens_details.thinking_tokens if usage.output_tokens_details else 0,
    )


def _reply_blocks(reply: Reply, thinking_visible: bool) -> list[aw.ReplyBlock]:
    """Empty text and thinking are left out: a stream has no events for them."""
    blocks: list[aw.ReplyBlock] = []
    thoughts = 0
    for part in reply.parts:
        if isinstance(part, Text) and part.text:
            blocks.append(aw.TextBlock(part.text))
        elif isinstance(part, ToolCall):
            blocks.append(turn_block(replace(part, id=f"toolu_{part.id}")))
        elif isinstance(part, Reasoning) and (part.text or part.seal) and thinking_visible:
            blocks.append(turn_block(Reasoning(part.text, part.seal or ids.seal(reply.exchange_id, thoughts))))
            thoughts += 1
    return blocks


def _stop_reason(reply: Reply, called: bool) -> str:
    """A turn that was cut on our side says so in the one way that every client takes for a cut turn."""
    if reply.finish_reason in ("length", "abort"):
        return "max_tokens"
    if reply.finish_reason == "content_filter":
        return "refusal"
    if reply.finish_reason == "tool_calls":
        return "tool_use"
    if reply.stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def _wire_usage(usage: Usage) -> aw.WireUsage:
    return aw.WireUsage(
        input_tokens=usage.prompt - usage.cached,
        output_tokens=usage.completion,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached,
        output_tokens_details=aw.OutputDetails(usage.reasoning) if usage.reasoning else None,
    )


# Errors.

_ERROR_TYPES: dict[ApiErrorKind, str] = {
    "invalid_request": "invalid_request_error",
    "unsupported": "invalid_request_error",
    "context_length": "invalid_request_error",
    "too_large": "request_too_large",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "method": "invalid_request_error",
    "upgrade": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "overloaded_error",
    "engine": "api_error",
    "timeout": "timeout_error",
    "internal": "api_error",
}

_TOO_LONG = "prompt is too long"


def error_body(error: ApiError) -> bytes:
    """The JSON of an error, as a whole answer or as the data of a stream's last event."""
    message = error.message
    if error.kind == "context_length" and _TOO_LONG not in message:
        message = f"{_TOO_LONG}: {message}"  # harnesses know the condition, and compact, by these words alone
    return encode(aw.ErrorBody(aw.ErrorDetail(_ERROR_TYPES[error.kind], message)))


# Streams.

_PING = sse.event(b'{"type":"ping"}', b"ping")
_MESSAGE_STOP = sse.event(b'{"type":"message_stop"}', b"message_stop")

_Kind = Literal["text", "thinking", "hidden", "function", "custom"]
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%s'
_DELTA_END = b"}}\n\n"
_DELTA_FIELDS: dict[_Kind, bytes] = {
    "text": b'"text_delta","text":',
    "thinking": b'"thinking_delta","thinking":',
    "function": b'"input_json_delta","partial_json":',
    "custom": b'"input_json_delta","partial_json":',
}


class AnthropicStream:
    """Writes a reply as server-sent events, one content block per part."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: Request, exchange_id: str) -> None:
        self._exchange_id = exchange_id
        self._model = request.model
        self._thinking: _Kind = "thinking" if request.thinking.visible else "hidden"
        self._kind: _Kind | None = None  # of the part that is open
        self._delta = b""  # what stands before the text in each of its deltas
        self._index = 0
        self._thoughts = 0
        self._called = False

    def start(self, usage: Usage | None) -> bytes:
        message = aw.WireReply(
            id=f"msg_{self._exchange_id}",
            role="assistant",
            model=self._model,
            content=[],
            usage=_wire_usage(usage or Usage()),
        )
        return sse.event(encode(aw.MessageStart(message)), b"message_start")

    def feed(self, event: Event) -> bytes:
        if isinstance(event, CallDelta):
            return self._arguments(event.arguments) if event.arguments else b""
        if isinstance(event, CallStart):
            return self._start_call(event)
        if not event.text:
            return b""
        kind: _Kind = "text" if isinstance(event, TextDelta) else self._thinking
        opened = b"" if kind == self._kind else self._switch(kind)
        return opened if kind == "hidden" else opened + self._delta + encode(event.text) + _DELTA_END

    def finish(self, reply: Reply) -> bytes:
        """Repeats the prompt's counts: they may not have been known at the start."""
        stop = aw.Stop(_stop_reason(reply, self._called), reply.stop_sequence)
        end = sse.event(encode(aw.MessageDelta(stop, _wire_usage(reply.usage))), b"message_delta")
        return self._close() + end + _MESSAGE_STOP

    def error(self, error: ApiError) -> bytes:
        return sse.event(error_body(error), b"error")

    def keep_alive(self) -> bytes:
        """The official clients skip a ping wherever it stands, also before message_start."""
        return _PING

    def _switch(self, kind: _Kind) -> bytes:
        closed = self._close()
        if kind == "hidden":
            self._kind = kind
            return closed
        return closed + self._open(kind, aw.TextBlock("") if kind == "text" else aw.ThinkingBlock(""))

    def _start_call(self, call: CallStart) -> bytes:
        self._called = True
        block = aw.ToolUseBlock(f"toolu_{call.id}", flat_name(call.namespace, call.name), Raw(b"{}"))
        opened = self._close() + self._open(call.kind, block)
        return opened + self._delta + encode('{"input":"') + _DELTA_END if call.kind == "custom" else opened

    def _arguments(self, text: str) -> bytes:
        if self._kind == "custom":  # the text is part of a JSON string, see `_start_call`
            text = encode(text)[1:-1].decode()
        return self._delta + encode(text) + _DELTA_END

    def _open(self, kind: _Kind, block: aw.ReplyBlock) -> bytes:
        self._kind = kind
        self._delta = _DELTA % (self._index, _DELTA_FIELDS[kind])
        return sse.event(encode(aw.BlockStart(self._index, block)), b"content_block_start")

    def _close(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None or kind == "hidden":
            return b""
        last = b""
        if kind == "thinking":
            last = _DELTA % (self._index, b'"signature_delta","signature":')
            last += encode(ids.seal(self._exchange_id, self._thoughts)) + _DELTA_END
            self._thoughts += 1
        elif kind == "custom":
            last = self._delta + encode('"}') + _DELTA_END
        stop = sse.event(encode(aw.BlockStop(self._index)), b"content_block_stop")
        self._index += 1
        return last + stop
