"""A request of the Responses API, both ways; its input items are read and written in `items`."""

from collections.abc import Iterator, Sequence

import msgspec

from polar.dialects import raw_fields
from polar.dialects.openai_chat import wire as openai_chat_wire
from polar.dialects.openai_responses import wire as w
from polar.dialects.openai_responses.items import TOOL_SEARCH, ItemReader, encode_messages
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import (
    UNSET,
    Message,
    Raw,
    Request,
    ResponseFormat,
    SamplingParams,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    UnsetType,
)

_STATELESS = "nothing is kept between calls; send the whole `input`"
_UNSUPPORTED_FIELDS = {
    **{
        name: (neutral, why.replace("response_format", "text.format"))
        for name, (neutral, why) in openai_chat_wire.UNSUPPORTED_FIELDS.items()
    },
    "previous_response_id": ((None, ""), _STATELESS),
    "conversation": ((None, ""), _STATELESS),
    "background": ((None, False), "a reply is sampled while its call is open"),
    "truncation": ((None, "disabled"), "the model sees the whole input or the call fails"),
    "context_management": ((None, []), "the harness decides what the model sees; use its own compaction"),
    "prompt": ((None,), "there are no stored prompts; send `instructions` and `input`"),
    "generate": ((None, True), "every call samples a reply"),
}
"""Fields that would change what is sampled: the values that ask for nothing, and why any other is refused. Accepted is
what changes no token: metadata, store, service_tier, moderation, cache keys, verbosity, max_tool_calls (the provider's
own tools), reasoning.summary and reasoning.context (the template decides which earlier reasoning is shown)."""

_LOGPROBS = "message.output_text.logprobs"


def decode_request(raw_request: RawRequest) -> Request:
    fields = openai_chat_wire.decode_fields(w.REQUEST, raw_request)
    openai_chat_wire.refuse_fields(raw_request, _UNSUPPORTED_FIELDS)
    if not fields.model:
        raise ApiError("invalid_request", "`model` is required.", param="model")
    conversation = ItemReader()
    conversation.declare_tools(fields.tools or (), "tools")
    if fields.instructions:
        conversation.add_message(Message("system", [Text(fields.instructions)]))
    if fields.input is not None:
        conversation.add_message(Message("user", [Text(fields.input)]))
    for index, raw in enumerate(raw_request.items):
        conversation.read_item(raw, f"input[{index}]")
    if not conversation.messages:
        raise ApiError("invalid_request", "`input` is required, with at least one item.", param="input")
    asks_logprobs = fields.top_logprobs or _LOGPROBS in (fields.include or ())
    echo = {
        name: _to_one_line(sent) for name in w.ECHO_DEFAULTS if (sent := w.null_to_none(raw_request.fields.get(name)))
    }
    if conversation.runs_tool_search:
        echo[TOOL_SEARCH] = Raw(b'"client"')  # so that calls of it go out as the item that the harness expects
    return Request(
        model=fields.model,
        messages=conversation.messages,
        tools=conversation.tools,
        tool_choice=_decode_tool_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        sampling=_decode_sampling(fields),
        response_format=_decode_format(conversation.text_config or fields.text),
        thinking=_decode_thinking(fields, conversation.effort),
        stream=bool(fields.stream),
        logprobs=(fields.top_logprobs or 0) if asks_logprobs else None,
        echo=echo,
    )


def _decode_sampling(fields: w.RequestIn) -> SamplingParams:
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=fields.seed,
        max_tokens=fields.max_output_tokens,
        min_tokens=fields.min_tokens,
        stop=[fields.stop] if isinstance(fields.stop, str) else fields.stop or [],
        logit_bias=fields.logit_bias or None,
    )


def _decode_thinking(fields: w.RequestIn, updated_effort: str | None) -> Thinking:
    """Reasoning is shown whether or not a summary was asked for: a harness that can't read it skips the item, and one
    that drops sealed content still echoes the text."""
    asked = fields.reasoning or w.ReasoningConfigIn()
    if asked.mode not in (None, "standard"):
        raise raw_fields.make_unsupported_field_error("reasoning.mode", "one call samples one reply")
    if fields.prompt_cache_options and fields.prompt_cache_options.prewarm:
        raise raw_fields.make_unsupported_field_error("prompt_cache_options.prewarm", "every call samples a reply")
    effort = updated_effort or asked.effort or None
    return Thinking(enabled=None if effort is None else effort != "none", effort=effort)


def _decode_format(text: w.TextConfigIn | None) -> ResponseFormat:
    if text is None or text.format is None or text.format.type == "text":
        return ResponseFormat()
    found = text.format
    if found.type == "json_object":
        return ResponseFormat("json_object")
    schema = w.null_to_none(found.schema)
    if schema is None:
        raise ApiError("invalid_request", "`text.format.schema` is required.", param="text.format.schema")
    return ResponseFormat("json_schema", schema, found.name, found.strict)


def _to_one_line(raw: Raw) -> Raw:
    """An event of a stream is one line, however the harness laid out its JSON."""
    data = bytes(raw)
    return Raw(msgspec.json.format(data, indent=-1)) if b"\n" in data or b"\r" in data else raw


