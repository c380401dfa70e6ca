"""OpenAI's completion APIs as they are spelled on the wire: one Struct per JSON object, used in both directions.

Optional fields have the default that means "not said", and defaults are not written, so that the same Struct reads what
any client sends and writes no more than was meant. Fields that are not named here are skipped on reading.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from polar import types
from polar.dialects.raw_fields import decode, encode, make_unsupported_field_error
from polar.errors import ApiError, EngineError
from polar.records.exchange import RawRequest
from polar.types import FinishReason, SamplingParams

S = TypeVar("S")
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]

NULL = Raw(b"null")
"""Absent JSON: msgspec reads `Raw | None` as null only, so "no value" is spelled this way."""


def null_to_none(raw: Raw) -> Raw | None:
    return None if bytes(raw) == b"null" else raw


# Content


MediaKind: TypeAlias = Literal["image", "audio", "video", "file"]


class TextPart(Struct, tag="text", tag_field="type"):
    text: str


class RefusalPart(Struct, tag="refusal", tag_field="type"):
    refusal: str


class MediaUrl(Struct, omit_defaults=True):
    """Where an image, clip or video is: an address, or the bytes themselves as a data URL."""

    url: str
    detail: str | None = None


class ImagePart(Struct, tag="image_url", tag_field="type"):
    image_url: MediaUrl | str


class VideoPart(Struct, tag="video_url", tag_field="type"):
    """vLLM's, as is `audio_url`; OpenAI has no part for these."""

    video_url: MediaUrl | str


class AudioUrlPart(Struct, tag="audio_url", tag_field="type"):
    audio_url: MediaUrl | str


class Audio(Struct):
    data: str
    format: str


class AudioPart(Struct, tag="input_audio", tag_field="type"):
    input_audio: Audio


class File(Struct, omit_defaults=True):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(Struct, tag="file", tag_field="type"):
    file: File


NonTextPart: TypeAlias = RefusalPart | ImagePart | VideoPart | AudioUrlPart | AudioPart | FilePart
ContentPart: TypeAlias = TextPart | NonTextPart
Content: TypeAlias = str | list[ContentPart]


# Messages


class FunctionCall(Struct):
    name: str
    arguments: str | None = None


class CustomCall(Struct):
    name: str
    input: str | None = None


class ChatToolCall(Struct, omit_defaults=True):
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class Message(Struct, omit_defaults=True):
    """A message of a request, or the one of a reply."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    function_call: FunctionCall | None = None
    audio: Raw = NULL


# Tools


class FunctionTool(Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None


class CustomTool(Struct, omit_defaults=True):
    name: str
    description: str | None = None
    format: Raw = NULL


class Tool(Struct, omit_defaults=True):
    type: str | None = None
    function: FunctionTool | None = None
    custom: CustomTool | None = None


class ToolName(Struct):
    name: str


class ToolReference(Struct, omit_defaults=True):
    type: Literal["function", "custom"]
    function: ToolName | None = None
    custom: ToolName | None = None


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class NamedToolChoice(Struct, omit_defaults=True):
    """A tool choice that names tools."""

    type: Literal["function", "custom", "allowed_tools"]
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: AllowedTools | None = None


ChatToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice


# Requests


class JsonSchema(Struct, omit_defaults=True):
    name: str | None = None
    schema: Raw = NULL
    strict: bool | None = None


class WireResponseFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class TemplateArguments(Struct, omit_defaults=True):
    """The chat template's own switches for thinking, under the names that templates use."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    thinking_budget: int | None = None
    reasoning_effort: str | None = None


class ReasoningOptions(Struct):
    """OpenRouter's spelling."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingOptions(Struct):
    """DeepSeek's, Kimi's and GLM's spelling."""

    type: str | None = None
    budget_tokens: int | None = None


