"""What a chat endpoint answers, as far as it matters here, and what it says in our terms.

Fields that are not named are skipped by the decoder. Nothing here can be part of a cycle, and there is much of it: the
garbage collector need not look.
"""

import base64
import json
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct

from polar.engines.base import Chunk
from polar.records.exchange import VersionSpan
from polar.types import (
    FinishReason,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)

T = TypeVar("T")

JSON_NULL = Raw(b"null")


class _Logprob(Struct, gc=False):
    logprob: float | None = None


class _Logprobs(Struct, gc=False):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # legacy completions


class _FullToken(Struct, gc=False):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list["_FullToken"] = msgspec.field(default_factory=list)


class _FullLogprobs(Struct, gc=False):
    content: list[_FullToken] | None = None
    tokens: list[str] = msgspec.field(default_factory=list)  # legacy completions have columns
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _FullChoice(Struct, gc=False):
    logprobs: _FullLogprobs | None = None


class _FullReply(Struct, gc=False):
    """The same once more, for a harness that wants to see log-probabilities with their alternatives."""

    choices: list[_FullChoice] = msgspec.field(default_factory=list)


class _IdToken(Struct, gc=False):
    token_id: int
    logprob: float | None = None
    top_logprobs: list["_IdToken"] = msgspec.field(default_factory=list)


class _IdLogprobs(Struct, gc=False):
    content: list[_IdToken] | None = None


class _IdChoice(Struct, gc=False):
    logprobs: _IdLogprobs | None = None


class _IdReply(Struct, gc=False):
    choices: list[_IdChoice] = msgspec.field(default_factory=list)


class _SampledToken(Struct, array_like=True, gc=False):
    logprob: float | None
    id: int


class _MetaInfo(Struct, gc=False):
    output_token_logprobs: list[_SampledToken] | None = None


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class MessageOrDelta(Struct, gc=False):
    """A whole message, or the delta of one: the fields are the same."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    refusal: str | None = None


class _WeightVersion(Struct, gc=False):
    version: str | int
    start: int
    end: int


class Choice(Struct, gc=False):
    index: int = 0
    delta: MessageOrDelta | None = None
    message: MessageOrDelta | None = None
    text: str | None = None  # legacy completions
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = JSON_NULL  # SGLang has them here, vLLM on top
    meta_info: _MetaInfo | None = None  # SGLang
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[_WeightVersion] | None = None  # of token ids in, token ids out
    routed_experts: str | None = None  # base64


class _CachedTokens(Struct, gc=False):
    cached_tokens: int | None = None


class _ReasoningTokens(Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _ReasoningTokens | None = None


class EndpointReply(Struct, gc=False):
    """A whole completion, or one chunk of a stream."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    prompt_token_ids: Raw = JSON_NULL
    error: Raw = JSON_NULL


class _Model(Struct, gc=False):
    id: str
    max_model_len: int | None = None
    root: str | None = None  # where the server has it from


class ModelListing(Struct, gc=False):
    data: list[_Model] = msgspec.field(default_factory=list)


_reply = msgspec.json.Decoder(EndpointReply)
_full_reply = msgspec.json.Decoder(_FullReply)
_id_reply = msgspec.json.Decoder(_IdReply)
model_list_decoder = msgspec.json.Decoder(ModelListing)

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "abort",
    "error": "abort",  # the engine gave up by itself: no end that the model chose
}


def decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    """Raises ValueError (of which msgspec's errors are) where this is no reply."""
    try:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError:
            # NaN and Infinity are no JSON, but engines write them. A log-probability that is none makes the call
            # untrainable, not unusable: such values become null, and the checks at capture say why.
            tolerant = json.loads(data, parse_constant=lambda _: None)
            return decoder.decode(msgspec.json.encode(tolerant))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class EventDecoder:
    """Turns or deltas into events, one after another. Remembers which call is open."""

    def __init__(self) -> None:
        self._call_index = -1
        self._call_is_open = False

    def decode_turn(self, turn: MessageOrDelta) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        if thinking := turn.reasoning_content or turn.reasoning:
            events.append(ReasoningDelta(thinking))
        if text := turn.content or turn.refusal:
            events.append(TextDelta(text))
        self._call_is_open = self._call_is_open and not events
        for call in turn.tool_calls or ():
            if call.index > self._call_index:
                self._call_index, self._call_is_open = call.index, True
                events.append(ToolCallStart(call.id or "", call.function.name or ""))
            elif call.index < self._call_index or (call.function.arguments and not self._call_is_open):
                raise ValueError("tool calls whose pieces are mixed")
            if call.function.arguments:
                events.append(ToolCallDelta(call.function.arguments))
        return events


