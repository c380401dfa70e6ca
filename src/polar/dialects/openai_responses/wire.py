"""The JSON of OpenAI's Responses API, as typed records: what comes in (`...In`) and what goes out.

Records that come in name only the fields that mean something to us; all others are skipped. A field of type Raw keeps
the sender's own spelling: JSON schemas, grammars, arguments that are objects on the wire.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from polar.types import TokenLogprob

T = TypeVar("T")


def null_to_none(raw: Raw | UnsetType | None) -> Raw | None:
    """Raw JSON that says something: there, and not null."""
    return raw if isinstance(raw, Raw) and bytes(raw) != b"null" else None


def none_to_unset(value: T | None) -> T | UnsetType:
    """The other way: a field for nothing is left out."""
    return UNSET if value is None else value


# --- What comes in: items ---------------------------------------------------------------------------------------------


class ItemHeadIn(Struct):
    """Enough of an input item to know what it is."""

    type: str | None = None
    role: str | None = None


class UrlIn(Struct):
    url: str


class AudioIn(Struct):
    data: str
    format: str = ""


class PartIn(Struct):
    """A piece of content, of any type: text, refusal, image, file, audio."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | UrlIn | None = None
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None
    detail: str | None = None
    input_audio: AudioIn | None = None
    audio_url: str | None = None
    encrypted_content: str | None = None
    logprobs: list[TokenLogprob] | None = None


