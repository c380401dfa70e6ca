"""Google's contents and the canonical messages, both ways.

Invariant: the same history gives the same messages on every turn. What a harness dropped or cut into pieces is restored
from what it kept: ids of calls from the turn's signature or from their order, a turn's text from its pieces. The ideas
behind this stand in the package's docstring.
"""

import base64
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw

from polar import ids
from polar.dialects import raw_fields
from polar.dialects.base import join_namespace
from polar.dialects.google import wire as gw
from polar.dialects.raw_fields import encode
from polar.errors import ApiError
from polar.types import Media, Message, Part, Reasoning, Text, ToolCall, ToolResult

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_STRINGS = msgspec.json.Decoder(dict[str, str])
_STRING = msgspec.json.Decoder(str)

_UNPARSED_KEY = "__unparsed_arguments"
_ANY_SUBTYPE = "/*"
_TEXT_KEYS = ("output", "result", "error")  # the one key of a function's response that is just text
_URLSAFE_TO_STANDARD = str.maketrans("-_", "+/")  # Google's Python client writes base64 in this alphabet


def make_invalid_field_error(where: str, why: str) -> ApiError:
    return ApiError("invalid_request", f"{where}: {why}.", param=where)


# Contents to messages.


class _OpenCall(NamedTuple):
    """A call that has no result yet. `has_generated_id`: its id did not come over the wire."""

    id: str
    name: str
    has_generated_id: bool


class ContentReader:
    """Reads contents in order and pairs results with calls."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open_calls: list[_OpenCall] = []
        self._call_names: dict[str, str] = {}  # of all calls so far, by id
        self._call_count = 0
        self._result_count = 0

    def add_instruction(self, instruction: gw.Content | str) -> None:
        if isinstance(instruction, str):
            parts: list[Part] = [Text(instruction)]
        else:
            given = instruction.parts or []
            parts = [_decode_part(part, f"systemInstruction.parts[{n}]") for n, part in enumerate(given)]
        self.messages.append(Message("system", parts))

    def add_content(self, content: gw.Content, where: str) -> None:
        parts = content.parts or []
        if content.role == "model":
            self._add_model_turn(parts, where)
        elif not content.role or content.role in ("user", "function"):
            self._add_user_turn(parts, where)
        else:
            raise make_invalid_field_error(f"{where}.role", f"{content.role!r} is neither user nor model")

    def _add_user_turn(self, parts: list[gw.Part], where: str) -> None:
        message: Message | None = None
        if not parts:
            self.messages.append(Message("user", []))
        for n, part in enumerate(parts):
            response = part.functionResponse or part.function_response
            if response is not None:
                self.messages.append(
                    Message("tool", [self._decode_result(response, f"{where}.parts[{n}].functionResponse")])
                )
                message = None
                continue
            if message is None:
                message = Message("user", [])
                self.messages.append(message)
            message.parts.append(_decode_part(part, f"{where}.parts[{n}]"))

    def _add_model_turn(self, parts: list[gw.Part], where: str) -> None:
        if self.messages and self.messages[-1].role == "assistant":
            turn = self.messages[-1].parts
        else:
            turn = []
            self.messages.append(Message("assistant", turn))
            self._open_calls = []
        for n, part in enumerate(parts):
            signature = part.thoughtSignature or part.thought_signature
            seal = _decode_signature(signature) if signature else None
            call = part.functionCall or part.function_call
            if call is not None:
                turn.append(self._decode_call(turn, call, seal, f"{where}.parts[{n}].functionCall"))
                continue
            content = _decode_part(part, f"{where}.parts[{n}]", allow_empty=bool(seal or part.thought))
            if isinstance(content, Media):
                turn.append(content)
            elif part.thought:
                _add_thought(turn, content.text, seal)
            else:
                _add_text(turn, content.text, seal)

    def _decode_call(self, turn: list[Part], call: gw.FunctionCall, seal: str | None, where: str) -> ToolCall:
        """A call without id gets the one that we issued, if the turn's seal tells, else its number so far."""
        call_id = call.id
        if not call_id:
            seals = [seal, *(part.seal for part in turn if isinstance(part, ToolCall | Reasoning))]
            exchange = next((found for found in map(ids.find_exchange_id, seals) if found), None)
            nth = sum(isinstance(part, ToolCall) for part in turn)
            call_id = to_wire_call_id(ids.make_call_id(exchange, nth) if exchange else str(self._call_count))
        self._call_count += 1
        self._open_calls.append(_OpenCall(call_id, call.name, has_generated_id=not call.id))
        self._call_names[call_id] = call.name
        return ToolCall(call_id, call.name, _decode_arguments(call.args, f"{where}.args"), seal=seal)

    def _decode_result(self, response: gw.FunctionResponse, where: str) -> ToolResult:
        text, is_error = _decode_result_text(response.response, f"{where}.response")
        parts: list[Text | Media] = [Text(text)]
        for n, part in enumerate(response.parts or []):
            media = _decode_media(part.inlineData or part.inline_data, part.fileData or part.file_data)
            if media is None:
                raise make_invalid_field_error(f"{where}.parts[{n}]", "neither inlineData nor fileData")
            parts.append(media)
        call_id = self._match_call(response)
        return ToolResult(call_id, parts, is_error, response.name or self._call_names.get(call_id) or None)

    def _match_call(self, response: gw.FunctionResponse) -> str:
        """The id of the call that a result belongs to. An id on the wire stays as it is, unless the call had none."""
        self._result_count += 1
        by_name = [call for call in self._open_calls if call.name == response.name]
        if response.id:
            by_id = [call for call in self._open_calls if call.id == response.id]
            candidates = by_id or [call for call in by_name if call.has_generated_id]
        else:
            candidates = by_name or self._open_calls
        if not candidates:
            return response.id or f"result_{self._result_count - 1}"
        call = candidates[0]
        self._open_calls.remove(call)
        return call.id


