"""The shapes of Anthropic's Messages API, for reading and for writing.

Only fields that change what the model sees or how it samples are named; everything else in a block (cache_control,
citations, caller, ...) is skipped by the decoder. What a tool call carries stays raw JSON, byte for byte.
"""

from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

# Content blocks.


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str


class Base64Source(Struct, tag="base64", tag_field="type"):
    media_type: str
    data: str


class UrlSource(Struct, tag="url", tag_field="type"):
    url: str


class FileSource(Struct, tag="file", tag_field="type"):
    file_id: str


class TextSource(Struct, tag="text", tag_field="type"):
    data: str


class ImageBlock(Struct, tag="image", tag_field="type"):
    source: Base64Source | UrlSource | FileSource


class ContentSource(Struct, tag="content", tag_field="type"):
    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(Struct, tag="document", tag_field="type", omit_defaults=True):
    source: Base64Source | UrlSource | FileSource | TextSource | ContentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Struct, tag="search_result", tag_field="type"):
    source: str
    title: str
    content: list[TextBlock]


class ToolReference(Struct, tag="tool_reference", tag_field="type"):
    tool_name: str


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str | None = ""


class RedactedThinkingBlock(Struct, tag="redacted_thinking", tag_field="type"):
    data: str


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: Raw


class ToolResultBlock(Struct, tag="tool_result", tag_field="type", omit_defaults=True):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReference] | None = None
    is_error: bool | None = None


VisibleBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
TurnBlock: TypeAlias = ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
ReplyBlock: TypeAlias = TextBlock | TurnBlock
Block: TypeAlias = VisibleBlock | TurnBlock | ToolResultBlock

BLOCK_TYPES = frozenset(block.__struct_config__.tag for block in get_args(Block))


# Requests.


class MessageOutputConfig(Struct):
    effort: str | None = None


class WireMessage(Struct, omit_defaults=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: str | None = None  # on system messages: how long the text stays in front of the model
    output_config: MessageOutputConfig | None = None


class _TypedBlock(Struct):
    type: str = ""


class BlockTypes(Struct):
    """Just the types of a message's blocks, to say which one is not known."""

    content: list[_TypedBlock]


class WireTool(Struct, omit_defaults=True):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Raw | UnsetType = UNSET
    input_examples: Raw | UnsetType = UNSET
    strict: bool | None = None
    defer_loading: bool | None = None


class WireToolChoice(Struct, omit_defaults=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class WireThinking(Struct, omit_defaults=True):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct, tag="json_schema", tag_field="type"):
    schema: Raw


class OutputConfig(Struct, omit_defaults=True):
    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Raw | UnsetType = UNSET


class Container(Struct):
    skills: list[Raw] | None = None


class WireRequest(Struct, omit_defaults=True):
    """A request as we write it."""

    model: str
    max_tokens: int
    messages: list[WireMessage]
    system: list[TextBlock] | UnsetType = UNSET
    tools: list[WireTool] | UnsetType = UNSET
    tool_choice: WireToolChoice | UnsetType = UNSET
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | UnsetType = UNSET
    thinking: WireThinking | UnsetType = UNSET
    output_config: OutputConfig | UnsetType = UNSET
    stream: bool = False


# Replies.


class OutputDetails(Struct):
    thinking_tokens: int


class WireUsage(Struct, omit_defaults=True):
    """`input_tokens` leaves out what was read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens_details: OutputDetails | None = None


class WireReply(Struct, tag="message", tag_field="type"):
    id: str
    role: str
    model: str
    content: list[ReplyBlock]
    usage: WireUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageStart(Struct, tag="message_start", tag_field="type"):
    message: WireReply


class BlockStart(Struct, tag="content_block_start", tag_field="type"):
    index: int
    content_block: ReplyBlock


class BlockStop(Struct, tag="content_block_stop", tag_field="type"):
    index: int


class StopDelta(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: WireUsage


class ErrorDetail(Struct):
    type: str
    message: str


class ErrorBody(Struct, tag="error", tag_field="type"):
    error: ErrorDetail
    request_id: str | None = None


class TokenCount(Struct):
    input_tokens: int


class ModelInfo(Struct, tag="model", tag_field="type"):
    id: str
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"  # what the provider sends where the date is not known
    lifecycle: str = "active"


class ModelList(Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


# What a harness sends back in place of arguments that were not JSON.


class UnparsedText(Struct):
    raw: str
    len: int = 0


class UnparsedInput(Struct, forbid_unknown_fields=True):
    text: UnparsedText = msgspec.field(name="__unparsedToolInput")