def build_request(request: Request) -> w.RequestOut:
    if isinstance(request.prompt, list):
        raise ApiError("unsupported", "A prompt of token ids can't be sent as a response's input.", param="prompt")
    sampling, thinking, form = request.sampling, request.thinking, request.response_format
    effort = thinking.effort or ("none" if thinking.enabled is False else None)
    include = ["reasoning.encrypted_content"]
    if request.logprobs is not None:
        include.append(_LOGPROBS)
    text: w.TextConfigOut | UnsetType = UNSET
    if form.kind != "text":
        text = w.TextConfigOut(
            w.TextFormatOut(
                form.kind, w.none_to_unset(form.name), w.none_to_unset(form.schema), w.none_to_unset(form.strict)
            )
        )
    prompt = [] if request.prompt is None else [Message("user", [Text(request.prompt)])]
    return w.RequestOut(
        model=request.model,
        input=list(encode_messages([*prompt, *request.messages])),
        stream=request.stream,
        include=include,
        tools=list(_encode_tools(request.tools)) or UNSET,
        tool_choice=_encode_tool_choice(request),
        parallel_tool_calls=w.none_to_unset(request.parallel_tool_calls),
        reasoning=w.ReasoningConfigOut(w.none_to_unset(effort), "auto" if thinking.visible else UNSET),
        text=text,
        max_output_tokens=w.none_to_unset(sampling.max_tokens),
        temperature=w.none_to_unset(sampling.temperature),
        top_p=w.none_to_unset(sampling.top_p),
        top_logprobs=request.logprobs or UNSET,
        top_k=w.none_to_unset(sampling.top_k),
        min_p=w.none_to_unset(sampling.min_p),
        presence_penalty=w.none_to_unset(sampling.presence_penalty),
        frequency_penalty=w.none_to_unset(sampling.frequency_penalty),
        repetition_penalty=w.none_to_unset(sampling.repetition_penalty),
        seed=w.none_to_unset(sampling.seed),
        min_tokens=w.none_to_unset(sampling.min_tokens),
        stop=sampling.stop or UNSET,
        logit_bias=sampling.logit_bias or UNSET,
        metadata=w.none_to_unset(request.echo.get("metadata")),
        user=w.none_to_unset(request.echo.get("user")),
        prompt_cache_key=w.none_to_unset(request.echo.get("prompt_cache_key")),
        safety_identifier=w.none_to_unset(request.echo.get("safety_identifier")),
    )


# Tools


def _decode_tool_choice(choice: str | w.ToolChoiceIn | None) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return ToolChoice("required")
    if isinstance(choice, w.ToolChoiceIn):
        if choice.type in ("function", "custom") and (name := _find_chosen_name(choice)):
            return ToolChoice("named", [name])
        if choice.type == "allowed_tools" and choice.mode in ("auto", "required"):
            # The provider's own tools stand in the list without a name; no engine has them.
            names = [name for tool in choice.tools or () if (name := _find_chosen_name(tool))]
            if choice.mode == "required" and names:
                return ToolChoice("named", names)
            if choice.mode == "auto":
                return ToolChoice("auto", names) if names else ToolChoice("none")
        elif choice.type not in ("function", "custom", "allowed_tools"):
            raise raw_fields.make_unsupported_field_error(
                "tool_choice", f"no engine has the provider's own tool `{choice.type}`"
            )
    raise ApiError("invalid_request", "`tool_choice` names no mode and no tool.", param="tool_choice")


def _find_chosen_name(choice: w.ToolChoiceIn) -> str | None:
    return choice.name or (choice.function.name if choice.function else None)


def _encode_tools(tools: Sequence[Tool]) -> Iterator[w.ToolOut]:
    """Neighbours of one namespace go back into it. A function that never said whether it is strict says null: left
    out, it would be."""
    space: w.ToolOut | None = None
    for tool in tools:
        out = w.ToolOut(tool.kind, tool.name, tool.description or UNSET)
        if tool.kind == "function":
            out.parameters, out.strict = w.none_to_unset(tool.parameters), tool.strict
        elif tool.kind == "custom":
            out.format = w.none_to_unset(tool.grammar)
        else:
            out = w.ToolOut(tool.name)
        if tool.namespace is None:
            space = None
            yield out
        elif space is not None and space.name == tool.namespace and space.tools is not UNSET:
            space.tools.append(out)
        else:
            space = w.ToolOut("namespace", tool.namespace, "", tools=[out])
            yield space


def _encode_tool_choice(request: Request) -> str | w.ToolChoiceOut | UnsetType:
    choice = request.tool_choice
    if choice.mode == "none" or choice.mode == "required":
        return choice.mode
    if not choice.names:
        return UNSET if choice.mode == "auto" else "required"
    custom = {tool.name for tool in request.tools if tool.kind == "custom"}
    named = [w.ToolChoiceOut("custom" if name in custom else "function", name) for name in choice.names]
    if choice.mode == "named" and len(named) == 1:
        return named[0]
    return w.ToolChoiceOut("allowed_tools", mode="auto" if choice.mode == "auto" else "required", tools=named)
