"""Items of the Responses API, and the messages that they make up.

The items of one model turn (reasoning, message, calls) follow each other and become one assistant message. A new one
begins after any other item, and where two items name different exchanges: a harness keeps the finished items of a
stream that was cut, and the next reply's items then follow them directly.

Reasoning travels twice: as a summary and, packed, in the sealed content, so that an item whose visible text was dropped
on its way still says what the model thought.

Tools are functions, custom tools, namespaces of both, and a search that the harness runs itself: the model sees such a
search as a function, `tool_search`. All other tools of the provider's own are hosted: recorded, and not shown.
"""

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from polar import ids
from polar.dialects import raw_fields
from polar.dialects.openai_responses import wire as w
from polar.errors import ApiError
from polar.types import (
    UNSET,
    Media,
    Message,
    Part,
    Raw,
    Reasoning,
    Text,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolResult,
)

TOOL_SEARCH = "tool_search"
"""The search over tools that the harness runs itself."""


class ItemReader:
    """Reads items in order into messages and tools, and keeps the items of one model turn together."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: list[Tool] = []
        self.runs_tool_search = False
        self.effort: str | None = None
        self.text_config: w.TextConfigIn | None = None
        self.logprobs: list[TokenLogprob] = []
        self._tool_positions: dict[tuple[str | None, str], int] = {}
        self._turn: Message | None = None
        self._exchange: str | None = None

    def read_item(self, raw: Raw, where: str) -> None:
        head = raw_fields.decode(w.ITEM_HEAD, raw, where)
        kind = head.type or ("item_reference" if head.role is None else "message")
        reader = _ITEM_READERS.get(kind)
        if reader is None:
            why = _REFUSAL_REASONS.get(kind, "the provider's own tools and states mean nothing to an engine")
            raise ApiError("unsupported", f"{where}: items of type `{kind}` can't be read: {why}.", param=where)
        reader(self, raw, where)

    def add_message(self, message: Message) -> None:
        self.messages.append(message)
        self._turn = None

    def declare_tools(self, tools: Iterable[w.ToolIn], where: str) -> None:
        """Tools are declared at the top, in items, and by searches; the last word on a name counts, in its first
        place."""
        for index, found in enumerate(tools):
            self.runs_tool_search |= _is_client_search(found)
            for tool in _decode_tool(found, f"{where}[{index}]"):
                place = len(self.tools)
                if tool.kind != "hosted":
                    place = self._tool_positions.setdefault((tool.namespace, tool.name), place)
                self.tools[place : place + 1] = [tool]

    def _add_to_turn(self, parts: Iterable[Part], *issued: str | None) -> None:
        exchange = next(filter(None, map(ids.find_exchange_id, issued)), None)
        if self._turn is None or (exchange and self._exchange and exchange != self._exchange):
            self._turn = Message("assistant", [])
            self._exchange = None
            self.messages.append(self._turn)
        self._turn.parts.extend(parts)
        self._exchange = exchange or self._exchange

    def _read_message(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.MESSAGE, raw, where)
        parts = _decode_content(found.content, f"{where}.content")
        if found.role != "assistant":
            self.add_message(Message(found.role, [*parts]))
            return
        self._add_to_turn(parts, found.id)
        if isinstance(found.content, list):
            self.logprobs += [token for part in found.content for token in part.logprobs or ()]

    def _read_agent_message(self, raw: Raw, where: str) -> None:
        """From another agent of codex. What it calls encrypted is what a model wrote into a call: nothing here encrypts
        it."""
        found = raw_fields.decode(w.AGENT_MESSAGE, raw, where)
        self.add_message(Message("user", [*_decode_content(found.content, f"{where}.content")]))

    def _read_reasoning(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.REASONING, raw, where)
        text = "".join([part.text or "" for part in found.content or ()])
        text = text or "\n\n".join([part.text or "" for part in found.summary or ()])
        seal = found.encrypted_content
        if seal and (own := _OWN_SEAL.fullmatch(seal)):
            text = text or _unpack_text(own["packed"], f"{where}.encrypted_content")
            seal = own["seal"]
        self._add_to_turn([Reasoning(text, seal or None)], found.id, seal)

    def _read_function_call(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.FUNCTION_CALL, raw, where)
        call = ToolCall(found.call_id, found.name, found.arguments, namespace=found.namespace)
        self._add_to_turn([call], found.id, found.call_id)

    def _read_custom_call(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.CUSTOM_CALL, raw, where)
        call = ToolCall(found.call_id, found.name, found.input, "custom", found.namespace)
        self._add_to_turn([call], found.id, found.call_id)

    def _read_object_call(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.OBJECT_CALL, raw, where)
        said = (found.arguments, found.action, found.actions, found.operation)
        arguments = next((value for value in said if value is not UNSET), Raw(b"{}"))
        call_id = _require_call_id(found.call_id or found.id, where)
        call = ToolCall(call_id, found.type.removesuffix("_call"), _to_text(arguments, where))
        self._add_to_turn([call], found.id, found.call_id)

    def _read_output(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.OUTPUT, raw, where)
        output = [found.output] if isinstance(found.output, w.PartIn) else found.output
        result = ToolResult(
            _require_call_id(found.call_id or found.id, where),
            _decode_content(output, f"{where}.output"),
            name=found.name,
        )
        self.add_message(Message("tool", [result]))

    def _read_object_output(self, raw: Raw, where: str) -> None:
        """The model sees the JSON. Tools that a search found can be called from now on."""
        found = raw_fields.decode(w.OBJECT_OUTPUT, raw, where)
        tools = w.null_to_none(found.tools)
        if tools is not None:
            declared = raw_fields.decode(w.TOOLS, tools, f"{where}.tools")
            self.declare_tools(declared, f"{where}.tools")
        shown = tools or w.null_to_none(found.output) or Raw(b"[]")
        result = ToolResult(_require_call_id(found.call_id or found.id, where), [Text(_to_text(shown, where))])
        self.add_message(Message("tool", [result]))

    def _read_tools(self, raw: Raw, where: str) -> None:
        self.declare_tools(raw_fields.decode(w.ADDITIONAL_TOOLS, raw, where).tools, f"{where}.tools")
        self._turn = None

    def _read_configuration(self, raw: Raw, where: str) -> None:
        found = raw_fields.decode(w.CONFIGURATION_UPDATE, raw, where)
        self.effort = (found.reasoning.effort if found.reasoning else None) or self.effort
        self.text_config = found.text or self.text_config
        self._turn = None


_ITEM_READERS: dict[str, Callable[[ItemReader, Raw, str], None]] = {
    "message": ItemReader._read_message,
    "agent_message": ItemReader._read_agent_message,
    "reasoning": ItemReader._read_reasoning,
    "function_call": ItemReader._read_function_call,
    "custom_tool_call": ItemReader._read_custom_call,
    "tool_search_call": ItemReader._read_object_call,
    "local_shell_call": ItemReader._read_object_call,
    "shell_call": ItemReader._read_object_call,
    "apply_patch_call": ItemReader._read_object_call,
    "computer_call": ItemReader._read_object_call,
    "function_call_output": ItemReader._read_output,
    "custom_tool_call_output": ItemReader._read_output,
    "local_shell_call_output": ItemReader._read_output,
    "apply_patch_call_output": ItemReader._read_output,
    "computer_call_output": ItemReader._read_output,
    "tool_search_output": ItemReader._read_object_output,
    "shell_call_output": ItemReader._read_object_output,
    "additional_tools": ItemReader._read_tools,
    "configuration_update": ItemReader._read_configuration,
}

_SEALED_STATE = "only the provider that sealed it can open it; let the harness compact by itself"
_REFUSAL_REASONS = {
    "item_reference": "nothing is kept between calls; send the item itself",
    "compaction": _SEALED_STATE,
    "compaction_summary": _SEALED_STATE,
    "context_compaction": _SEALED_STATE,
    "compaction_trigger": "the harness decides what the model sees; let it compact by itself",
}
"""Why an item is refused rather than left out: the model would have seen what it stands for."""


def _decode_content(content: str | Sequence[w.PartIn] | None, where: str) -> list[Text | Media]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)]
    return [_decode_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _decode_part(part: w.PartIn, where: str) -> Text | Media:
    found: Text | Media | None = None
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            found = None if part.text is None else Text(part.text)
        case "refusal":
            found = None if part.refusal is None else Text(part.refusal)
        case "encrypted_content":
            found = None if part.encrypted_content is None else Text(part.encrypted_content)
        case "input_image" | "computer_screenshot":
            url = part.image_url.url if isinstance(part.image_url, w.UrlIn) else part.image_url
            if url:
                found = _decode_address(Media("image", detail=part.detail), url)
            elif part.file_id:
                found = Media("image", file_id=part.file_id, detail=part.detail)
        case "input_file":
            file = Media("file", name=part.filename, detail=part.detail)
            if part.file_data:
                found = _decode_address(file, part.file_data)
                if found.data is None:  # plain base64, not a data URL
                    found.url, found.data = None, part.file_data
            elif part.file_url:
                found = _decode_address(file, part.file_url)
            elif part.file_id:
                file.file_id = part.file_id
                found = file
        case "input_audio":
            if part.input_audio:
                subtype = "mpeg" if part.input_audio.format == "mp3" else part.input_audio.format
                found = Media("audio", f"audio/{subtype}", data=part.input_audio.data)
            elif part.audio_url:
                found = _decode_address(Media("audio"), part.audio_url)
        case _:
            raise ApiError("invalid_request", f"{where}: there is no content of type `{part.type}`.", param=where)
    if found is None:
        raise ApiError("invalid_request", f"{where}: the content of this `{part.type}` is missing.", param=where)
    return found


def _decode_address(media: Media, url: str) -> Media:
    """A data URL is taken apart; any other address is kept, and never fetched."""
    header, comma, data = url.partition(",")
    if comma and header.startswith("data:") and header.endswith(";base64"):
        media.media_type, media.data = header[5:-7], data
    else:
        media.url = url
    return media


_OWN_SEAL = re.compile(r"(?P<seal>polar\.\w+\.\d+)(?:\.(?P<packed>[\w=-]*))?", re.ASCII)
_MAX_UNPACKED_BYTES = 16 * 1024 * 1024


def pack_seal(seal: str, text: str) -> str:
    """The text goes into seals of our own; those of another provider are its own matter."""
    own = _OWN_SEAL.fullmatch(seal)
    if own is None or own["packed"] is not None:
        return seal
    return f"{seal}.{base64.urlsafe_b64encode(zlib.compress(text.encode(), 1)).decode()}"


def _unpack_text(packed: str | None, where: str) -> str:
    if not packed:
        return ""
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(base64.urlsafe_b64decode(packed), _MAX_UNPACKED_BYTES).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise ApiError("invalid_request", f"{where} was damaged on its way: {error}.", param=where) from error
    if not inflater.eof:
        raise ApiError("invalid_request", f"{where} is cut off, or too long.", param=where)
    return text


def _require_call_id(found: str | None, where: str) -> str:
    if found is None:
        raise ApiError("invalid_request", f"{where}.call_id is required.", param=f"{where}.call_id")
    return found


def _to_text(raw: Raw, where: str) -> str:
    """JSON as text; where it is a string, what the string says."""
    if bytes(memoryview(raw)[:1]) == b'"':
        return raw_fields.decode(w.TEXT, raw, where)
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise ApiError("invalid_request", f"{where}: {error}.", param=where) from error


# Tools


def _is_client_search(tool: w.ToolIn) -> bool:
    return tool.type == TOOL_SEARCH and tool.execution == "client"


def _decode_tool(wire_tool: w.ToolIn, where: str, namespace: str | None = None) -> Iterator[Tool]:
    description = wire_tool.description or ""
    if wire_tool.type == "function" or wire_tool.type == "custom":
        if not wire_tool.name:
            raise ApiError("invalid_request", f"{where}.name is required.", param=f"{where}.name")
        tool = Tool(wire_tool.name, description, namespace=namespace)
        if wire_tool.type == "custom":
            tool.kind, tool.grammar = "custom", w.null_to_none(wire_tool.format)
        else:
            tool.parameters, tool.strict = w.null_to_none(wire_tool.parameters), wire_tool.strict
        yield tool
    elif wire_tool.type == "namespace":
        if not wire_tool.name or namespace is not None:
            raise ApiError(
                "invalid_request", f"{where}: a namespace has a name, and no namespaces inside.", param=where
            )
        for index, inner in enumerate(wire_tool.tools or ()):
            for tool in _decode_tool(inner, f"{where}.tools[{index}]", wire_tool.name):
                if index == 0 and description and tool.kind != "hosted":
                    # said once, where the model first reads of the namespace
                    tool.description = f"{description}\n\n{tool.description}"
                yield tool
    elif _is_client_search(wire_tool):
        yield Tool(TOOL_SEARCH, description, w.null_to_none(wire_tool.parameters))
    else:
        yield Tool(wire_tool.type, kind="hosted", namespace=namespace)


# Encoding


def encode_messages(messages: Iterable[Message]) -> Iterator[w.InputItem]:
    custom_call_ids: set[str] = set()  # calls of custom tools: their results have a type of their own
    thoughts = 0
    for message in messages:
        content: list[w.Content] = []
        is_empty = True  # nothing of this message was written yet
        for part in message.parts:
            if isinstance(part, Text | Media):
                content.append(_encode_content(part, message.role))
                continue
            if content:
                yield w.MessageItem(message.role, content)
                content = []
            is_empty = False
            if isinstance(part, Reasoning):
                summary = [w.SummaryText(part.text)] if part.text else []
                sealed = None if part.seal is None else pack_seal(part.seal, part.text)
                yield w.ReasoningItem(f"rs_{thoughts}", summary, sealed)
                thoughts += 1
            elif isinstance(part, ToolCall):
                if part.kind == "custom":
                    custom_call_ids.add(part.id)
                    yield w.CustomCallItem(part.id, part.name, part.arguments, w.none_to_unset(part.namespace))
                else:
                    yield w.FunctionCallItem(part.id, part.name, part.arguments, w.none_to_unset(part.namespace))
            else:
                yield _encode_result(part, part.call_id in custom_call_ids)
        if content or (is_empty and message.role != "tool"):
            yield w.MessageItem(message.role, content)


def _encode_result(result: ToolResult, is_custom: bool) -> w.InputItem:
    """There is no error flag here: what a failed tool said goes out as it is."""
    output: str | list[w.Content] = [_encode_content(part, "tool") for part in result.parts]
    if len(result.parts) == 1 and isinstance(result.parts[0], Text):
        output = result.parts[0].text
    item = w.CustomOutputItem if is_custom else w.FunctionOutputItem
    return item(result.call_id, output, w.none_to_unset(result.name))


def _encode_content(part: Text | Media, role: str) -> w.Content:
    if isinstance(part, Text):
        return w.OutputText(part.text) if role == "assistant" else w.InputText(part.text)
    inline = None if part.data is None else f"data:{part.media_type};base64,{part.data}"
    if part.kind == "image":
        return w.InputImage(
            w.none_to_unset(inline or part.url), w.none_to_unset(part.file_id), w.none_to_unset(part.detail)
        )
    if part.kind == "audio":
        if part.data is None:
            return w.InputAudio(audio_url=w.none_to_unset(part.url))
        subtype = part.media_type.removeprefix("audio/")
        return w.InputAudio(w.Audio(part.data, "mp3" if subtype == "mpeg" else subtype))
    return w.InputFile(  # videos too: there is nothing nearer
        file_data=w.none_to_unset(inline if part.media_type or not part.data else part.data),
        file_url=w.none_to_unset(part.url),
        file_id=w.none_to_unset(part.file_id),
        filename=w.none_to_unset(part.name),
        detail=w.none_to_unset(part.detail),
    )
