"""What goes back to the harness: whole replies, streams, errors."""

import math
from typing import NamedTuple

import msgspec
from msgspec import Struct

from polar import ids
from polar.dialects import raw_fields, sse
from polar.dialects.base import EncodedError, join_namespace
from polar.dialects.openai_chat import wire as w
from polar.dialects.openai_chat.requests import decode_assistant, encode_call
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind, EngineError
from polar.types import (
    Reasoning,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    Request,
    Text,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallStart,
    Usage,
)

_COMPLETION = msgspec.json.Decoder(w.Completion[w.Choice])


def build_reply(request: Request, reply: Reply) -> w.Completion[w.Choice]:
    shown = request.thinking.visible
    message = w.Message(
        "assistant",
        # "" and not null where there is none, as in a stream, which can't know yet
        content="".join([part.text for part in reply.parts if isinstance(part, Text)]),
        reasoning_content="".join([p.text for p in reply.parts if isinstance(p, Reasoning) and shown]) or None,
        tool_calls=[encode_call(p, "call_" + p.id) for p in reply.parts if isinstance(p, ToolCall)] or None,
    )
    choice = w.Choice(0, message, _encode_logprobs(request, reply), w.WIRE_FINISH_REASONS[reply.finish_reason])
    if reply.stop_sequence is not None:
        choice.stop_reason = reply.stop_sequence
    return w.Completion(
        id=f"chatcmpl-{reply.exchange_id}",
        object="chat.completion",
        created=reply.created,
        model=reply.model,
        choices=[choice],
        usage=w.encode_usage(reply.usage),
    )


def decode_reply(body: bytes) -> Reply:
    completion = w.decode_completion(_COMPLETION, body)
    choice = completion.choices[0]
    try:
        parts = decode_assistant(choice.message, "choices[0].message", "")
    except ApiError as error:
        raise EngineError(f"The engine's answer can't be used: {error.message}") from error
    for part in parts:
        if isinstance(part, ToolCall):
            part.id = part.id.removeprefix("call_")
    logprobs = choice.logprobs.content if choice.logprobs else None
    return Reply(
        exchange_id=ids.find_exchange_id(completion.id) or completion.id,
        model=completion.model,
        created=completion.created,
        parts=parts,
        finish_reason=w.decode_finish_reason(choice.finish_reason),
        stop_sequence=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        usage=w.decode_usage(completion.usage),
        logprobs=None if logprobs is None else [_decode_logprob(token) for token in logprobs],
    )


def _encode_logprobs(request: Request, reply: Reply) -> w.Logprobs | None:
    """Only where the harness asked. In a stream all stand in the last chunk, since events and tokens don't line up."""
    if request.logprobs is None or reply.logprobs is None:
        return None
    return w.Logprobs(
        [
            w.TokenLogprob(
                found.token,
                w.clamp_logprob(found.logprob),
                found.bytes,
                [
                    w.Alternative(other.token, w.clamp_logprob(other.logprob), other.bytes)
                    for other in found.top_logprobs
                ],
            )
            for found in reply.logprobs
        ]
    )


def _decode_logprob(logprob: w.TokenLogprob) -> TokenLogprob:
    alternatives = [TokenLogprob(other.token, other.logprob, other.bytes) for other in logprob.top_logprobs]
    return TokenLogprob(logprob.token, logprob.logprob, logprob.bytes, alternatives)