class SamplingFields(Struct, omit_defaults=True, kw_only=True):
    """What chat and legacy completions share. Every field is optional here; the dialect checks what is required."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    def decode_sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            min_tokens=self.min_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            logit_bias=self.logit_bias or None,
        )

    def includes_usage(self) -> bool:
        """Whether the reply carries usage: a whole one always does, a stream where it is asked for."""
        return not self.stream or bool(self.stream_options and self.stream_options.include_usage)

    def encode_sampling(self, request: types.Request) -> None:
        """The other direction. `max_tokens` keeps this name; chat, which has a newer one, moves it."""
        sampling = request.sampling
        if request.stream:
            self.stream = True
            self.stream_options = StreamOptions(request.stream_usage)
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p
        self.top_k = sampling.top_k
        self.min_p = sampling.min_p
        self.presence_penalty = sampling.presence_penalty
        self.frequency_penalty = sampling.frequency_penalty
        self.repetition_penalty = sampling.repetition_penalty
        self.seed = sampling.seed
        self.max_tokens = sampling.max_tokens
        self.min_tokens = sampling.min_tokens
        self.stop = sampling.stop or None
        self.logit_bias = sampling.logit_bias or None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[Message] | UnsetType = UNSET
    tools: list[Tool] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: WireResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateArguments | None = None
    # spellings of the last two that are read and never written
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None


def decode_fields(decoder: "msgspec.json.Decoder[S]", raw_request: RawRequest) -> S:
    """All top-level fields but the list, in one pass; where that fails, field by field, to name the one at fault."""
    try:
        return decoder.decode(encode(raw_request.fields))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        for name, raw in raw_request.fields.items():
            decode(decoder, encode({name: raw}), name)
        raise ApiError("invalid_request", f"The request can't be read: {error}.") from error


ONE_REPLY_HINT = "one call samples one reply; send several calls instead"
RESPONSE_FORMAT_HINT = "constrain the reply with `response_format`"

UNSUPPORTED_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # field: (values that ask for nothing, why any other is refused)
    "n": ((None, 1), ONE_REPLY_HINT),
    "best_of": ((None, 1), ONE_REPLY_HINT),
    "use_beam_search": ((None, False), ONE_REPLY_HINT),
    "ignore_eos": ((None, False), "a turn ends where the model ends it"),
    "stop_token_ids": ((None, []), "use `stop`"),
    "include_stop_str_in_output": ((None, False), "stop strings are not part of the reply"),
    "skip_special_tokens": ((None, True), "replies hold no special tokens"),
    "allowed_token_ids": ((None, []), RESPONSE_FORMAT_HINT),
    "bad_words": ((None, []), "use `logit_bias`"),
    "logits_processors": ((None, []), "engines run no code of a client's"),
    "truncate_prompt_tokens": ((None,), "the model sees the whole prompt or the call fails"),
    "structured_outputs": ((None,), RESPONSE_FORMAT_HINT),
    "guided_json": ((None,), RESPONSE_FORMAT_HINT),
    "guided_regex": ((None,), RESPONSE_FORMAT_HINT),
    "guided_choice": ((None,), RESPONSE_FORMAT_HINT),
    "guided_grammar": ((None,), RESPONSE_FORMAT_HINT),
    "regex": ((None,), RESPONSE_FORMAT_HINT),
    "ebnf": ((None,), RESPONSE_FORMAT_HINT),
}
"""Fields that change what is sampled and that the canonical request can't hold: OpenAI's, vLLM's and SGLang's."""


_ANY = msgspec.json.Decoder(Any)


def refuse_fields(raw_request: RawRequest, unsupported_fields: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for name in unsupported_fields.keys() & raw_request.fields.keys():
        neutral, why = unsupported_fields[name]
        if decode(_ANY, raw_request.fields[name], name) not in neutral:
            raise make_unsupported_field_error(name, why)


# Replies


class CachedTokens(Struct):
    cached_tokens: int | None = None


class ReasoningTokens(Struct):
    reasoning_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


def encode_usage(counts: types.Usage) -> Usage:
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=CachedTokens(counts.cached),
        completion_tokens_details=ReasoningTokens(counts.reasoning),
    )


def decode_usage(counts: Usage | None) -> types.Usage:
    if counts is None:
        return types.Usage()
    cached, reasoning = counts.prompt_tokens_details, counts.completion_tokens_details
    return types.Usage(
        prompt=counts.prompt_tokens,
        completion=counts.completion_tokens,
        cached=(cached.cached_tokens or 0) if cached else 0,
        reasoning=(reasoning.reasoning_tokens or 0) if reasoning else 0,
    )


class Alternative(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Alternative] = msgspec.field(default_factory=list)


class Logprobs(Struct):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


def clamp_logprob(logprob: float) -> float:
    """JSON has no infinity; this is OpenAI's own word for a token that could not be sampled."""
    return logprob if logprob > -9999.0 else -9999.0


class Choice(Struct):
    index: int
    message: Message
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # vLLM's: the stop string that ended the turn


C = TypeVar("C")


class Completion(Struct, Generic[C]):
    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: Usage | None = None


def decode_completion(decoder: "msgspec.json.Decoder[Completion[C]]", body: bytes) -> Completion[C]:
    """An engine's whole answer, with at least one choice."""
    try:
        completion = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"The engine's answer is no completion: {error}.") from error
    if not completion.choices:
        raise EngineError("The engine's answer holds no choice.")
    return completion


WIRE_FINISH_REASONS: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "abort": "length",  # OpenAI has no word for it; this one says that the turn is cut
}

FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "abort",
}


def decode_finish_reason(reason: str | None) -> FinishReason:
    """A turn without a reason was cut; an unknown reason is some server's own word for a natural end."""
    return "abort" if reason is None else FINISH_REASONS.get(reason, "stop")


# Models


class Model(Struct):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(Struct):
    object: str
    data: list[Model]
