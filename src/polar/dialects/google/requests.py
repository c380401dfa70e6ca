"""A generateContent request, both ways: its contents (see `contents`), tools, their choice, and generation config."""

import re
from typing import TypeAlias

import msgspec
from msgspec import Raw

from polar.dialects import raw_fields
from polar.dialects.base import join_namespace
from polar.dialects.google import contents as gc
from polar.dialects.google import wire as gw
from polar.dialects.raw_fields import encode
from polar.records.exchange import RawRequest
from polar.types import (
    Message,
    Request,
    ResponseFormat,
    SamplingParams,
    Text,
    Thinking,
    Tool,
    ToolChoice,
)

_CONTENT = msgspec.json.Decoder(gw.Content)
_INSTRUCTION = msgspec.json.Decoder(gw.Content | str)
_OBJECTS = msgspec.json.Decoder(list[Raw])
_DECLARATION = msgspec.json.Decoder(gw.FunctionDeclaration)
_TOOL_CONFIG = msgspec.json.Decoder(gw.ToolConfig)
_CALLING_CONFIG = msgspec.json.Decoder(gw.FunctionCallingConfig)
_CONFIG = msgspec.json.Decoder(gw.GenerationConfig, strict=False)
_THINKING = msgspec.json.Decoder(gw.ThinkingConfig, strict=False)

AS_ARRAY = Raw(b'"json"')
"""The form of a stream that is no stream of events; in `Request.echo["alt"]`."""

# Decoding.

_SYSTEM_ROLES = ("system", "developer")
_UNSUPPORTED_FIELDS = (
    ("cachedContent", "no cached content is kept here, send the whole contents"),
    ("continuationToken", "no cut replies are kept here, send the whole contents"),
)
"""Fields that stand for content which we don't have. Safety settings, labels, service tiers and the like pass."""


def decode_request(raw_request: RawRequest, params: dict[str, str]) -> Request:
    inner = _find_field(raw_request, "generateContentRequest")
    if inner:  # countTokens may wrap what generateContent takes
        raw_request = raw_fields.split(bytes(inner), "contents")
    for name, why in _UNSUPPORTED_FIELDS:
        if _find_field(raw_request, name):
            raise raw_fields.make_unsupported_field_error(name, why)
    if not raw_request.items:
        raise gc.make_invalid_field_error("contents", "a list with at least one entry is required")

    conversation = gc.ContentReader()
    instruction = _find_field(raw_request, "systemInstruction")
    if instruction is not None:
        conversation.add_instruction(raw_fields.decode(_INSTRUCTION, instruction, "systemInstruction"))
    for index, raw in enumerate(raw_request.items):
        where = f"contents[{index}]"
        conversation.add_content(raw_fields.decode(_CONTENT, raw, where), where)

    config = _decode_config(_find_field(raw_request, "generationConfig"))
    tools = _decode_tools(_find_field(raw_request, "tools"))
    stream = params.get("verb") == "streamGenerateContent"
    return Request(
        model=params.get("model", "").removeprefix("models/"),
        messages=conversation.messages,
        tools=tools,
        tool_choice=_decode_tool_choice(_find_field(raw_request, "toolConfig"), tools),
        sampling=_decode_sampling(config),
        response_format=_decode_response_format(config),
        thinking=_decode_thinking(config),
        stream=stream,
        logprobs=(config.logprobs or 0) if config.responseLogprobs else None,
        echo={"alt": AS_ARRAY} if stream and params.get("alt") != "sse" else {},
    )


def _find_field(raw_request: RawRequest, name: str) -> Raw | None:
    """A top-level field in either spelling; None where it is absent or null."""
    raw = raw_request.fields.get(name) or raw_request.fields.get(
        re.sub(r"[A-Z]", lambda capital: "_" + capital[0].lower(), name)
    )
    return None if raw is None or bytes(raw) == b"null" else raw


def _decode_tools(raw: Raw | None) -> list[Tool]:
    """Everything but a function is run by Google itself."""
    tools: list[Tool] = []
    entries: list[Raw] = raw_fields.decode(_OBJECTS, raw, "tools") if raw else []
    for index, entry in enumerate(entries):
        for name, value in gw.decode_fields(entry, f"tools[{index}]").items():
            if name != "functionDeclarations":
                tools.append(Tool(name, kind="hosted"))
                continue
            where = f"tools[{index}].functionDeclarations"
            declarations: list[Raw] = raw_fields.decode(_OBJECTS, value, where)
            tools += [_decode_tool(declaration, f"{where}[{n}]") for n, declaration in enumerate(declarations)]
    return tools


