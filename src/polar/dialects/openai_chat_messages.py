"""Chat messages, both ways: roles, content parts, tool calls and their results."""

from collections.abc import Sequence

import msgspec

from polar.dialects import openai_chat_wire as w
from polar.dialects import wire
from polar.errors import ApiError
from polar.types import (
    Media,
    Message,
    Part,
    Raw,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)

_MESSAGE = msgspec.json.Decoder(w.Message)


def decode_messages(items: Sequence[Raw]) -> list[Message]:
    messages: list[Message] = []
    legacy_call_id = ""  # calls of the old kind had no ids: a result belongs to the call before it
    made = wire.cached_results(decode_messages)
    for index, item in enumerate(items):
        known = made.get(id(item))
        if known is not None:
            messages.append(known[1])
            continue
        where = f"messages[{index}]"
        found = wire.decode(_MESSAGE, item, where)
        if found.role == "assistant":
            if found.function_call is not None:
                legacy_call_id = f"function_call_{index}"
            messages.append(Message("assistant", decode_assistant(found, where, legacy_call_id), found.name))
        elif found.role == "tool" or found.role == "function":
            call_id = legacy_call_id if found.role == "function" else found.tool_call_id
            if call_id is None:
                raise ApiError("invalid_request", f"{where}.tool_call_id is required.", param=f"{where}.tool_call_id")
            parts = _decode_content(found.content, where)
            messages.append(Message("tool", [ToolResult(call_id, parts, name=found.name)]))
        else:
            messages.append(Message(found.role, [*_decode_content(found.content, where)], found.name))
        if not legacy_call_id:  # else it is what it is because of others
            made[id(item)] = item, messages[-1]
    return messages


def decode_assistant(message: w.Message, where: str, legacy_call_id: str) -> list[Part]:
    if w.null_to_none(message.audio) is not None:
        raise wire.unsupported_field_error(f"{where}.audio", "no engine knows the audio that the provider keeps")
    parts: list[Part] = []
    if reasoning := message.reasoning_content or message.reasoning:
        parts.append(Reasoning(reasoning))
    parts += _decode_content(message.content, where)
    if message.refusal:
        parts.append(Text(message.refusal))
    for index, call in enumerate(message.tool_calls or ()):
        parts.append(_decode_call(call, f"{where}.tool_calls[{index}]"))
    if message.function_call is not None:
        parts.append(ToolCall(legacy_call_id, message.function_call.name, message.function_call.arguments or ""))
    return parts


def _decode_call(call: w.ChatToolCall, where: str) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.id or "", call.custom.name, call.custom.input or "", "custom")
    if call.function is not None:
        return ToolCall(call.id or "", call.function.name, call.function.arguments or "")
    raise ApiError("invalid_request", f"{where} has neither `function` nor `custom`.", param=where)


def _decode_content(content: w.Content | None, where: str) -> list[Text | Media]:
    if not content:
        return []
    if isinstance(content, str):
        return [Text(content)]
    return [
        Text(part.text) if isinstance(part, w.TextPart) else _decode_part(part, f"{where}.content[{index}]")
        for index, part in enumerate(content)
    ]


def _decode_part(part: w.NonTextPart, where: str) -> Text | Media:
    match part:
        case w.RefusalPart():
            return Text(part.refusal)
        case w.ImagePart():
            return _decode_address("image", part.image_url)
        case w.VideoPart():
            return _decode_address("video", part.video_url)
        case w.AudioUrlPart():
            return _decode_address("audio", part.audio_url)
        case w.AudioPart():
            subtype = "mpeg" if part.input_audio.format == "mp3" else part.input_audio.format
            return Media("audio", f"audio/{subtype}", data=part.input_audio.data)
        case w.FilePart():
            return _decode_file(part.file, where)


def _decode_address(kind: w.MediaKind, address: w.MediaUrl | str) -> Media:
    """A data URL is taken apart; any other address is kept, and never fetched."""
    url, detail = (address, None) if isinstance(address, str) else (address.url, address.detail)
    header, comma, data = url.partition(",")
    if comma and header.startswith("data:") and header.endswith(";base64"):
        return Media(kind, header[len("data:") : -len(";base64")], data=data, detail=detail)
    return Media(kind, url=url, detail=detail)


def _decode_file(file: w.File, where: str) -> Media:
    if (file.file_data is None) == (file.file_id is None):
        raise ApiError("invalid_request", f"{where}.file must have one of `file_data`, `file_id`.", param=where)
    if file.file_data is None:
        media = Media("file", file_id=file.file_id)
    elif file.file_data.startswith(("data:", "http://", "https://")):
        media = _decode_address("file", file.file_data)
    else:
        media = Media("file", data=file.file_data)
    media.name = file.filename
    return media


# Messages, encoding


def encode_assistant(message: Message) -> w.Message:
    content: list[Part] = []
    calls: list[w.ChatToolCall] = []
    reasoning: str | None = None
    for part in message.parts:
        if isinstance(part, ToolCall):
            calls.append(encode_call(part, part.id))
        elif isinstance(part, Reasoning):
            reasoning = part.text if reasoning is None else reasoning + part.text
        else:
            content.append(part)
    out = w.Message("assistant", encode_content(content) if content or not calls else None, message.name)
    if calls:
        out.tool_calls = calls
    if reasoning:
        # Engines differ, from version to version, in which of the two reaches the template.
        out.reasoning_content = out.reasoning = reasoning
    return out


def encode_call(call: ToolCall, call_id: str) -> w.ChatToolCall:
    name = join_namespace(call.namespace, call.name)
    if call.kind == "custom":
        return w.ChatToolCall(call_id, "custom", custom=w.CustomCall(name, call.arguments))
    return w.ChatToolCall(call_id, "function", w.FunctionCall(name, call.arguments))


def encode_result(result: ToolResult) -> w.Message:
    return w.Message("tool", encode_content(result.parts), result.name, result.call_id)


def encode_content(parts: Sequence[Part]) -> w.Content:
    """A single text goes out as a string, which every server takes; anything else as a list of parts."""
    if not parts:
        return ""
    first = parts[0]
    if len(parts) == 1 and isinstance(first, Text) and first.text:
        return first.text
    return [
        w.TextPart(part.text) if isinstance(part, Text) else _encode_media(part)
        for part in parts
        if isinstance(part, Text | Media)
    ]


def _encode_media(media: Media) -> w.ContentPart:
    if media.file_id is not None or media.kind == "file":
        return w.FilePart(_encode_file(media))
    if media.kind == "audio" and media.data is not None:
        subtype = media.media_type.removeprefix("audio/")
        return w.AudioPart(w.Audio(media.data, _AUDIO_FORMATS.get(subtype, subtype)))
    address = w.MediaUrl(media.url if media.url is not None else _data_url(media), media.detail)
    if media.kind == "image":
        return w.ImagePart(address)
    return w.VideoPart(address) if media.kind == "video" else w.AudioUrlPart(address)


_AUDIO_FORMATS = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav"}


def _encode_file(media: Media) -> w.File:
    """OpenAI knows no files by address; where one must be said, `file_data` holds it, as other providers have it."""
    if media.file_id is not None:
        return w.File(file_id=media.file_id, filename=media.name)
    data = media.url if media.url is not None else _data_url(media) if media.media_type else media.data
    return w.File(file_data=data, filename=media.name)


def _data_url(media: Media) -> str:
    return f"data:{media.media_type};base64,{media.data}"


def join_namespace(namespace: str | None, name: str) -> str:
    """Chats know no namespaces."""
    return f"{namespace}__{name}" if namespace else name
