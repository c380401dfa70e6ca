"""OpenAI's Chat Completions, as harnesses speak it and as vLLM and SGLang serve it.

What the wire can't say: a message has its reasoning first, then its text, then its calls, in whatever order the model
wrote them; reasoning has no seal; a tool result has no error flag, so the text of a failed call goes out as it is, with
nothing put in front of it. Reasoning, which OpenAI itself never shows, travels as `reasoning_content`.
"""

import re
from collections.abc import Mapping

import msgspec

from polar import ids
from polar.dialects import openai_chat_wire as w
from polar.dialects import openai_errors, sse, wire
from polar.dialects.base import EncodedError, Route, StreamEncoder
from polar.dialects.openai_chat_messages import (
    decode_assistant,
    decode_messages,
    encode_assistant,
    encode_call,
    encode_content,
    encode_result,
    join_namespace,
)
from polar.errors import ApiError, EngineError
from polar.records.exchange import RawRequest
from polar.types import (
    Raw,
    Reasoning,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    Request,
    ResponseFormat,
    Text,
    TextDelta,
    Thinking,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallStart,
    ToolChoice,
    ToolResult,
    Usage,
)

_REQUEST = msgspec.json.Decoder(w.ChatRequest)
_COMPLETION = msgspec.json.Decoder(w.Completion[w.Choice])
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