def fill_chunk(chunk: Chunk, choice: Choice) -> None:
    """Ids, log-probabilities and the end, from a choice."""
    if choice.meta_info is not None and choice.meta_info.output_token_logprobs is not None:
        sampled = choice.meta_info.output_token_logprobs
        chunk.ids = [token.id for token in sampled]
        chunk.logprobs = [token.logprob for token in sampled]
    else:
        if choice.token_ids:
            chunk.ids = choice.token_ids
        if choice.logprobs is not None:
            content = choice.logprobs.content
            chunk.logprobs = choice.logprobs.token_logprobs if content is None else [token.logprob for token in content]
    if choice.weight_versions:
        chunk.versions = _parse_version_spans(choice.weight_versions)
    if choice.routed_experts is not None:
        chunk.routed_experts = base64.b64decode(choice.routed_experts)
    if choice.finish_reason:
        chunk.finish_reason = _FINISH.get(choice.finish_reason, "stop")
        if isinstance(choice.stop_reason, str):
            chunk.stop_sequence = choice.stop_reason


def _parse_version_spans(weight_versions: list[_WeightVersion]) -> list[VersionSpan] | None:
    """None where the labels are no versions of ours, which are whole numbers."""
    try:
        return [VersionSpan(int(span.version), span.start, span.end) for span in weight_versions]
    except ValueError:
        return None


def read_id_alternatives(data: bytes, token_text: Callable[[int], str]) -> list[TokenLogprob] | None:
    """Alternatives from a reply of ids, in text for a harness that asked for them."""
    choices = decode(_id_reply, data).choices
    content = choices[0].logprobs.content if choices and choices[0].logprobs is not None else None
    return None if content is None else [_to_token_logprob(_add_token_text(token, token_text)) for token in content]


def _add_token_text(token: _IdToken, token_text: Callable[[int], str]) -> _FullToken:
    others = [_add_token_text(other, token_text) for other in token.top_logprobs]
    spelling = token_text(token.token_id)
    return _FullToken(spelling, token.logprob, list(spelling.encode("utf-8", "replace")), others)


def read_text_alternatives(data: bytes) -> list[TokenLogprob] | None:
    choices = decode(_full_reply, data).choices
    found = choices[0].logprobs if choices else None
    if found is None or found.content is not None:
        return [_to_token_logprob(token) for token in found.content] if found and found.content else None
    tops = found.top_logprobs or [None] * len(found.tokens)
    return [
        _to_token_logprob(_FullToken(token, logprob, None, [_FullToken(*other) for other in (top or {}).items()]))
        for token, logprob, top in zip(found.tokens, found.token_logprobs, tops, strict=False)
    ]


def _to_token_logprob(token: _FullToken) -> TokenLogprob:
    """Where there is no log-probability, a harness gets the number that OpenAI has for this."""
    logprob = -9999.0 if token.logprob is None else token.logprob
    return TokenLogprob(token.token, logprob, token.bytes, [_to_token_logprob(other) for other in token.top_logprobs])


def to_usage(usage: _Usage) -> Usage:
    cached, thinking = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt=_to_count(usage.prompt_tokens),
        completion=_to_count(usage.completion_tokens),
        cached=_to_count(cached.cached_tokens) if cached else 0,
        reasoning=_to_count(thinking.reasoning_tokens) if thinking else 0,
    )


def _to_count(tokens: int | None) -> int:
    return max(tokens or 0, 0)


_PROMPT_IDS_KEY = b'"prompt_token_ids":['


def read_reply(data: bytes) -> tuple[EndpointReply, bytes | None]:
    """A reply, and its prompt's ids as they stand there.

    They are most of what an engine sends, so they are cut out before the rest is decoded. Within a JSON string the
    quotes of `_PROMPT_IDS_KEY` would be escaped: what is found is the member itself.
    """
    start = data.find(_PROMPT_IDS_KEY)
    end = data.find(b"]", start)
    if start < 0 or end < 0:
        reply = decode(_reply, data)
        loose = reply.prompt_token_ids  # where white space stands in between, say
        if loose == JSON_NULL and reply.choices:
            loose = reply.choices[0].prompt_token_ids
        return reply, None if loose == JSON_NULL else bytes(loose)
    opening = start + len(_PROMPT_IDS_KEY) - 1
    return decode(_reply, data[:opening] + b"null" + data[end + 1 :]), data[opening : end + 1]


def count_json_ids(ids: bytes) -> int:
    """The length of a list of numbers, without reading it."""
    return int(np.count_nonzero(np.frombuffer(ids, np.uint8) == ord(","))) + 1 if len(ids) > 2 else 0
