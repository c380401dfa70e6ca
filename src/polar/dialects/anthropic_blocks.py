"""Content blocks to canonical parts and back.

A tool call's input is JSON on the wire: its raw bytes are the canonical arguments, never re-serialised. What Anthropic
shows its models as text (search results, plain-text documents, tool references) becomes text here.
"""

from contextlib import suppress
from typing import Literal

import msgspec
from msgspec import Raw

from polar.dialects import anthropic_wire as aw
from polar.dialects.wire import encode, unsupported_field_error
from polar.types import Media, Part, Reasoning, Text, ToolCall, ToolResult

_UNPARSED = msgspec.json.Decoder(aw.UnparsedInput)
_UNPARSED_KEY = b'{"__unparsedToolInput":'

_REDACTED_SEAL_PREFIX = "redacted_thinking:"  # marks a seal that is the data of a redacted block


# Reading.


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
    """The names of tools that a tool_reference brings in are added to `loaded`."""
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


# Writing.


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


def join_namespace(namespace: str | None, name: str) -> str:
    """Anthropic has no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def _encode_visible_block(part: Text | Media) -> aw.TextBlock | aw.ImageBlock | aw.DocumentBlock:
    if isinstance(part, Text):
        return aw.TextBlock(part.text)
    if part.kind not in ("image", "file"):
        raise unsupported_field_error(part.kind, "Anthropic takes images and documents only")
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
    JSON are neither repaired nor dropped, but wrapped as claude-code wraps them, which `_arguments` undoes.
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