class ChatStreamEncoder:
    """A chunk per event. What is the same in every chunk is encoded once; a delta adds one JSON string between."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._request = request
        self._show_reasoning = request.thinking.visible
        self._chunk_start = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            raw_fields.encode(f"chatcmpl-{exchange_id}"),
            created,
            raw_fields.encode(request.model),
        )
        # With usage asked for, every chunk but the last says that it has none.
        self._chunk_end = b'],"usage":null}\n\n' if request.stream_usage else b"]}\n\n"
        self._delta_start = self._chunk_start + b'{"index":0,"delta":'
        self._delta_end = b',"logprobs":null,"finish_reason":null}' + self._chunk_end
        self._text_start = self._delta_start + b'{"content":'
        self._reasoning_start = self._delta_start + b'{"reasoning_content":'
        self._text_end = b"}" + self._delta_end
        self._tool_call_count = 0
        self._arguments_start = self._arguments_end = b""

    def start(self, usage: Usage | None) -> bytes:  # noqa: ARG002
        return self._delta_start + b'{"role":"assistant","content":""}' + self._delta_end

    def feed(self, event: ReplyEvent) -> bytes:
        if isinstance(event, TextDelta):
            return self._text_start + raw_fields.encode(event.text) + self._text_end if event.text else b""
        if isinstance(event, ReasoningDelta):
            if not event.text or not self._show_reasoning:
                return b""
            return self._reasoning_start + raw_fields.encode(event.text) + self._text_end
        if isinstance(event, ToolCallStart):
            return self._start_call(event)
        return (
            self._arguments_start + raw_fields.encode(event.arguments) + self._arguments_end if event.arguments else b""
        )

    def _start_call(self, event: ToolCallStart) -> bytes:
        kind, field = (b"custom", b"input") if event.kind == "custom" else (b"function", b"arguments")
        call = self._delta_start + b'{"tool_calls":[{"index":%d,' % self._tool_call_count
        self._tool_call_count += 1
        self._arguments_start = call + b'"%b":{"%b":' % (kind, field)
        self._arguments_end = b"}}]}" + self._delta_end
        name = raw_fields.encode(join_namespace(event.namespace, event.name))
        opening = b'"id":%b,"type":"%b","%b":{"name":%b,"%b":""' % (
            raw_fields.encode("call_" + event.id),
            kind,
            kind,
            name,
            field,
        )
        return call + opening + self._arguments_end

    def finish(self, reply: Reply) -> bytes:
        logprobs = raw_fields.encode(_encode_logprobs(self._request, reply))
        reason = w.WIRE_FINISH_REASONS[reply.finish_reason].encode()
        last = self._delta_start + b'{},"logprobs":%b,"finish_reason":"%b"' % (logprobs, reason)
        if reply.stop_sequence is not None:
            last += b',"stop_reason":' + raw_fields.encode(reply.stop_sequence)
        last += b"}" + self._chunk_end
        if self._request.stream_usage:
            last += self._chunk_start + b'],"usage":' + raw_fields.encode(w.encode_usage(reply.usage)) + b"}\n\n"
        return last + sse.encode_event(b"[DONE]")

    def error(self, error: ApiError) -> bytes:
        """No [DONE] after it: a client that overlooks the error must not take the turn for whole."""
        return sse.encode_event(encode_error_body(error))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE_COMMENT


# Errors, in the shape that OpenAI's three dialects share. Every kind of ApiError is told apart by type and code,
# without reading prose. What a client does about it hangs on the status: 429 and 5xx are tried again (after
# Retry-After where given), the others are final.


class _ErrorCode(NamedTuple):
    type: str
    code: str | None


_ERROR_CODES: dict[ApiErrorKind, _ErrorCode] = {
    "invalid_request": _ErrorCode("invalid_request_error", None),
    "unsupported": _ErrorCode("invalid_request_error", "unsupported_parameter"),
    "context_length": _ErrorCode("invalid_request_error", "context_length_exceeded"),
    "too_large": _ErrorCode("invalid_request_error", "request_too_large"),
    "authentication": _ErrorCode("invalid_request_error", "invalid_api_key"),
    "not_found": _ErrorCode("invalid_request_error", "not_found"),
    "method": _ErrorCode("invalid_request_error", "method_not_supported"),
    "upgrade": _ErrorCode("invalid_request_error", "upgrade_required"),
    "rate_limit": _ErrorCode("requests", "rate_limit_exceeded"),
    # Not OpenAI's own `server_is_overloaded`: codex takes that one as final, and this may be tried again.
    "overloaded": _ErrorCode("server_error", "service_unavailable"),
    "engine": _ErrorCode("server_error", "bad_gateway"),
    "timeout": _ErrorCode("server_error", "timeout"),
    "internal": _ErrorCode("server_error", "server_error"),
}


class ErrorObject(Struct):
    """What stands under `error`; all four fields are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorObject


def encode_error_body(error: ApiError) -> bytes:
    """The JSON of an error, as a whole answer or as the data of a stream's last event."""
    code = _ERROR_CODES[error.kind]
    return raw_fields.encode(ErrorBody(ErrorObject(error.message, code.type, error.param, code.code)))


def encode_error(error: ApiError) -> EncodedError:
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(0, math.ceil(error.retry_after)))
    return EncodedError(HTTP_STATUS[error.kind], encode_error_body(error), headers)