class OpenAIChat:
    name = "openai_chat"
    routes: tuple[Route, ...] = (
        Route("POST", re.compile(r"^/v1/chat/completions$"), "generate"),
        Route("GET", re.compile(r"^/v1/models$"), "list_models"),
        Route("GET", re.compile(r"^/v1/models/(?P<model>.+)$"), "get_model"),
    )

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """A bearer token is OpenAI's way to carry a key; a client may also carry it in the path, and send none."""
        return path.startswith(("/v1/chat/", "/v1/models")) or headers.get("Authorization", "").startswith("Bearer ")

    def split(self, body: bytes) -> RawRequest:
        return wire.split(body, "messages")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:  # noqa: ARG002
        fields = w.decode_fields(_REQUEST, raw_request)
        w.refuse_fields(raw_request, _UNSUPPORTED_FIELDS)
        if not fields.model:
            raise ApiError("invalid_request", "`model` is required.", param="model")
        if not raw_request.items:
            raise ApiError("invalid_request", "`messages` is required, with at least one message.", param="messages")
        return Request(
            model=fields.model,
            messages=decode_messages(raw_request.items),
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

    def encode_request(self, request: Request) -> bytes:
        if request.prompt is not None:
            raise ApiError(
                "unsupported", "A chat can't continue a raw prompt: use the completions API.", param="prompt"
            )
        messages: list[w.Message] = []
        for message in request.messages:
            if message.role == "assistant":
                messages.append(encode_assistant(message))
            elif message.role == "tool":
                messages += [encode_result(part) for part in message.parts if isinstance(part, ToolResult)]
            else:
                messages.append(w.Message(message.role, encode_content(message.parts), message.name))
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
        return wire.encode(out)

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        shown = request.thinking.visible
        message = w.Message(
            "assistant",
            # "" and not null where there is none, as in a stream, which can't know yet
            content="".join([part.text for part in reply.parts if isinstance(part, Text)]),
            reasoning_content="".join([p.text for p in reply.parts if isinstance(p, Reasoning) and shown]) or None,
            tool_calls=[encode_call(p, "call_" + p.id) for p in reply.parts if isinstance(p, ToolCall)] or None,
        )
        choice = w.Choice(0, message, _encode_logprobs(request, reply), w.WIRE_FINISH_REASONS[reply.finish_reason])
        if reply.stop_sequence is not None:
            choice.stop_reason = reply.stop_sequence
        completion = w.Completion(
            id=f"chatcmpl-{reply.exchange_id}",
            object="chat.completion",
            created=reply.created,
            model=reply.model,
            choices=[choice],
            usage=w.encode_usage(reply.usage),
        )
        return wire.encode(completion)

    def decode_reply(self, body: bytes) -> Reply:
        completion = w.decode_completion(_COMPLETION, body)
        choice = completion.choices[0]
        try:
            parts = decode_assistant(choice.message, "choices[0].message", "")
        except ApiError as error:
            raise EngineError(f"The engine's answer can't be used: {error.message}") from error
        for part in parts:
            if isinstance(part, ToolCall):
                part.id = part.id.removeprefix("call_")
        logprobs = choice.logprobs.content if choice.logprobs else None
        return Reply(
            exchange_id=ids.find_exchange_id(completion.id) or completion.id,
            model=completion.model,
            created=completion.created,
            parts=parts,
            finish_reason=w.decode_finish_reason(choice.finish_reason),
            stop_sequence=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            usage=w.decode_usage(completion.usage),
            logprobs=None if logprobs is None else [_decode_logprob(token) for token in logprobs],
        )

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> StreamEncoder:
        return ChatStreamEncoder(request, exchange_id, created)

    def encode_count(self, tokens: int) -> bytes:
        """OpenAI has no such call for chats (no route leads here); the words are those of its Responses API."""
        return wire.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return wire.encode(_encode_model(model))
        return wire.encode(w.ModelList("list", [_encode_model(name) for name in models]))

    def encode_error(self, error: ApiError) -> EncodedError:
        return openai_errors.encode_error(error)


class ChatStreamEncoder:
    """A chunk per event. What is the same in every chunk is encoded once; a delta adds one JSON string between."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._request = request
        self._show_reasoning = request.thinking.visible
        self._chunk_start = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            wire.encode(f"chatcmpl-{exchange_id}"),
            created,
            wire.encode(request.model),
        )
        # With usage asked for, every chunk but the last says that it has none.
        self._chunk_end = b'],"usage":null}\n\n' if request.stream_usage else b"]}\n\n"
        self._delta_start = self._chunk_start + b'{"index":0,"delta":'
        self._delta_end = b',"logprobs":null,"finish_reason":null}' + self._chunk_end
        self._text_start = self._delta_start + b'{"content":'
        self._reasoning_start = self._delta_start + b'{"reasoning_content":'
        self._text_end = b"}" + self._delta_end
        self._tool_call_count = 0
        self._arguments_start = self._arguments_end = b""

    def start(self, usage: Usage | None) -> bytes:  # noqa: ARG002
        return self._delta_start + b'{"role":"assistant","content":""}' + self._delta_end

    def feed(self, event: ReplyEvent) -> bytes:
        if isinstance(event, TextDelta):
            return self._text_start + wire.encode(event.text) + self._text_end if event.text else b""
        if isinstance(event, ReasoningDelta):
            if not event.text or not self._show_reasoning:
                return b""
            return self._reasoning_start + wire.encode(event.text) + self._text_end
        if isinstance(event, ToolCallStart):
            return self._start_call(event)
        return self._arguments_start + wire.encode(event.arguments) + self._arguments_end if event.arguments else b""

    def _start_call(self, event: ToolCallStart) -> bytes:
        kind, field = (b"custom", b"input") if event.kind == "custom" else (b"function", b"arguments")
        call = self._delta_start + b'{"tool_calls":[{"index":%d,' % self._tool_call_count
        self._tool_call_count += 1
        self._arguments_start = call + b'"%b":{"%b":' % (kind, field)
        self._arguments_end = b"}}]}" + self._delta_end
        name = wire.encode(join_namespace(event.namespace, event.name))
        opening = b'"id":%b,"type":"%b","%b":{"name":%b,"%b":""' % (
            wire.encode("call_" + event.id),
            kind,
            kind,
            name,
            field,
        )
        return call + opening + self._arguments_end

    def finish(self, reply: Reply) -> bytes:
        logprobs = wire.encode(_encode_logprobs(self._request, reply))
        reason = w.WIRE_FINISH_REASONS[reply.finish_reason].encode()
        last = self._delta_start + b'{},"logprobs":%b,"finish_reason":"%b"' % (logprobs, reason)
        if reply.stop_sequence is not None:
            last += b',"stop_reason":' + wire.encode(reply.stop_sequence)
        last += b"}" + self._chunk_end
        if self._request.stream_usage:
            last += self._chunk_start + b'],"usage":' + wire.encode(w.encode_usage(reply.usage)) + b"}\n\n"
        return last + sse.encode_event(b"[DONE]")

    def error(self, error: ApiError) -> bytes:
        """No [DONE] after it: a client that overlooks the error must not take the turn for whole."""
        return sse.encode_event(openai_errors.encode_error_body(error))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE_COMMENT


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
        given = wire.decode(_NAMES, raw_request.fields["chat_template_kwargs"], "chat_template_kwargs")
        for name in given.keys() - _TEMPLATE_ARGUMENTS:
            raise wire.unsupported_field_error(f"chat_template_kwargs.{name}", "it would change the prompt")
    reasoning = fields.reasoning or w.ReasoningOptions()
    switch = fields.thinking or w.ThinkingOptions()
    switched = {"enabled": True, "disabled": False}.get(switch.type or "")
    effort = _first_given(fields.reasoning_effort, reasoning.effort, template.reasoning_effort)
    return Thinking(
        enabled=_first_given(
            template.enable_thinking,
            template.thinking,
            fields.enable_thinking,
            reasoning.enabled,
            switched,
            False if effort == "none" else None,
        ),
        effort=effort,
        budget=_first_given(
            fields.thinking_token_budget,
            fields.thinking_budget,
            template.thinking_budget,
            reasoning.max_tokens,
            switch.budget_tokens,
        ),
        visible=fields.include_reasoning is not False and not reasoning.exclude,
    )


def _first_given(*values: w.S | None) -> w.S | None:
    return next((value for value in values if value is not None), None)


def _set_thinking(out: w.ChatRequest, thinking: Thinking) -> None:
    """`visible` is not passed on: an engine always shows its reasoning, and it is hidden on the way to the harness."""
    out.reasoning_effort = thinking.effort
    if thinking.enabled is not None or thinking.budget is not None:
        # Templates call the switch by either name, and ignore the other.
        out.chat_template_kwargs = w.TemplateArguments(thinking.enabled, thinking.enabled, thinking.budget)


# Replies


def _encode_logprobs(request: Request, reply: Reply) -> w.Logprobs | None:
    """Only where the harness asked. In a stream all stand in the last chunk, since events and tokens don't line up."""
    if request.logprobs is None or reply.logprobs is None:
        return None
    return w.Logprobs(
        [
            w.TokenLogprob(
                found.token,
                w.clamp_logprob(found.logprob),
                found.bytes,
                [
                    w.Alternative(other.token, w.clamp_logprob(other.logprob), other.bytes)
                    for other in found.top_logprobs
                ],
            )
            for found in reply.logprobs
        ]
    )


def _decode_logprob(logprob: w.TokenLogprob) -> TokenLogprob:
    alternatives = [TokenLogprob(other.token, other.logprob, other.bytes) for other in logprob.top_logprobs]
    return TokenLogprob(logprob.token, logprob.logprob, logprob.bytes, alternatives)


def _encode_model(name: str) -> w.Model:
    return w.Model(name, "model", 0, "polar")
