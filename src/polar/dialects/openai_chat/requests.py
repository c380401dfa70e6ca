"""A chat request, both ways: messages, content parts, tool calls and their results; tools; output format; thinking."""

from collections.abc import Sequence

import msgspec

from polar.dialects import raw_fields
from polar.dialects.base import join_namespace
from polar.dialects.openai_chat import wire as w
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import (
    Media,
    Message,
    Part,
    Raw,
    Reasoning,
    Request,
    ResponseFormat,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)

_REQUEST = msgspec.json.Decoder(w.ChatRequest)
_MESSAGE = msgspec.json.Decoder(w.Message)
_NAMES = msgspec.json.Decoder(dict[str, Raw])

_UNSUPPORTED_FIELDS = {
    **w.UNSUPPORTED_FIELDS,
    "functions": ((None, []), "it was replaced by `tools`"),
    "modalities": ((None, [], ["text"]), "replies are text"),
    "audio": ((None,), "replies are text"),
    "web_search_options": ((None,), "no engine searches the web"),
    "chat_template": ((None,), "the model's own template is used"),
    "documents": ((None, []), "put documents into a message"),
    "echo": ((None, False), "a reply holds what was sampled"),
    "add_special_tokens": ((None, False), "the template writes the special tokens"),
    "add_generation_prompt": ((None, True), "every call asks for a new turn"),
    "continue_final_message": ((None, False), "every call asks for a new turn"),
}

# Template arguments that say how earlier turns are shown: the gateway's own matter, and no reason to refuse a call.
_TEMPLATE_ARGUMENTS = {*w.TemplateArguments.__struct_fields__, "preserve_thinking", "clear_thinking"}


def decode_request(raw_request: RawRequest) -> Request:
    fields = w.decode_fields(_REQUEST, raw_request)
    w.refuse_fields(raw_request, _UNSUPPORTED_FIELDS)
    if not fields.model:
        raise ApiError("invalid_request", "`model` is required.", param="model")
    if not raw_request.items:
        raise ApiError("invalid_request", "`messages` is required, with at least one message.", param="messages")
    return Request(
        model=fields.model,
        messages=_decode_messages(raw_request.items),
        tools=[_decode_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())],
        tool_choice=_decode_tool_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        sampling=fields.decode_sampling(),
        response_format=_decode_format(fields.response_format),
        thinking=_decode_thinking(fields, raw_request),
        stream=bool(fields.stream),
        stream_usage=fields.includes_usage(),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )


def build_request(request: Request) -> w.ChatRequest:
    if request.prompt is not None:
        raise ApiError("unsupported", "A chat can't continue a raw prompt: use the completions API.", param="prompt")
    messages: list[w.Message] = []
    for message in request.messages:
        if message.role == "assistant":
            messages.append(_encode_assistant(message))
        elif message.role == "tool":
            messages += [_encode_result(part) for part in message.parts if isinstance(part, ToolResult)]
        else:
            messages.append(w.Message(message.role, _encode_content(message.parts), message.name))
    out = w.ChatRequest(model=request.model, messages=messages)
    out.encode_sampling(request)
    out.max_completion_tokens, out.max_tokens = out.max_tokens, None
    if tools := [_encode_tool(tool) for tool in request.tools if tool.kind != "hosted"]:
        out.tools = tools
        out.tool_choice = _encode_tool_choice(request)
        out.parallel_tool_calls = request.parallel_tool_calls
    out.response_format = _encode_format(request.response_format)
    _set_thinking(out, request.thinking)
    if request.logprobs is not None:
        out.logprobs = True
        out.top_logprobs = request.logprobs
    return out


# Messages, decoding


def _decode_messages(items: Sequence[Raw]) -> list[Message]:
    messages: list[Message] = []
    legacy_call_id = ""  # calls of the old kind had no ids: a result belongs to the call before it
    made = raw_fields.get_decode_cache(_decode_messages)
    for index, item in enumerate(items):
        known = made.get(id(item))
        if known is not None:
            messages.append(known[1])
            continue
        where = f"messages[{index}]"
        found = raw_fields.decode(_MESSAGE, item, where)
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
        raise raw_fields.make_unsupported_field_error(
            f"{where}.audio", "no engine knows the audio that the provider keeps"
        )
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


def _encode_assistant(message: Message) -> w.Message:
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
    out = w.Message("assistant", _encode_content(content) if content or not calls else None, message.name)
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


def _encode_result(result: ToolResult) -> w.Message:
    return w.Message("tool", _encode_content(result.parts), result.name, result.call_id)


def _encode_content(parts: Sequence[Part]) -> w.Content:
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
    address = w.MediaUrl(media.url if media.url is not None else _make_data_url(media), media.detail)
    if media.kind == "image":
        return w.ImagePart(address)
    return w.VideoPart(address) if media.kind == "video" else w.AudioUrlPart(address)


_AUDIO_FORMATS = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav"}


def _encode_file(media: Media) -> w.File:
    """OpenAI knows no files by address; where one must be said, `file_data` holds it, as other providers have it."""
    if media.file_id is not None:
        return w.File(file_id=media.file_id, filename=media.name)
    data = media.url if media.url is not None else _make_data_url(media) if media.media_type else media.data
    return w.File(file_data=data, filename=media.name)


def _make_data_url(media: Media) -> str:
    return f"data:{media.media_type};base64,{media.data}"


# Tools


