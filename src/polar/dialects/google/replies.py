"""What goes back to the harness: whole replies, streams in their two forms, errors."""

import math
from datetime import UTC, datetime

import msgspec
from msgspec import Raw, Struct

from polar import ids
from polar.dialects import raw_fields
from polar.dialects.base import EncodedError
from polar.dialects.google import contents as gc
from polar.dialects.google import wire as gw
from polar.dialects.google.requests import AS_ARRAY
from polar.dialects.raw_fields import encode
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind
from polar.types import (
    FinishReason,
    Reasoning,
    Reply,
    ReplyEvent,
    Request,
    Text,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)

_RESPONSE = msgspec.json.Decoder(gw.GenerateContentResponse)

_WIRE_FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "content_filter": "SAFETY",
    "abort": "OTHER",
}
_FINISH_REASONS: dict[str, FinishReason] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "LANGUAGE": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
}
"""Any other reason means that something broke off the reply."""


def build_reply(request: Request, reply: Reply) -> gw.GenerateContentResponse:
    return _build_response(reply, _encode_reply_parts(reply, request.thinking.visible))


def _encode_reply_parts(reply: Reply, shows_thoughts: bool) -> list[gw.Part]:
    parts: list[gw.Part] = []
    first_call: gw.Part | None = None
    seal: str | None = None
    for part in reply.parts:
        match part:
            case Text() if part.text:
                parts.append(gw.Part(text=part.text))
            case Reasoning():
                seal = seal or part.seal
                if shows_thoughts and part.text:
                    parts.append(gw.Part(text=part.text, thought=True))
            case ToolCall():
                parts.append(gw.Part(functionCall=_encode_reply_call(part)))
                first_call = first_call or parts[-1]
                seal = seal or part.seal
    if not parts:
        parts.append(gw.Part(text=""))
    (first_call or parts[-1]).thoughtSignature = gc.encode_signature(seal or ids.make_seal(reply.exchange_id, 0))
    return parts


def _encode_reply_call(call: ToolCall) -> gw.FunctionCall:
    out = gc.encode_call(call)
    out.id = gc.to_wire_call_id(call.id)
    return out


def _build_response(reply: Reply, parts: list[gw.Part]) -> gw.GenerateContentResponse:
    candidate = gw.Candidate(gw.Content(parts, "model"), _WIRE_FINISH_REASONS[reply.finish_reason], 0)
    if reply.logprobs is not None:
        candidate.logprobsResult = _encode_logprobs(reply.logprobs)
        if reply.logprobs:
            candidate.avgLogprobs = sum(token.logprob for token in reply.logprobs) / len(reply.logprobs)
    usage = reply.usage
    return gw.GenerateContentResponse(
        candidates=[candidate],
        usageMetadata=gw.UsageMetadata(
            promptTokenCount=usage.prompt,
            cachedContentTokenCount=usage.cached,
            candidatesTokenCount=usage.completion - usage.reasoning,
            thoughtsTokenCount=usage.reasoning,
            totalTokenCount=usage.prompt + usage.completion,
        ),
        modelVersion=reply.model,
        createTime=_format_time(reply.created),
        responseId=reply.exchange_id,
    )


def _format_time(created: int) -> str:
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _encode_logprobs(tokens: list[TokenLogprob]) -> gw.LogprobsResult:
    def candidates(logprobs: list[TokenLogprob]) -> list[gw.LogprobsCandidate]:
        return [gw.LogprobsCandidate(token.token, token.logprob) for token in logprobs]

    asked = any(token.top_logprobs for token in tokens)
    top = [gw.TopCandidates(candidates(token.top_logprobs)) for token in tokens] if asked else []
    return gw.LogprobsResult(candidates(tokens), top)


def decode_reply(body: bytes) -> Reply:
    try:
        return _read_response(raw_fields.decode(_RESPONSE, body, "reply"))
    except (ApiError, UnicodeDecodeError) as error:
        raise ApiError("engine", f"This is no reply of generateContent: {error}") from error


def _read_response(response: gw.GenerateContentResponse) -> Reply:
    candidate = response.candidates[0] if response.candidates else gw.Candidate()
    conversation = gc.ContentReader()
    conversation.add_content(
        gw.Content(candidate.content.parts if candidate.content else [], "model"), "candidates[0].content"
    )
    parts = conversation.messages[0].parts
    for part in parts:
        if isinstance(part, ToolCall):
            part.id = part.id.removeprefix(gc.to_wire_call_id(""))
    usage = response.usageMetadata or gw.UsageMetadata()
    if response.promptFeedback is not None and response.promptFeedback.blockReason:
        finish: FinishReason = "content_filter"
    else:
        finish = _FINISH_REASONS.get(candidate.finishReason or "", "abort")
    if finish == "stop" and any(isinstance(part, ToolCall) for part in parts):
        finish = "tool_calls"
    return Reply(
        exchange_id=response.responseId,
        model=response.modelVersion,
        created=_parse_time(response.createTime),
        parts=parts,
        finish_reason=finish,
        usage=Usage(
            prompt=usage.promptTokenCount or 0,
            completion=(usage.candidatesTokenCount or 0) + usage.thoughtsTokenCount,
            cached=usage.cachedContentTokenCount,
            reasoning=usage.thoughtsTokenCount,
        ),
        logprobs=_decode_logprobs(candidate.logprobsResult),
    )


