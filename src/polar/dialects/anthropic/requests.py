"""A request, both ways: its fields, its messages and their content blocks.

A tool call's input is JSON on the wire: its raw bytes are the canonical arguments, never re-serialised. What Anthropic
shows its models as text (search results, plain-text documents, tool references) becomes text here.
"""

from contextlib import suppress
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw

from polar.dialects.anthropic import wire as aw
from polar.dialects.anthropic.tools import decode_tool_choice, decode_tools, encode_tools, require_json_object
from polar.dialects.base import join_namespace
from polar.dialects.raw_fields import decode, encode, make_unsupported_field_error
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import (
    Media,
    Message,
    Part,
    Reasoning,
    Request,
    ResponseFormat,
    SamplingParams,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

T = TypeVar("T")

_STRING = msgspec.json.Decoder(str)
_INTEGER = msgspec.json.Decoder(int)
_MAYBE_INTEGER = msgspec.json.Decoder(int | None)
_MAYBE_FLOAT = msgspec.json.Decoder(float | None)
_MAYBE_BOOL = msgspec.json.Decoder(bool | None)
_MAYBE_STRINGS = msgspec.json.Decoder(list[str] | None)
_MAYBE_LIST = msgspec.json.Decoder(list[Raw] | None)
_SYSTEM = msgspec.json.Decoder(str | list[aw.TextBlock] | None)
_MESSAGE = msgspec.json.Decoder(aw.WireMessage)
_BLOCK_TYPES = msgspec.json.Decoder(aw.BlockTypes)
_TOOLS = msgspec.json.Decoder(list[aw.WireTool] | None)
_TOOL_CHOICE = msgspec.json.Decoder(aw.WireToolChoice | None)
_THINKING = msgspec.json.Decoder(aw.WireThinking | None)
_OUTPUT_CONFIG = msgspec.json.Decoder(aw.OutputConfig | None)
_OUTPUT_FORMAT = msgspec.json.Decoder(aw.OutputFormat | None)
_CONTAINER = msgspec.json.Decoder(str | aw.Container | None)

# claude-code's first system block is an accounting line whose value changes after compaction and from agent to agent.
# It says nothing to the model; left in, it would break the prefix that turns and sub-agents share.
_BILLING_HEADER = "x-anthropic-billing-header:"

_DEFAULT_MAX_TOKENS = 32_000  # Anthropic has no default of its own; this is what claude-code asks for

_UNPARSED = msgspec.json.Decoder(aw.UnparsedInput)
_UNPARSED_KEY = b'{"__unparsedToolInput":'

_REDACTED_SEAL_PREFIX = "redacted_thinking:"  # marks a seal that is the data of a redacted block

# Requests, decoding.


def decode_request(raw_request: RawRequest, params: dict[str, str]) -> Request:
    fields = raw_request.fields
    counting = params.get("verb") == "count_tokens"
    _refuse_server_features(fields, counting)
    if not raw_request.items:
        raise ApiError("invalid_request", "messages: at least one message is required.", param="messages")
    loaded_tools: set[str] = set()
    messages = _decode_system(fields) + _decode_messages(raw_request.items, loaded_tools)
    choice, parallel = decode_tool_choice(_decode_optional(fields, "tool_choice", _TOOL_CHOICE))
    thinking, response_format = _decode_output(fields)
    return Request(
        model=_decode_required(fields, "model", _STRING),
        messages=messages,
        tools=decode_tools(_decode_optional(fields, "tools", _TOOLS) or [], loaded_tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        sampling=SamplingParams(
            temperature=_decode_optional(fields, "temperature", _MAYBE_FLOAT),
            top_p=_decode_optional(fields, "top_p", _MAYBE_FLOAT),
            top_k=_decode_optional(fields, "top_k", _MAYBE_INTEGER),
            max_tokens=_decode_max_tokens(fields, counting),
            stop=_decode_optional(fields, "stop_sequences", _MAYBE_STRINGS) or [],
        ),
        response_format=response_format,
        thinking=thinking,
        stream=_decode_optional(fields, "stream", _MAYBE_BOOL) or False,
    )


def require_utf8(body: bytes) -> None:
    """Raw JSON is cut out unread, so that bytes which are no text would only be found where it is used."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError("invalid_request", f"The body is not UTF-8: {error}.") from error


def _decode_optional(fields: dict[str, Raw], name: str, decoder: "msgspec.json.Decoder[T | None]") -> T | None:
    raw = fields.get(name)
    return None if raw is None else decode(decoder, raw, name)


def _decode_required(fields: dict[str, Raw], name: str, decoder: "msgspec.json.Decoder[T]") -> T:
    if name not in fields:
        raise ApiError("invalid_request", f"{name}: Field required.", param=name)
    return decode(decoder, fields[name], name)


def _is_present(raw: Raw | msgspec.UnsetType | None) -> bool:
    return raw is not None and raw is not UNSET and bytes(raw) != b"null"


def _refuse_server_features(fields: dict[str, Raw], counting: bool) -> None:
    if _decode_optional(fields, "mcp_servers", _MAYBE_LIST):
        raise make_unsupported_field_error(
            "mcp_servers", "nothing here calls them; let the harness connect and offer their tools"
        )
    if _is_present(fields.get("thread")):
        raise make_unsupported_field_error("thread", "no conversation is held here; send all of its messages")
    if _is_present(fields.get("compaction")) and not counting:  # a count ignores it, as documented
        raise make_unsupported_field_error("compaction", "let the harness ask for a summary in a message")
    container = _decode_optional(fields, "container", _CONTAINER)
    if isinstance(container, aw.Container) and container.skills:
        raise make_unsupported_field_error("container.skills", "skills run in Anthropic's containers")


def _decode_max_tokens(fields: dict[str, Raw], counting: bool) -> int | None:
    if counting:
        return _decode_optional(fields, "max_tokens", _MAYBE_INTEGER)
    tokens = _decode_required(fields, "max_tokens", _INTEGER)
    if tokens == 0:
        raise make_unsupported_field_error("max_tokens", "0 asks to fill a cache and sample nothing")
    if tokens < 0:
        raise ApiError("invalid_request", "max_tokens: must be at least 1.", param="max_tokens")
    return tokens


def _decode_system(fields: dict[str, Raw]) -> list[Message]:
    system = _decode_optional(fields, "system", _SYSTEM)
    texts = [system] if isinstance(system, str) else [block.text for block in system or []]
    parts: list[Part] = [Text(text) for text in texts if text and not text.startswith(_BILLING_HEADER)]
    return [Message("system", parts)] if parts else []


def _decode_messages(items: list[Raw], loaded_tools: set[str]) -> list[Message]:
    """The conversation; the names of tools that a tool_reference brings in are added to `loaded_tools`."""
    wire_messages = [_decode_message(item, f"messages[{index}]") for index, item in enumerate(items)]
    last_user = max((index for index, message in enumerate(wire_messages) if message.role == "user"), default=-1)
    messages: list[Message] = []
    for index, message in enumerate(wire_messages):
        where = f"messages[{index}].content"
        if message.role == "user":
            messages += _decode_user(message, where, loaded_tools)
        elif message.role == "assistant":
            messages.append(Message("assistant", _decode_assistant(message, where)))
        elif message.output_config is not None and message.output_config.effort is not None:
            raise make_unsupported_field_error(
                f"messages[{index}].output_config", "effort can only be set for the whole request"
            )
        elif message.clear_at != "next_user_message" or index > last_user:
            messages.append(Message("system", _decode_text_only(message, where)))
    return messages


def _decode_message(item: Raw, where: str) -> aw.WireMessage:
    try:
        return decode(_MESSAGE, item, where)
    except ApiError:
        with suppress(msgspec.DecodeError, RecursionError):  # then the first error says more
            for index, block in enumerate(_BLOCK_TYPES.decode(item).content):
                if block.type not in aw.BLOCK_TYPES:
                    raise _make_unknown_block_error(block.type, f"{where}.content[{index}]") from None
        raise


def _make_unknown_block_error(block_type: str, where: str) -> ApiError:
    return ApiError(
        "unsupported",
        f"{where}: blocks of type {block_type!r} are not supported; what Anthropic's servers write, only they can show "
        "to a model.",
        param=where,
    )


def _make_misplaced_block_error(block: aw.Block, role: str, where: str) -> ApiError:
    block_type = block.__struct_config__.tag
    message = f"{where}: a block of type {block_type!r} can't stand in a message of role {role!r}."
    return ApiError("invalid_request", message, param=where)


def _list_content_blocks(message: aw.WireMessage) -> list[aw.Block]:
    if isinstance(message.content, str):
        return [aw.TextBlock(message.content)] if message.content else []
    return message.content


def _decode_text_only(message: aw.WireMessage, where: str) -> list[Part]:
    parts: list[Part] = []
    for index, block in enumerate(_list_content_blocks(message)):
        if not isinstance(block, aw.TextBlock):
            raise _make_misplaced_block_error(block, message.role, f"{where}[{index}]")
        parts.append(Text(block.text))
    return parts


def _decode_assistant(message: aw.WireMessage, where: str) -> list[Part]:
    parts: list[Part] = []
    for index, block in enumerate(_list_content_blocks(message)):
        if isinstance(block, aw.ToolResultBlock):
            raise _make_misplaced_block_error(block, message.role, f"{where}[{index}]")
        if isinstance(block, aw.TurnBlock):
            parts.append(decode_turn_block(block))
        else:
            parts += decode_visible_block(block)
    return parts


def _decode_user(message: aw.WireMessage, where: str, loaded_tools: set[str]) -> list[Message]:
    """Each tool result becomes a message of its own; what stands between them stays together."""
    blocks = _list_content_blocks(message)
    if not blocks:
        return [Message("user", [])]
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        if isinstance(block, aw.ToolResultBlock):
            messages.append(Message("tool", [decode_tool_result(block, loaded_tools)]))
        elif isinstance(block, aw.TurnBlock):
            raise _make_misplaced_block_error(block, message.role, f"{where}[{index}]")
        elif messages and messages[-1].role == "user":
            messages[-1].parts += decode_visible_block(block)
        else:
            messages.append(Message("user", [*decode_visible_block(block)]))
    return messages


def _decode_output(fields: dict[str, Raw]) -> tuple[Thinking, ResponseFormat]:
    config = _decode_optional(fields, "output_config", _OUTPUT_CONFIG) or aw.OutputConfig()
    if _is_present(config.task_budget):
        raise make_unsupported_field_error(
            "output_config.task_budget", "only Anthropic's models are told of such a budget"
        )
    thinking = _decode_thinking(fields, config.effort)
    wanted = config.format or _decode_optional(fields, "output_format", _OUTPUT_FORMAT)
    if wanted is None:
        return thinking, ResponseFormat()
    return thinking, ResponseFormat("json_schema", require_json_object(wanted.schema, "output_config.format.schema"))


def _decode_thinking(fields: dict[str, Raw], effort: str | None) -> Thinking:
    """`display` changes nothing: at Anthropic, thinking that a reply omits still reaches the model in the next turn,
    inside the signature. Here only the text that the harness sends back can do that, so it is always shown."""
    thinking = _decode_optional(fields, "thinking", _THINKING)
    if thinking is None:
        return Thinking(effort=effort)
    if thinking.type == "between_tools":
        raise make_unsupported_field_error(
            "thinking.type", "no engine can limit thinking to the time between tool calls"
        )
    if thinking.type == "disabled":
        return Thinking(enabled=False, effort=effort, visible=False)
    return Thinking(enabled=True, effort=effort, budget=thinking.budget_tokens)


# Content blocks, decoding.


def decode_visible_block(block: aw.VisibleBlock) -> list[Text | Media]:
    """What a block that may stand in any turn says."""
    if isinstance(block, aw.TextBlock):
        return [Text(block.text)]
    if isinstance(block, aw.ImageBlock):
        return [_decode_media("image", block.source)]
    if isinstance(block, aw.SearchResultBlock):
        heading = _format_heading(("Title", block.title), ("Source", block.source))
        return [*heading, *(Text(part.text) for part in block.content)]
    source, title, context = block.source, ("Title", block.title), ("Context", block.context)
    if isinstance(source, aw.TextSource):
        return [*_format_heading(title, context), Text(source.data)]
    if isinstance(source, aw.ContentSource):
        content = [aw.TextBlock(source.content)] if isinstance(source.content, str) else source.content
        return [*_format_heading(title, context), *(part for inner in content for part in decode_visible_block(inner))]
    return [*_format_heading(context), _decode_media("file", source, block.title)]


def decode_turn_block(block: aw.TurnBlock) -> Reasoning | ToolCall:
    """What a block that only the model writes says."""
    if isinstance(block, aw.ThinkingBlock):
        return Reasoning(block.thinking, block.signature or None)
    if isinstance(block, aw.RedactedThinkingBlock):
        return Reasoning("", _REDACTED_SEAL_PREFIX + block.data)
    return ToolCall(block.id, block.name, _decode_arguments(block.input))


def decode_tool_result(block: aw.ToolResultBlock, loaded_tools: set[str]) -> ToolResult:
    """The names of tools that a tool_reference brings in are added to `loaded_tools`."""
    parts: list[Text | Media] = []
    if isinstance(block.content, str):
        parts = [Text(block.content)] if block.content else []
    else:
        for inner in block.content or []:
            if isinstance(inner, aw.ToolReference):
                loaded_tools.add(inner.tool_name)
                parts.append(Text(f"The tool {inner.tool_name} is available now."))
            else:
                parts += decode_visible_block(inner)
    return ToolResult(block.tool_use_id, parts, is_error=block.is_error or False)


def _decode_arguments(value: Raw) -> str:
    """The input as it was sent; arguments that did not parse at the harness come back as the model wrote them."""
    text = bytes(value)
    if text.startswith(_UNPARSED_KEY):
        with suppress(msgspec.DecodeError):  # then it only looks alike
            return _UNPARSED.decode(text).text.raw
    return text.decode()


def _format_heading(*lines: tuple[str, str | None]) -> list[Text]:
    """What Anthropic tells the model about a document besides its content."""
    said = [f"{label}: {value}\n" for label, value in lines if value]
    return [Text("".join(said) + "\n")] if said else []


def _decode_media(
    kind: Literal["image", "file"], source: aw.Base64Source | aw.UrlSource | aw.FileSource, name: str | None = None
) -> Media:
    if isinstance(source, aw.Base64Source):
        return Media(kind, source.media_type, data=source.data, name=name)
    if isinstance(source, aw.UrlSource):
        return Media(kind, url=source.url, name=name)
    return Media(kind, file_id=source.file_id, name=name)


# Requests, encoding.


def build_request(request: Request) -> aw.WireRequest:
    """Leaves out what the API has no word for: seed, penalties, min_p, logit_bias, log-probabilities, names."""
    messages = _list_messages(request)
    system: list[aw.TextBlock] = []
    if messages and messages[0].role in ("system", "developer"):
        system, messages = _encode_system(messages[0]), messages[1:]
    tools, choice = encode_tools(request)
    sampling = request.sampling
    return aw.WireRequest(
        model=request.model,
        max_tokens=_DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
        messages=_encode_messages(messages),
        system=system or UNSET,
        tools=tools or UNSET,
        tool_choice=choice or UNSET,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_sequences=sampling.stop or UNSET,
        thinking=_encode_thinking(request.thinking) or UNSET,
        output_config=_encode_output(request) or UNSET,
        stream=request.stream,
    )


def _list_messages(request: Request) -> list[Message]:
    if request.prompt is None:
        return request.messages
    if isinstance(request.prompt, str):
        return [Message("user", [Text(request.prompt)])]
    raise make_unsupported_field_error("prompt", "Anthropic takes no token ids")


def _encode_system(message: Message) -> list[aw.TextBlock]:
    blocks = []
    for part in message.parts:
        if not isinstance(part, Text):
            raise make_unsupported_field_error("system", "Anthropic's system prompt holds only text")
        blocks.append(aw.TextBlock(part.text))
    return blocks


def _encode_messages(messages: list[Message]) -> list[aw.WireMessage]:
    """Tool results that follow each other, and the user's words after them, share one message, as the API wants."""
    out: list[aw.WireMessage] = []
    results: list[aw.Block] | None = None  # the content of the last message, while it holds only results
    for message in messages:
        blocks = [*map(encode_part, message.parts)]
        if message.role == "tool":
            if results is None:
                results = []
                out.append(aw.WireMessage("user", results))
            results += blocks
        elif message.role == "user" and results is not None and blocks:
            results += blocks
            results = None
        else:
            results = None
            out.append(aw.WireMessage("system" if message.role == "developer" else message.role, blocks))
    return out


def _encode_thinking(thinking: Thinking) -> aw.WireThinking | None:
    if thinking.enabled is None and thinking.budget is None:
        return None
    if thinking.enabled is False:
        return aw.WireThinking("disabled")
    display = None if thinking.visible else "omitted"
    return aw.WireThinking("adaptive" if thinking.budget is None else "enabled", thinking.budget, display)


def _encode_output(request: Request) -> aw.OutputConfig | None:
    effort = "low" if request.thinking.effort == "minimal" else request.thinking.effort
    wanted = request.response_format
    if wanted.kind == "text":
        return aw.OutputConfig(effort) if effort else None
    return aw.OutputConfig(effort, aw.OutputFormat(wanted.schema or Raw(b'{"type":"object"}')))


# Content blocks, encoding.


def encode_part(part: Part) -> aw.Block:
    """A part of a conversation, as the harness would send it back."""
    if isinstance(part, ToolResult):
        return aw.ToolResultBlock(part.call_id, [*map(_encode_visible_block, part.parts)], part.is_error or None)
    if isinstance(part, Text | Media):
        return _encode_visible_block(part)
    return encode_turn_block(part)


def encode_turn_block(part: Reasoning | ToolCall) -> aw.TurnBlock:
    if isinstance(part, ToolCall):
        return aw.ToolUseBlock(part.id, join_namespace(part.namespace, part.name), _encode_input(part))
    if not part.text and part.seal is not None and part.seal.startswith(_REDACTED_SEAL_PREFIX):
        return aw.RedactedThinkingBlock(part.seal.removeprefix(_REDACTED_SEAL_PREFIX))
    return aw.ThinkingBlock(part.text, part.seal or "")


def _encode_visible_block(part: Text | Media) -> aw.TextBlock | aw.ImageBlock | aw.DocumentBlock:
    if isinstance(part, Text):
        return aw.TextBlock(part.text)
    if part.kind not in ("image", "file"):
        raise make_unsupported_field_error(part.kind, "Anthropic takes images and documents only")
    source: aw.Base64Source | aw.UrlSource | aw.FileSource
    if part.data is not None:
        source = aw.Base64Source(part.media_type, part.data)
    elif part.url is not None:
        source = aw.UrlSource(part.url)
    else:
        source = aw.FileSource(part.file_id or "")
    return aw.ImageBlock(source) if part.kind == "image" else aw.DocumentBlock(source, part.name)


def _encode_input(call: ToolCall) -> Raw:
    """A call's arguments as the JSON that the wire wants.

    A freeform call's text goes into the field `input`; no arguments at all are an empty object. Arguments that are not
    JSON are neither repaired nor dropped, but wrapped as claude-code wraps them, which `_decode_arguments` undoes.
    """
    if call.kind == "custom":
        return Raw(encode({"input": call.arguments}))
    if not call.arguments:
        return Raw(b"{}")
    try:
        msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        return Raw(encode(aw.UnparsedInput(aw.UnparsedText(call.arguments, len(call.arguments)))))
    return Raw(call.arguments)