class MessageIn(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[PartIn] | None = None
    id: str | None = None


class AgentMessageIn(Struct):
    content: list[PartIn]


class ReasoningIn(Struct):
    summary: list[PartIn] | None = None
    content: list[PartIn] | None = None
    encrypted_content: str | None = None
    id: str | None = None


class FunctionCallIn(Struct):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None


class CustomCallIn(Struct):
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None


class ObjectCallIn(Struct):
    """A call whose arguments are an object on the wire: tool_search, local_shell, shell, apply_patch, computer."""

    type: str
    arguments: Raw | UnsetType = UNSET
    action: Raw | UnsetType = UNSET
    actions: Raw | UnsetType = UNSET
    operation: Raw | UnsetType = UNSET
    call_id: str | None = None
    id: str | None = None


class OutputIn(Struct):
    """A tool's result."""

    output: str | list[PartIn] | PartIn | None = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None


class ObjectOutputIn(Struct):
    """A tool's result that is no content: the tools that a search found, or a shell's outputs."""

    output: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    call_id: str | None = None
    id: str | None = None


# --- What comes in: settings ------------------------------------------------------------------------------------------


class ToolIn(Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None
    format: Raw | UnsetType = UNSET
    execution: str | None = None
    tools: "list[ToolIn] | None" = None


class AdditionalToolsIn(Struct):
    tools: list[ToolIn]


class NamedIn(Struct):
    name: str


class ToolChoiceIn(Struct):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: "list[ToolChoiceIn] | None" = None
    function: NamedIn | None = None


class ReasoningConfigIn(Struct):
    effort: str | None = None
    mode: str | None = None


class TextFormatIn(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Raw | UnsetType = UNSET
    strict: bool | None = None


class TextConfigIn(Struct):
    format: TextFormatIn | None = None


class ConfigurationUpdateIn(Struct):
    reasoning: ReasoningConfigIn | None = None
    text: TextConfigIn | None = None


class CacheOptionsIn(Struct):
    prewarm: bool | None = None


class RequestIn(Struct):
    """The top-level fields that mean something to us, `input` only where it is plain text. The sampling fields after
    `top_p` are those of open inference servers: OpenAI has none of them."""

    model: str | None = None
    input: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    tools: list[ToolIn] | None = None
    tool_choice: str | ToolChoiceIn | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfigIn | None = None
    text: TextConfigIn | None = None
    include: list[str] | None = None
    prompt_cache_options: CacheOptionsIn | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None


# --- What comes in: a whole reply -------------------------------------------------------------------------------------


class CachedTokensIn(Struct):
    cached_tokens: int = 0


class ReasoningTokensIn(Struct):
    reasoning_tokens: int = 0


class UsageIn(Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: CachedTokensIn | None = None
    output_tokens_details: ReasoningTokensIn | None = None


class FailureIn(Struct):
    code: str | None = None
    message: str | None = None


class IncompleteIn(Struct):
    reason: str | None = None


class ReplyIn(Struct):
    id: str
    output: list[Raw]
    model: str = ""
    created_at: float = 0
    status: str | None = None
    usage: UsageIn | None = None
    error: FailureIn | None = None
    incomplete_details: IncompleteIn | None = None


REQUEST = msgspec.json.Decoder(RequestIn)
ITEM_HEAD = msgspec.json.Decoder(ItemHeadIn)
MESSAGE = msgspec.json.Decoder(MessageIn)
AGENT_MESSAGE = msgspec.json.Decoder(AgentMessageIn)
REASONING = msgspec.json.Decoder(ReasoningIn)
FUNCTION_CALL = msgspec.json.Decoder(FunctionCallIn)
CUSTOM_CALL = msgspec.json.Decoder(CustomCallIn)
OBJECT_CALL = msgspec.json.Decoder(ObjectCallIn)
OUTPUT = msgspec.json.Decoder(OutputIn)
OBJECT_OUTPUT = msgspec.json.Decoder(ObjectOutputIn)
ADDITIONAL_TOOLS = msgspec.json.Decoder(AdditionalToolsIn)
CONFIGURATION_UPDATE = msgspec.json.Decoder(ConfigurationUpdateIn)
TOOLS = msgspec.json.Decoder(list[ToolIn])
REPLY = msgspec.json.Decoder(ReplyIn)

TEXT = msgspec.json.Decoder(str)


# --- What goes out: items ---------------------------------------------------------------------------------------------


class InputText(Struct, tag="input_text", tag_field="type"):
    text: str


class InputImage(Struct, tag="input_image", tag_field="type"):
    image_url: str | UnsetType = UNSET
    file_id: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class InputFile(Struct, tag="input_file", tag_field="type"):
    file_data: str | UnsetType = UNSET
    file_url: str | UnsetType = UNSET
    file_id: str | UnsetType = UNSET
    filename: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class Audio(Struct):
    data: str
    format: str


class InputAudio(Struct, tag="input_audio", tag_field="type"):
    input_audio: Audio | UnsetType = UNSET
    audio_url: str | UnsetType = UNSET  # codex's


class OutputText(Struct, tag="output_text", tag_field="type"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class SummaryText(Struct, tag="summary_text", tag_field="type"):
    text: str


Content: TypeAlias = InputText | InputImage | InputFile | InputAudio | OutputText
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Struct, tag="message", tag_field="type"):
    role: str
    content: Sequence[Content]
    id: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET


class ReasoningItem(Struct, tag="reasoning", tag_field="type"):
    id: str
    summary: list[SummaryText]
    encrypted_content: str | None = None


class FunctionCallItem(Struct, tag="function_call", tag_field="type"):
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET


class CustomCallItem(Struct, tag="custom_tool_call", tag_field="type"):
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET


class ToolSearchCallItem(Struct, tag="tool_search_call", tag_field="type"):
    id: str
    call_id: str
    arguments: Raw
    status: ItemStatus
    execution: str = "client"


class FunctionOutputItem(Struct, tag="function_call_output", tag_field="type"):
    call_id: str
    output: str | Sequence[Content]
    name: str | UnsetType = UNSET


class CustomOutputItem(Struct, tag="custom_tool_call_output", tag_field="type"):
    call_id: str
    output: str | Sequence[Content]
    name: str | UnsetType = UNSET


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | ToolSearchCallItem
InputItem: TypeAlias = OutputItem | FunctionOutputItem | CustomOutputItem


# --- What goes out: a request -----------------------------------------------------------------------------------------


class ToolOut(Struct):
    type: str
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET
    format: Raw | UnsetType = UNSET
    tools: "list[ToolOut] | UnsetType" = UNSET


class ToolChoiceOut(Struct):
    type: str
    name: str | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    tools: "list[ToolChoiceOut] | UnsetType" = UNSET


class ReasoningConfigOut(Struct):
    effort: str | UnsetType = UNSET
    summary: str | UnsetType = UNSET


class TextFormatOut(Struct):
    type: str
    name: str | UnsetType = UNSET
    schema: Raw | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class TextConfigOut(Struct):
    format: TextFormatOut


class RequestOut(Struct, kw_only=True):
    model: str
    input: list[InputItem]
    stream: bool
    include: list[str]
    store: bool = False
    tools: list[ToolOut] | UnsetType = UNSET
    tool_choice: str | ToolChoiceOut | UnsetType = UNSET
    parallel_tool_calls: bool | UnsetType = UNSET
    reasoning: ReasoningConfigOut | UnsetType = UNSET
    text: TextConfigOut | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_logprobs: int | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    min_tokens: int | UnsetType = UNSET
    stop: list[str] | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    user: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    safety_identifier: Raw | UnsetType = UNSET


# --- What goes out: a reply, whole or streamed ------------------------------------------------------------------------


class CachedTokensOut(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokensOut(Struct):
    reasoning_tokens: int


class UsageOut(Struct):
    input_tokens: int
    input_tokens_details: CachedTokensOut
    output_tokens: int
    output_tokens_details: ReasoningTokensOut
    total_tokens: int


class FailureOut(Struct):
    code: str
    message: str


class IncompleteOut(Struct):
    reason: str


class ResponseOut(Struct, kw_only=True):
    """The `response` object, less the fields that repeat the request's (see `ECHO`)."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: FailureOut | None = None
    incomplete_details: IncompleteOut | None = None
    model: str
    output: Sequence[OutputItem]
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False  # nothing can be fetched again by its id
    usage: UsageOut | None = None


ECHO_DEFAULTS: dict[str, Raw] = {
    "instructions": Raw(b"null"),
    "max_output_tokens": Raw(b"null"),
    "max_tool_calls": Raw(b"null"),
    "metadata": Raw(b"{}"),
    "parallel_tool_calls": Raw(b"true"),
    "prompt_cache_key": Raw(b"null"),
    "prompt_cache_retention": Raw(b"null"),
    "reasoning": Raw(b'{"effort":null,"summary":null}'),
    "safety_identifier": Raw(b"null"),
    "temperature": Raw(b"1.0"),
    "text": Raw(b'{"format":{"type":"text"}}'),
    "tool_choice": Raw(b'"auto"'),
    "tools": Raw(b"[]"),
    "top_logprobs": Raw(b"0"),
    "top_p": Raw(b"1.0"),
    "truncation": Raw(b'"disabled"'),
    "user": Raw(b"null"),
}
"""The request's fields that a reply repeats, with OpenAI's default for each that the request left out."""


class StreamEvent(Struct, kw_only=True):
    """A streamed event other than a delta (those are put together from bytes)."""

    type: str
    sequence_number: int = -1  # set when it is sent
    response: Raw | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | SummaryText | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: tuple[()] | UnsetType = UNSET


class InputTokens(Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class Model(Struct):
    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "polar"


class ModelList(Struct):
    data: list[Model]
    object: str = "list"
