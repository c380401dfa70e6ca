"""What goes back to the harness: whole replies, streams, errors.

A stream, put together by a client, is the same message as the whole reply of that turn, with one exception: arguments
that are not JSON are sent as they are in a stream, since clients parse them themselves and each has its own way to tell
the model of the error; a whole reply has to wrap them (see `requests`).
"""

from typing import Literal

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from polar import ids
from polar.dialects import sse
from polar.dialects.anthropic import wire as aw
from polar.dialects.anthropic.requests import decode_turn_block, encode_turn_block, require_utf8
from polar.dialects.base import join_namespace
from polar.dialects.raw_fields import decode, encode
from polar.errors import ApiError, ApiErrorKind
from polar.types import (
    FinishReason,
    Part,
    Reasoning,
    Reply,
    ReplyEvent,
    Request,
    Text,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)

_REPLY = msgspec.json.Decoder(aw.WireReply)

_FINISH_REASONS: dict[str | None, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Stop reasons that are not a plain `stop`."""


def build_reply(request: Request, reply: Reply) -> aw.WireReply:
    called = any(isinstance(part, ToolCall) for part in reply.parts)
    return aw.WireReply(
        id=f"msg_{reply.exchange_id}",
        role="assistant",
        model=request.model,
        content=_encode_reply_blocks(reply, request.thinking.visible),
        stop_reason=_choose_stop_reason(reply, called),
        stop_sequence=reply.stop_sequence,
        usage=_encode_usage(reply.usage),
    )


def decode_reply(body: bytes) -> Reply:
    try:
        require_utf8(body)
        reply = decode(_REPLY, body, "reply")
    except ApiError as error:
        raise ApiError("engine", error.message) from error
    return Reply(
        exchange_id=reply.id.removeprefix("msg_"),
        model=reply.model,
        created=0,
        parts=[*map(_decode_reply_block, reply.content)],
        finish_reason=_FINISH_REASONS.get(reply.stop_reason, "stop"),
        stop_sequence=reply.stop_sequence,
        usage=_decode_usage(reply.usage),
    )


def _decode_reply_block(block: aw.ReplyBlock) -> Part:
    if isinstance(block, aw.TextBlock):
        return Text(block.text)
    part = decode_turn_block(block)
    if isinstance(part, ToolCall):
        part.id = part.id.removeprefix("toolu_")
    return part


def _decode_usage(usage: aw.WireUsage) -> Usage:
    cached = usage.cache_read_input_tokens or 0
    return Usage(
        prompt=usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0),
        completion=usage.output_tokens,
        cached=cached,
        reasoning=usage.output_tokens_details.thinking_tokens if usage.output_tokens_details else 0,
    )


def _encode_reply_blocks(reply: Reply, thinking_visible: bool) -> list[aw.ReplyBlock]:
    """Empty text and thinking are left out: a stream has no events for them."""
    blocks: list[aw.ReplyBlock] = []
    thoughts = 0
    for part in reply.parts:
        if isinstance(part, Text) and part.text:
            blocks.append(aw.TextBlock(part.text))
        elif isinstance(part, ToolCall):
            blocks.append(encode_turn_block(replace(part, id=f"toolu_{part.id}")))
        elif isinstance(part, Reasoning) and (part.text or part.seal) and thinking_visible:
            blocks.append(
                encode_turn_block(Reasoning(part.text, part.seal or ids.make_seal(reply.exchange_id, thoughts)))
            )
            thoughts += 1
    return blocks


def _choose_stop_reason(reply: Reply, called: bool) -> str:
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


def _encode_usage(usage: Usage) -> aw.WireUsage:
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

_CONTEXT_LENGTH_MESSAGE = "prompt is too long"


def encode_error_body(error: ApiError) -> bytes:
    """The JSON of an error, as a whole answer or as the data of a stream's last event."""
    message = error.message
    if error.kind == "context_length" and _CONTEXT_LENGTH_MESSAGE not in message:
        message = (
            f"{_CONTEXT_LENGTH_MESSAGE}: {message}"  # harnesses know the condition, and compact, by these words alone
        )
    return encode(aw.ErrorBody(aw.ErrorDetail(_ERROR_TYPES[error.kind], message)))


# Streams.

_PING = sse.encode_event(b'{"type":"ping"}', b"ping")
_MESSAGE_STOP = sse.encode_event(b'{"type":"message_stop"}', b"message_stop")

_BlockKind = Literal["text", "thinking", "hidden", "function", "custom"]
_DELTA_START = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%s'
_DELTA_END = b"}}\n\n"
_DELTA_FIELDS: dict[_BlockKind, bytes] = {
    "text": b'"text_delta","text":',
    "thinking": b'"thinking_delta","thinking":',
    "function": b'"input_json_delta","partial_json":',
    "custom": b'"input_json_delta","partial_json":',
}


class AnthropicStreamEncoder:
    """Writes a reply as server-sent events, one content block per part."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: Request, exchange_id: str) -> None:
        self._exchange_id = exchange_id
        self._model = request.model
        self._thinking_kind: _BlockKind = "thinking" if request.thinking.visible else "hidden"
        self._kind: _BlockKind | None = None  # of the part that is open
        self._delta_start = b""  # what stands before the text in each of its deltas
        self._index = 0
        self._thinking_count = 0
        self._has_tool_call = False

    def start(self, usage: Usage | None) -> bytes:
        message = aw.WireReply(
            id=f"msg_{self._exchange_id}",
            role="assistant",
            model=self._model,
            content=[],
            usage=_encode_usage(usage or Usage()),
        )
        return sse.encode_event(encode(aw.MessageStart(message)), b"message_start")

    def feed(self, event: ReplyEvent) -> bytes:
        if isinstance(event, ToolCallDelta):
            return self._encode_arguments(event.arguments) if event.arguments else b""
        if isinstance(event, ToolCallStart):
            return self._start_call(event)
        if not event.text:
            return b""
        kind: _BlockKind = "text" if isinstance(event, TextDelta) else self._thinking_kind
        opened = b"" if kind == self._kind else self._switch_block(kind)
        return opened if kind == "hidden" else opened + self._delta_start + encode(event.text) + _DELTA_END

    def finish(self, reply: Reply) -> bytes:
        """Repeats the prompt's counts: they may not have been known at the start."""
        stop = aw.StopDelta(_choose_stop_reason(reply, self._has_tool_call), reply.stop_sequence)
        end = sse.encode_event(encode(aw.MessageDelta(stop, _encode_usage(reply.usage))), b"message_delta")
        return self._close_block() + end + _MESSAGE_STOP

    def error(self, error: ApiError) -> bytes:
        return sse.encode_event(encode_error_body(error), b"error")

    def keep_alive(self) -> bytes:
        """The official clients skip a ping wherever it stands, also before message_start."""
        return _PING

    def _switch_block(self, kind: _BlockKind) -> bytes:
        closed = self._close_block()
        if kind == "hidden":
            self._kind = kind
            return closed
        return closed + self._open_block(kind, aw.TextBlock("") if kind == "text" else aw.ThinkingBlock(""))

    def _start_call(self, call: ToolCallStart) -> bytes:
        self._has_tool_call = True
        block = aw.ToolUseBlock(f"toolu_{call.id}", join_namespace(call.namespace, call.name), Raw(b"{}"))
        opened = self._close_block() + self._open_block(call.kind, block)
        return opened + self._delta_start + encode('{"input":"') + _DELTA_END if call.kind == "custom" else opened

    def _encode_arguments(self, text: str) -> bytes:
        if self._kind == "custom":  # the text is part of a JSON string, see `_start_call`
            text = encode(text)[1:-1].decode()
        return self._delta_start + encode(text) + _DELTA_END

    def _open_block(self, kind: _BlockKind, block: aw.ReplyBlock) -> bytes:
        self._kind = kind
        self._delta_start = _DELTA_START % (self._index, _DELTA_FIELDS[kind])
        return sse.encode_event(encode(aw.BlockStart(self._index, block)), b"content_block_start")

    def _close_block(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None or kind == "hidden":
            return b""
        last = b""
        if kind == "thinking":
            last = _DELTA_START % (self._index, b'"signature_delta","signature":')
            last += encode(ids.make_seal(self._exchange_id, self._thinking_count)) + _DELTA_END
            self._thinking_count += 1
        elif kind == "custom":
            last = self._delta_start + encode('"}') + _DELTA_END
        stop = sse.encode_event(encode(aw.BlockStop(self._index)), b"content_block_stop")
        self._index += 1
        return last + stop