def _decode_tool(raw: Raw, where: str) -> Tool:
    declaration = raw_fields.decode(_DECLARATION, gw.to_camel_case(raw, where), where)
    schema: Raw | None = declaration.parametersJsonSchema or None
    if schema is None and declaration.parameters:
        schema = gw.to_json_schema(declaration.parameters, f"{where}.parameters")
    return Tool(declaration.name, declaration.description, schema)


def _decode_tool_choice(raw: Raw | None, tools: list[Tool]) -> ToolChoice:
    """VALIDATED is AUTO with arguments that fit the schema, so it marks the tools as strict."""
    where = "toolConfig"
    calling = (
        raw_fields.decode(_TOOL_CONFIG, gw.to_camel_case(raw, where), where).functionCallingConfig if raw else None
    )
    if not calling:
        return ToolChoice()
    where = "toolConfig.functionCallingConfig"
    config = raw_fields.decode(_CALLING_CONFIG, gw.to_camel_case(calling, where), where)
    names = config.allowedFunctionNames
    match config.mode.upper():
        case "" | "MODE_UNSPECIFIED" | "AUTO":
            return ToolChoice("auto", names)
        case "VALIDATED":
            for tool in tools:
                tool.strict = True if tool.kind == "function" else None
            return ToolChoice("auto", names)
        case "ANY":
            return ToolChoice("named" if names else "required", names)
        case "NONE":
            return ToolChoice("none")
        case _:
            raise gc.make_invalid_field_error(
                f"{where}.mode", f"{config.mode!r} is not one of AUTO, ANY, NONE and VALIDATED"
            )


def _decode_config(raw: Raw | None) -> gw.GenerationConfig:
    """Which model, how fine to look at media, civic answers and the like are Google's own affairs, and pass."""
    where = "generationConfig"
    if raw is None:
        return gw.GenerationConfig()
    config = raw_fields.decode(_CONFIG, gw.to_camel_case(raw, where), where)
    if (config.candidateCount or 1) != 1:
        raise raw_fields.make_unsupported_field_error(f"{where}.candidateCount", "a call samples one reply")
    if any(modality.upper() != "TEXT" for modality in config.responseModalities):
        raise raw_fields.make_unsupported_field_error(f"{where}.responseModalities", "replies are text")
    for name, value in (("speechConfig", config.speechConfig), ("imageConfig", config.imageConfig)):
        if value:
            raise raw_fields.make_unsupported_field_error(f"{where}.{name}", "replies are text")
    if config.responseFormat:
        raise raw_fields.make_unsupported_field_error(
            f"{where}.responseFormat", "use responseMimeType and responseJsonSchema"
        )
    return config


def _decode_sampling(config: gw.GenerationConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.topP,
        top_k=config.topK,
        presence_penalty=config.presencePenalty,
        frequency_penalty=config.frequencyPenalty,
        seed=config.seed,
        max_tokens=config.maxOutputTokens,
        stop=config.stopSequences,
    )


def _decode_response_format(config: gw.GenerationConfig) -> ResponseFormat:
    schema: Raw | None = config.responseJsonSchema or None
    if schema is None and config.responseSchema:
        schema = gw.to_json_schema(config.responseSchema, "generationConfig.responseSchema")
    match config.responseMimeType:
        case "application/json" | "" if schema is not None:
            return ResponseFormat("json_schema", schema)
        case "application/json":
            return ResponseFormat("json_object")
        case "text/plain" | "" if schema is None:
            return ResponseFormat()
        case other:
            raise raw_fields.make_unsupported_field_error(
                "generationConfig.responseMimeType", f"{other!r} can't be enforced here"
            )


def _decode_thinking(config: gw.GenerationConfig) -> Thinking:
    """A budget of 0 is off, -1 leaves the amount to the model."""
    where = "generationConfig.thinkingConfig"
    if not config.thinkingConfig:
        return Thinking(visible=False)
    given = raw_fields.decode(_THINKING, gw.to_camel_case(config.thinkingConfig, where), where)
    level = given.thinkingLevel.lower()
    budget = given.thinkingBudget
    return Thinking(
        enabled=None if budget is None else budget != 0,
        effort=None if level in ("", "thinking_level_unspecified") else level,
        budget=budget if budget is not None and budget > 0 else None,
        visible=given.includeThoughts,
    )