def _parse_time(time: str) -> int:
    """Google's own API (unlike Vertex's) leaves the time out."""
    try:
        return int(datetime.fromisoformat(time).timestamp()) if time else 0
    except (ValueError, OverflowError) as error:
        raise gc.make_invalid_field_error("createTime", f"{time!r} is no time") from error


def _decode_logprobs(result: gw.LogprobsResult | None) -> list[TokenLogprob] | None:
    if result is None:
        return None
    tokens = [TokenLogprob(chosen.token, chosen.logProbability) for chosen in result.chosenCandidates]
    for token, top in zip(tokens, result.topCandidates, strict=False):
        token.top_logprobs = [TokenLogprob(other.token, other.logProbability) for other in top.candidates]
    return tokens


# Streams.


class _SseFrames:
    """Chunks as server-sent events, the way that Google's own clients read them, which is not the standard's way.

    The Python client ends lines wherever Unicode does, so that every line separator in the JSON has to be escaped.

    All of them choke on comments, older ones on empty lines too, and a chunk without content makes the Python client's
    chat forget the turn. So a keep-alive is the beginning of the next event: `data: `, then a space each time.

    An error comes as Google sends it, as bare JSON without an end: the clients raise it where it arrives by itself
    (which needs a write of its own) and else find the stream cut short. As an event, it would pass for a chunk.
    """

    content_type = "text/event-stream"

    def __init__(self) -> None:
        self._event_started = False

    def frame(self, *json: bytes) -> bytes:
        before = b"" if self._event_started else b"data: "
        self._event_started = False
        return _escape_line_separators(b"".join((before, *json, b"\n\n")))

    def keep_alive(self) -> bytes:
        if self._event_started:
            return b" "
        self._event_started = True
        return b"data: "

    def error(self, json: bytes) -> bytes:
        return _escape_line_separators(json)

    def end(self) -> bytes:
        return b""


_SEPARATORS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


def _escape_line_separators(data: bytes) -> bytes:
    if data.isascii():
        return data
    for separator, escaped in _SEPARATORS:
        data = data.replace(separator, escaped)
    return data


class _ArrayFrames:
    """Chunks as the elements of one JSON array."""

    content_type = "application/json"

    def __init__(self) -> None:
        self._before = b"["

    def frame(self, *json: bytes) -> bytes:
        before, self._before = self._before, b",\n"
        return b"".join((before, *json))

    def keep_alive(self) -> bytes:
        return b"\n"

    def error(self, json: bytes) -> bytes:
        return self.frame(json) + b"]"

    def end(self) -> bytes:
        return b"]"


_TEXT_CHUNK_START = b'{"candidates":[{"content":{"parts":[{"text":'
_THOUGHT_FIELD = b',"thought":true'
_PART_CHUNK_START = b'{"candidates":[{"content":{"parts":['


