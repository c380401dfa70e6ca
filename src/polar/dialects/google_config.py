"""What a generateContent request says besides its contents, both ways: tools, their choice, generation config."""

from typing import TypeAlias

import msgspec
from msgspec import Raw

from polar.dialects import google_wire as gw
from polar.dialects import wire
from polar.dialects.google_contents import invalid_field_error, join_namespace
from polar.dialects.wire import encode
from polar.types import Request, ResponseFormat, SamplingParams, Thinking, Tool, ToolChoice

_OBJECTS = msgspec.json.Decoder(list[Raw])
_DECLARATION = msgspec.json.Decoder(gw.FunctionDeclaration)
_TOOL_CONFIG = msgspec.json.Decoder(gw.ToolConfig)
_CALLING_CONFIG = msgspec.json.Decoder(gw.FunctionCallingConfig)
_CONFIG = msgspec.json.Decoder(gw.GenerationConfig, strict=False)
_THINKING = msgspec.json.Decoder(gw.ThinkingConfig, strict=False)

# Reading.


def decode_tools(raw: Raw | None) -> list[Tool]:
    """Everything but a function is run by Google itself."""
    tools: list[Tool] = []
    entries: list[Raw] = wire.decode(_OBJECTS, raw, "tools") if raw else []
    for index, entry in enumerate(entries):
        for name, value in gw.decode_fields(entry, f"tools[{index}]").items():
            if name != "functionDeclarations":
                tools.append(Tool(name, kind="hosted"))
                continue
            where = f"tools[{index}].functionDeclarations"
            declarations: list[Raw] = wire.decode(_OBJECTS, value, where)
            tools += [_decode_tool(declaration, f"{where}[{n}]") for n, declaration in enumerate(declarations)]
    return tools


def _decode_tool(raw: Raw, where: str) -> Tool:
    declaration = wire.decode(_DECLARATION, gw.to_camel_case(raw, where), where)
    schema: Raw | None = declaration.parametersJsonSchema or None
    if schema is None and declaration.parameters:
        schema = gw.to_json_schema(declaration.parameters, f"{where}.parameters")
    return Tool(declaration.name, declaration.description, schema)


def decode_tool_choice(raw: Raw | None, tools: list[Tool]) -> ToolChoice:
    """VALIDATED is AUTO with arguments that fit the schema, so it marks the tools as strict."""
    where = "toolConfig"
    calling = wire.decode(_TOOL_CONFIG, gw.to_camel_case(raw, where), where).functionCallingConfig if raw else None
    if not calling:
        return ToolChoice()
    where = "toolConfig.functionCallingConfig"
    config = wire.decode(_CALLING_CONFIG, gw.to_camel_case(calling, where), where)
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
            raise invalid_field_error(f"{where}.mode", f"{config.mode!r} is not one of AUTO, ANY, NONE and VALIDATED")


def decode_config(raw: Raw | None) -> gw.GenerationConfig:
    """Which model, how fine to look at media, civic answers and the like are Google's own affairs, and pass."""
    where = "generationConfig"
    if raw is None:
        return gw.GenerationConfig()
    config = wire.decode(_CONFIG, gw.to_camel_case(raw, where), where)
    if (config.candidateCount or 1) != 1:
        raise wire.unsupported_field_error(f"{where}.candidateCount", "a call samples one reply")
    if any(modality.upper() != "TEXT" for modality in config.responseModalities):
        raise wire.unsupported_field_error(f"{where}.responseModalities", "replies are text")
    for name, value in (("speechConfig", config.speechConfig), ("imageConfig", config.imageConfig)):
        if value:
            raise wire.unsupported_field_error(f"{where}.{name}", "replies are text")
    if config.responseFormat:
        raise wire.unsupported_field_error(f"{where}.responseFormat", "use responseMimeType and responseJsonSchema")
    return config


def decode_sampling(config: gw.GenerationConfig) -> SamplingParams:
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


def decode_response_format(config: gw.GenerationConfig) -> ResponseFormat:
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
            raise wire.unsupported_field_error("generationConfig.responseMimeType", f"{other!r} can't be enforced here")


def decode_thinking(config: gw.GenerationConfig) -> Thinking:
    """A budget of 0 is off, -1 leaves the amount to the model."""
    where = "generationConfig.thinkingConfig"
    if not config.thinkingConfig:
        return Thinking(visible=False)
    given = wire.decode(_THINKING, gw.to_camel_case(config.thinkingConfig, where), where)
    level = given.thinkingLevel.lower()
    budget = given.thinkingBudget
    return Thinking(
        enabled=None if budget is None else budget != 0,
        effort=None if level in ("", "thinking_level_unspecified") else level,
        budget=budget if budget is not None and budget > 0 else None,
        visible=given.includeThoughts,
    )


# Writing.

EncodedTool: TypeAlias = dict[str, list[gw.FunctionDeclaration] | dict[str, str]]

_CUSTOM_INPUT = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')


def encode_tools(tools: list[Tool]) -> list[EncodedTool]:
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


def encode_tool_choice(request: Request) -> gw.ToolConfig | None:
    choice = request.tool_choice
    functions = [tool for tool in request.tools if tool.kind == "function"]
    strict = bool(functions) and all(tool.strict for tool in functions)
    mode = {"auto": "VALIDATED" if strict else "AUTO", "none": "NONE"}.get(choice.mode, "ANY")
    if mode == "AUTO" and not choice.names:
        return None
    names = {tool.name: join_namespace(tool.namespace, tool.name) for tool in request.tools}
    allowed = [names.get(name, name) for name in choice.names]
    return gw.ToolConfig(Raw(encode(gw.FunctionCallingConfig(mode, allowed))))


def encode_config(request: Request) -> gw.GenerationConfig | None:
    """Parallel calls can't be ruled out at Google; that wish is lost. Sampling that it doesn't have is refused."""
    asked, form, thoughts = request.sampling, request.response_format, request.thinking
    for name in ("min_p", "repetition_penalty", "min_tokens", "logit_bias"):
        if getattr(asked, name):
            raise wire.unsupported_field_error(name, "Google has no such parameter")
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