def _add_thought(turn: list[Part], text: str, seal: str | None) -> None:
    last = turn[-1] if turn else None
    if isinstance(last, Reasoning) and last.seal is None:
        last.text += text
        last.seal = seal
    elif text or seal:
        turn.append(Reasoning(text, seal))


def _add_text(turn: list[Part], text: str, seal: str | None) -> None:
    last = turn[-1] if turn else None
    if isinstance(last, Text):
        last.text += text
    elif text:
        turn.append(Text(text))
    if seal is None or any(isinstance(part, Reasoning | ToolCall) and part.seal == seal for part in turn):
        return
    for part in reversed(turn):
        if isinstance(part, Reasoning) and part.seal is None:
            part.seal = seal
            return
    before_text = len(turn) - 1 if turn and isinstance(turn[-1], Text) else len(turn)
    turn.insert(before_text, Reasoning("", seal))


def _decode_part(part: gw.Part, where: str, *, allow_empty: bool = False) -> Text | Media:
    """A part that either side may send: text, media, or the traces of code that Google ran. With
    `allow_empty` (the part may only bring a signature), nothing at all is empty text."""
    if part.videoMetadata or part.video_metadata:
        raise raw_fields.make_unsupported_field_error(f"{where}.videoMetadata", "videos can't be cut here")
    resolution = part.mediaResolution or part.media_resolution
    media = _decode_media(part.inlineData or part.inline_data, part.fileData or part.file_data, resolution)
    if media is not None:
        return media
    if part.text is not None:
        return Text(part.text)
    code = part.executableCode or part.executable_code
    if code is not None:
        return Text(f"```{code.language.lower()}\n{code.code}\n```\n")
    result = part.codeExecutionResult or part.code_execution_result
    if result is not None:
        return Text(f"```\n{result.output}\n```\n")
    if allow_empty:
        return Text("")
    raise make_invalid_field_error(where, "no text, media or other content that may stand here")


def _decode_media(
    blob: gw.Blob | None, file: gw.FileData | None, resolution: gw.PartResolution | None = None
) -> Media | None:
    detail = resolution.level.removeprefix("MEDIA_RESOLUTION_").lower() or None if resolution else None
    if blob is not None:
        media_type = blob.mimeType or blob.mime_type
        data = blob.data.translate(_URLSAFE_TO_STANDARD)
        name = blob.displayName or blob.display_name
        return Media(_classify_media(media_type), media_type, data=data, name=name, detail=detail)
    if file is not None:
        media_type = file.mimeType or file.mime_type
        media = Media(_classify_media(media_type), name=file.displayName or file.display_name, detail=detail)
        media.media_type = "" if media_type.endswith(_ANY_SUBTYPE) else media_type
        uri = file.fileUri or file.file_uri
        if "://" in uri:
            media.url = uri
        else:
            media.file_id = uri
        return media
    return None


def _classify_media(media_type: str) -> Literal["image", "audio", "video", "file"]:
    match media_type.split("/")[0]:
        case "image" | "audio" | "video" as kind:
            return kind
        case _:
            return "file"


def _decode_arguments(args: Raw, where: str) -> str:
    """The arguments as the client spelled them, or the text that we could not send as an object."""
    if not args or bytes(args) == b"null":
        return "{}"
    text = bytes(args).decode()
    if _UNPARSED_KEY in text:
        try:
            strings = _STRINGS.decode(text)
        except msgspec.ValidationError:
            strings = {}  # the name stands somewhere further in
        if strings.keys() == {_UNPARSED_KEY}:
            return strings[_UNPARSED_KEY]
    if not text.startswith("{"):
        raise make_invalid_field_error(where, "not an object")
    return text