# Encoding.


def build_request(request: Request) -> gw.GenerateContentRequest:
    """The body; model and verb stand in the path. Google knows system text only in front: later on it goes out as
    the user's."""
    messages = request.messages
    if request.prompt is not None:
        if not isinstance(request.prompt, str):
            raise raw_fields.make_unsupported_field_error("prompt", "Google takes no token ids")
        messages = [Message("user", [Text(request.prompt)])]
    leading = next((n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), len(messages))
    instruction = [gc.encode_part(part, {}) for message in messages[:leading] for part in message.parts]
    return gw.GenerateContentRequest(
        contents=gc.encode_contents(messages[leading:]),
        systemInstruction=gw.Content(instruction) if leading else None,
        tools=_encode_tools(request.tools),
        toolConfig=_encode_tool_choice(request),
        generationConfig=_encode_config(request),
    )


EncodedTool: TypeAlias = dict[str, list[gw.FunctionDeclaration] | dict[str, str]]

_CUSTOM_INPUT = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')


def _encode_tools(tools: list[Tool]) -> list[EncodedTool]:
    """A custom tool becomes a function with one string, `input`; a namespace becomes part of the name."""
    functions = [
        gw.FunctionDeclaration(
            join_namespace(tool.namespace, tool.name),
            _describe_tool(tool),
            parametersJsonSchema=_CUSTOM_INPUT if tool.kind == "custom" else tool.parameters or gw.ABSENT,
        )
        for tool in tools
        if tool.kind != "hosted"
    ]
    declared: list[EncodedTool] = [{"functionDeclarations": functions}] if functions else []
    return declared + [{tool.name: {}} for tool in tools if tool.kind == "hosted"]


def _describe_tool(tool: Tool) -> str:
    if tool.grammar is None:
        return tool.description
    return f"{tool.description}\n\nThe format of `input`: {bytes(tool.grammar).decode()}".lstrip()


def _encode_tool_choice(request: Request) -> gw.ToolConfig | None:
    choice = request.tool_choice
    functions = [tool for tool in request.tools if tool.kind == "function"]
    strict = bool(functions) and all(tool.strict for tool in functions)
    mode = {"auto": "VALIDATED" if strict else "AUTO", "none": "NONE"}.get(choice.mode, "ANY")
    if mode == "AUTO" and not choice.names:
        return None
    names = {tool.name: join_namespace(tool.namespace, tool.name) for tool in request.tools}
    allowed = [names.get(name, name) for name in choice.names]
    return gw.ToolConfig(Raw(encode(gw.FunctionCallingConfig(mode, allowed))))


def _encode_config(request: Request) -> gw.GenerationConfig | None:
    """Parallel calls can't be ruled out at Google; that wish is lost. Sampling that it doesn't have is refused."""
    asked, form, thoughts = request.sampling, request.response_format, request.thinking
    for name in ("min_p", "repetition_penalty", "min_tokens", "logit_bias"):
        if getattr(asked, name):
            raise raw_fields.make_unsupported_field_error(name, "Google has no such parameter")
    budget = thoughts.budget
    if budget is None and thoughts.enabled is not None and not thoughts.effort:
        budget = -1 if thoughts.enabled else 0
    thinking_config = gw.ThinkingConfig(thoughts.visible, budget, (thoughts.effort or "").upper())
    config = gw.GenerationConfig(
        temperature=asked.temperature,
        topP=asked.top_p,
        topK=asked.top_k,
        seed=asked.seed,
        maxOutputTokens=asked.max_tokens,
        stopSequences=asked.stop,
        presencePenalty=asked.presence_penalty,
        frequencyPenalty=asked.frequency_penalty,
        responseMimeType="" if form.kind == "text" else "application/json",
        responseJsonSchema=form.schema or gw.ABSENT,
        responseLogprobs=request.logprobs is not None,
        logprobs=request.logprobs or None,
        thinkingConfig=gw.ABSENT if thinking_config == gw.ThinkingConfig() else Raw(encode(thinking_config)),
    )
    return None if config == gw.GenerationConfig() else config