def _decode_tool(tool: w.Tool, where: str) -> Tool:
    if tool.type is None or tool.type == "function":
        if tool.function is None:
            raise ApiError("invalid_request", f"{where}.function is required.", param=where)
        found = tool.function
        return Tool(found.name, found.description or "", w.null_to_none(found.parameters), strict=found.strict)
    if tool.type == "custom":
        if tool.custom is None:
            raise ApiError("invalid_request", f"{where}.custom is required.", param=where)
        custom = tool.custom
        return Tool(custom.name, custom.description or "", kind="custom", grammar=w.null_to_none(custom.format))
    return Tool(tool.type, kind="hosted")


def _encode_tool(tool: Tool) -> w.Tool:
    name = join_namespace(tool.namespace, tool.name)
    description = tool.description or None
    if tool.kind == "custom":
        return w.Tool(
            "custom", custom=w.CustomTool(name, description, w.NULL if tool.grammar is None else tool.grammar)
        )
    parameters = w.NULL if tool.parameters is None else tool.parameters
    return w.Tool("function", w.FunctionTool(name, description, parameters, tool.strict))


def _decode_tool_choice(choice: w.ChatToolChoice | None) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return ToolChoice("required")
    if isinstance(choice, w.NamedToolChoice):
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            mode = choice.allowed_tools.mode
            named = [tool.function or tool.custom for tool in choice.allowed_tools.tools]
            names = [tool.name for tool in named if tool is not None]
            return ToolChoice("named" if mode == "required" else "auto", names)
        if (found := choice.function or choice.custom) is not None:
            return ToolChoice("named", [found.name])
    raise ApiError("invalid_request", "`tool_choice` names no tool.", param="tool_choice")


def _encode_tool_choice(request: Request) -> w.ChatToolChoice | None:
    choice = request.tool_choice
    if not choice.names:
        return None if choice.mode == "auto" else "none" if choice.mode == "none" else "required"
    tools = {tool.name: tool for tool in request.tools}
    references = [_encode_tool_reference(tools.get(name), name) for name in choice.names]
    if choice.mode == "named" and len(references) == 1:
        only = references[0]
        return w.NamedToolChoice(only.type, only.function, only.custom)
    return w.NamedToolChoice(
        "allowed_tools", allowed_tools=w.AllowedTools("auto" if choice.mode == "auto" else "required", references)
    )


def _encode_tool_reference(tool: Tool | None, name: str) -> w.ToolReference:
    if tool is None:
        return w.ToolReference("function", w.ToolName(name))
    named = w.ToolName(join_namespace(tool.namespace, name))
    return w.ToolReference("custom", custom=named) if tool.kind == "custom" else w.ToolReference("function", named)


# Output format and thinking


def _decode_format(wire_format: w.WireResponseFormat | None) -> ResponseFormat:
    if wire_format is None or wire_format.type == "text":
        return ResponseFormat()
    if wire_format.type == "json_object":
        return ResponseFormat("json_object")
    if wire_format.json_schema is None:
        raise ApiError(
            "invalid_request", "`response_format.json_schema` is required.", param="response_format.json_schema"
        )
    schema = wire_format.json_schema
    return ResponseFormat("json_schema", w.null_to_none(schema.schema), schema.name, schema.strict)


def _encode_format(response_format: ResponseFormat) -> w.WireResponseFormat | None:
    if response_format.kind == "text":
        return None
    if response_format.kind == "json_object":
        return w.WireResponseFormat("json_object")
    schema = w.NULL if response_format.schema is None else response_format.schema
    return w.WireResponseFormat(
        "json_schema", w.JsonSchema(response_format.name or "response", schema, response_format.strict)
    )


def _decode_thinking(fields: w.ChatRequest, raw_request: RawRequest) -> Thinking:
    """Every server has its own words for this; what is said first in the lists below wins."""
    template = fields.chat_template_kwargs or w.TemplateArguments()
    if fields.chat_template_kwargs is not None:
        given = raw_fields.decode(_NAMES, raw_request.fields["chat_template_kwargs"], "chat_template_kwargs")
        for name in given.keys() - _TEMPLATE_ARGUMENTS:
            raise raw_fields.make_unsupported_field_error(f"chat_template_kwargs.{name}", "it would change the prompt")
    reasoning = fields.reasoning or w.ReasoningOptions()
    switch = fields.thinking or w.ThinkingOptions()
    switched = {"enabled": True, "disabled": False}.get(switch.type or "")
    effort = _choose_first_set(fields.reasoning_effort, reasoning.effort, template.reasoning_effort)
    return Thinking(
        enabled=_choose_first_set(
            template.enable_thinking,
            template.thinking,
            fields.enable_thinking,
            reasoning.enabled,
            switched,
            False if effort == "none" else None,
        ),
        effort=effort,
        budget=_choose_first_set(
            fields.thinking_token_budget,
            fields.thinking_budget,
            template.thinking_budget,
            reasoning.max_tokens,
            switch.budget_tokens,
        ),
        visible=fields.include_reasoning is not False and not reasoning.exclude,
    )


def _choose_first_set(*values: w.S | None) -> w.S | None:
    return next((value for value in values if value is not None), None)


def _set_thinking(out: w.ChatRequest, thinking: Thinking) -> None:
    """`visible` is not passed on: an engine always shows its reasoning, and it is hidden on the way to the harness."""
    out.reasoning_effort = thinking.effort
    if thinking.enabled is not None or thinking.budget is not None:
        # Templates call the switch by either name, and ignore the other.
        out.chat_template_kwargs = w.TemplateArguments(thinking.enabled, thinking.enabled, thinking.budget)