def _decode_result_text(response: Raw, where: str) -> tuple[str, bool]:
    """What a tool answered, and whether that is an error: the one string that a response holds, or its JSON as sent."""
    if not response or bytes(response) == b"null":
        return "", False
    held = raw_fields.decode(_FIELDS, response, where)
    key = next(iter(held)) if len(held) == 1 else ""
    if key in _TEXT_KEYS and bytes(memoryview(held[key])[:1]) == b'"':
        return raw_fields.decode(_STRING, held[key], where), key == "error"
    return bytes(response).decode(), key == "error"


def _decode_signature(signature: str) -> str:
    """What our signatures hold; others stay as they are."""
    try:
        seal = base64.b64decode(signature, validate=True).decode("ascii")
    except ValueError:
        return signature
    return seal if ids.find_exchange_id(seal) else signature


# Messages to contents.


def encode_contents(messages: list[Message]) -> list[gw.Content]:
    """Results that stand side by side share one content: Google wants all results of a turn together."""
    out: list[gw.Content] = []
    names: dict[str, str] = {}  # of calls; a result has to repeat its call's name
    previous = ""
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCall):
                names[part.id] = join_namespace(part.namespace, part.name)
        parts = [encode_part(part, names) for part in message.parts]
        if message.role == previous == "tool":
            out[-1].parts = [*(out[-1].parts or []), *parts]
        else:
            out.append(gw.Content(parts, "model" if message.role == "assistant" else "user"))
        previous = message.role
    return out


def encode_part(part: Part, names: dict[str, str]) -> gw.Part:
    """`names` are the functions' names by call id, for results that don't say."""
    match part:
        case Text():
            return gw.Part(text=part.text)
        case Reasoning():
            return gw.Part(text=part.text, thought=True, thoughtSignature=encode_signature(part.seal))
        case Media():
            blob, file = _encode_media(part)
            level = gw.PartResolution(f"MEDIA_RESOLUTION_{part.detail.upper()}") if part.detail else None
            return gw.Part(inlineData=blob, fileData=file, mediaResolution=level)
        case ToolCall():
            return gw.Part(functionCall=encode_call(part), thoughtSignature=encode_signature(part.seal))
        case ToolResult():
            text = "\n".join(item.text for item in part.parts if isinstance(item, Text))
            media = [gw.FunctionResponsePart(*_encode_media(item)) for item in part.parts if isinstance(item, Media)]
            name = part.name or names.get(part.call_id, "")
            response = _encode_response(text, part.is_error)
            return gw.Part(functionResponse=gw.FunctionResponse(name, part.call_id or None, response, media or None))


def encode_call(call: ToolCall) -> gw.FunctionCall:
    return gw.FunctionCall(join_namespace(call.namespace, call.name), call.id or None, _encode_arguments(call))


def _encode_arguments(call: ToolCall) -> Raw:
    """A custom tool's text is the parameter `input`; what is no JSON object is wrapped up, never mended."""
    if call.kind == "custom":
        return Raw(encode({"input": call.arguments}))
    text = call.arguments.strip()
    if not text:
        return Raw(b"{}")
    if _parse_object(text) is None:
        return Raw(encode({_UNPARSED_KEY: call.arguments}))
    return Raw(text.encode())


def _encode_response(text: str, is_error: bool) -> Raw:
    """A JSON object goes out as it is, unless it would be read as one that holds text."""
    held = None if is_error or text != text.strip() else _parse_object(text)
    if held is None or (len(held) == 1 and next(iter(held)) in _TEXT_KEYS):
        return Raw(encode({"error" if is_error else "output": text}))
    return Raw(text.encode())


def _parse_object(text: str) -> dict[str, Raw] | None:
    """The fields of a text that is a JSON object, None if it isn't one."""
    try:
        return _FIELDS.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _encode_media(media: Media) -> tuple[gw.Blob | None, gw.FileData | None]:
    """Google tells pictures from files by their type; other providers' addresses come without one."""
    media_type = media.media_type or ("" if media.kind == "file" else media.kind + _ANY_SUBTYPE)
    if media.data is not None:
        return gw.Blob(media_type, media.data, media.name), None
    return None, gw.FileData(media_type, media.url or media.file_id or "", media.name)


def encode_signature(seal: str | None) -> str | None:
    """Our seals go out in base64, which clients insist on; those of others came in that way."""
    return base64.b64encode(seal.encode()).decode() if seal and ids.find_exchange_id(seal) else seal or None


def to_wire_call_id(call_id: str) -> str:
    """The id under which a call goes out."""
    return f"call_{call_id}"