class GoogleStreamEncoder:
    """Writes one streamed reply: every piece of text is a chunk; a call is one chunk, once its arguments are whole; the
    last chunk has the finish reason, usage and, where no call carries it, the signature. No chunk is without a part."""

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._frames = _ArrayFrames() if request.echo.get("alt") == AS_ARRAY else _SseFrames()
        self.content_type = self._frames.content_type
        self._shows_thoughts = request.thinking.visible
        self._signature = gc.encode_signature(ids.make_seal(exchange_id, 0))
        self._open_call: ToolCallStart | None = None
        self._arguments: list[str] = []
        self._is_signed = False
        self._was_thinking = False  # what was shown last is thinking
        self._metadata = encode(
            gw.GenerateContentResponse(
                modelVersion=request.model, createTime=_format_time(created), responseId=exchange_id
            )
        )[1:]
        self._chunk_end = b'],"role":"model"},"index":0}],' + self._metadata

    def start(self, usage: Usage | None) -> bytes:
        """Nothing to say yet; every chunk will tell the prompt's length, where it is known."""
        if usage is not None:
            known = gw.UsageMetadata(usage.prompt, usage.cached, totalTokenCount=usage.prompt)
            self._chunk_end = b'],"role":"model"},"index":0}],"usageMetadata":' + encode(known) + b"," + self._metadata
        return b""

    def feed(self, event: ReplyEvent) -> bytes:
        if isinstance(event, ToolCallDelta):
            self._arguments.append(event.arguments)
            return b""
        out = (
            b""
            if self._open_call is None
            else self._frames.frame(_PART_CHUNK_START, encode(self._end_call(self._open_call)), self._chunk_end)
        )
        if isinstance(event, ToolCallStart):
            self._open_call = event
            self._arguments = []
        elif isinstance(event, TextDelta):
            if event.text:
                self._was_thinking = False
                out += self._frames.frame(_TEXT_CHUNK_START, encode(event.text), b"}", self._chunk_end)
        elif self._shows_thoughts and event.text:
            self._was_thinking = True
            out += self._frames.frame(_TEXT_CHUNK_START, encode(event.text), _THOUGHT_FIELD, b"}", self._chunk_end)
        return out

    def finish(self, reply: Reply) -> bytes:
        if self._open_call is not None:
            part = self._end_call(self._open_call)
        else:
            part = gw.Part(text="", thought=self._was_thinking or None)
            if not self._is_signed:
                part.thoughtSignature = self._signature
        return self._frames.frame(encode(_build_response(reply, [part]))) + self._frames.end()

    def error(self, error: ApiError) -> bytes:
        return self._frames.error(_encode_error_body(error))

    def keep_alive(self) -> bytes:
        return self._frames.keep_alive()

    def _end_call(self, start: ToolCallStart) -> gw.Part:
        self._open_call = None
        self._was_thinking = False
        call = _encode_reply_call(ToolCall(start.id, start.name, "".join(self._arguments), start.kind, start.namespace))
        call.args = Raw(msgspec.json.format(bytes(call.args), indent=-1))  # an event's data is one line
        part = gw.Part(functionCall=call)
        if not self._is_signed:
            part.thoughtSignature = self._signature
            self._is_signed = True
        return part


# Errors.

_RPC_STATUSES: dict[ApiErrorKind, str] = {
    "invalid_request": "INVALID_ARGUMENT",
    "unsupported": "INVALID_ARGUMENT",
    "context_length": "INVALID_ARGUMENT",
    "too_large": "INVALID_ARGUMENT",
    "authentication": "UNAUTHENTICATED",
    "not_found": "NOT_FOUND",
    "method": "UNIMPLEMENTED",
    "upgrade": "UNIMPLEMENTED",
    "rate_limit": "RESOURCE_EXHAUSTED",
    "overloaded": "UNAVAILABLE",
    "engine": "UNAVAILABLE",
    "timeout": "DEADLINE_EXCEEDED",
    "internal": "INTERNAL",
}
_CONTEXT_LENGTH_MESSAGE = "The input token count exceeds the maximum number of tokens allowed"
"""Harnesses know Google's overflow by these words alone: it has no code of its own."""

_RPC = "type.googleapis.com/google.rpc."


def encode_error(error: ApiError) -> EncodedError:
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(_retry_seconds(error.retry_after))
    return EncodedError(HTTP_STATUS[error.kind], _encode_error_body(error), headers)


def _retry_seconds(retry_after: float) -> int:
    return max(0, math.ceil(retry_after))


class _FieldViolation(Struct):
    field: str
    description: str


class _ErrorDetail(Struct, rename={"type": "@type"}, omit_defaults=True):
    type: str
    reason: str = ""
    domain: str = ""
    retryDelay: str = ""
    fieldViolations: list[_FieldViolation] = []


class _ErrorStatus(Struct, omit_defaults=True):
    code: int
    message: str
    status: str
    details: list[_ErrorDetail] = []


class _ErrorBody(Struct):
    error: _ErrorStatus


def _encode_error_body(error: ApiError) -> bytes:
    message = error.message
    if error.kind == "context_length" and _CONTEXT_LENGTH_MESSAGE not in message:
        message = f"{_CONTEXT_LENGTH_MESSAGE}: {message}"
    details: list[_ErrorDetail] = []
    if error.kind == "authentication":
        details.append(_ErrorDetail(_RPC + "ErrorInfo", reason="API_KEY_INVALID", domain="googleapis.com"))
    if error.param is not None:
        details.append(_ErrorDetail(_RPC + "BadRequest", fieldViolations=[_FieldViolation(error.param, error.message)]))
    if error.retry_after is not None:
        details.append(_ErrorDetail(_RPC + "RetryInfo", retryDelay=f"{_retry_seconds(error.retry_after)}s"))
    return encode(_ErrorBody(_ErrorStatus(HTTP_STATUS[error.kind], message, _RPC_STATUSES[error.kind], details)))
