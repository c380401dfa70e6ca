"""OpenAI's Responses API, as codex and others speak it.

Nothing is kept between calls: what refers to a stored response, conversation or item is refused. Every id and seal of
a reply carries the exchange's id, and a stream's last event holds the same `response` as the whole reply to the same
turn.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import msgspec

from polar import ids
from polar.dialects import openai_chat_wire, openai_errors, sse, wire
from polar.dialects import openai_responses_wire as w
from polar.dialects.base import HttpError, Route, StreamEncoder, Wire
from polar.dialects.openai_responses_items import Conversation, encode_messages, pack
from polar.dialects.openai_responses_tools import TOOL_SEARCH, decode_choice, encode_choice, encode_tools
from polar.errors import ApiError, ApiErrorKind, EngineError
from polar.types import (
    UNSET,
    CallDelta,
    Event,
    FinishReason,
    Message,
    Part,
    Raw,
    Reasoning,
    ReasoningDelta,
    Reply,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
    Thinking,
    TokenLogprob,
    ToolCall,
    UnsetType,
    Usage,
)

_STATELESS = "nothing is kept between calls; send the whole `input`"
_REFUSED = {
    **{
        name: (neutral, why.replace("response_format", "text.format"))
        for name, (neutral, why) in openai_chat_wire.REFUSED.items()
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


class OpenAIResponses:
    name = "openai_responses"
    routes: tuple[Route, ...] = (
        Route("POST", re.compile(r"^/v1/responses$"), "generate"),
        Route("POST", re.compile(r"^/v1/responses/input_tokens$"), "count_tokens"),
    )

    def recognises(self, path: str, headers: Mapping[str, str]) -> bool:  # noqa: ARG002
        return path.startswith("/v1/responses")

    def split(self, body: bytes) -> Wire:
        return wire.split(body, "input")

    def decode_request(self, wire: Wire, params: dict[str, str]) -> Request:  # noqa: ARG002
        fields = openai_chat_wire.decode_fields(w.REQUEST, wire)
        openai_chat_wire.refuse(wire, _REFUSED)
        return _decode_request(fields, wire)

    def encode_request(self, request: Request) -> bytes:
        return wire.encode(_encode_request(request))

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        outcome = _OUTCOMES[reply.finish_reason]
        items = _Items(request, reply.exchange_id)
        said = [part for part in reply.parts if _says_something(part)]
        for index, part in enumerate(said):
            items.add(part, "completed" if index < len(said) - 1 else outcome.last_item)
        return bytes(_Envelope(request, reply.exchange_id, reply.created).ended(reply, outcome, items))

    def decode_reply(self, body: bytes) -> Reply:
        try:
            return _decode_reply(wire.decode(w.REPLY, body, "response"))
        except ApiError as error:
            raise EngineError(f"The engine's answer can't be used: {error.message}") from error

    def stream(self, request: Request, exchange_id: str, created: int) -> StreamEncoder:
        return ResponsesStream(request, exchange_id, created)

    def encode_count(self, tokens: int) -> bytes:
        return wire.encode(w.InputTokens(tokens))

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return wire.encode(w.Model(model))
        return wire.encode(w.ModelList([w.Model(name) for name in models]))

    def encode_error(self, error: ApiError) -> HttpError:
        return openai_errors.encode_error(error)


class ResponsesStream:
    """Writes the events of one reply. An output item is open from its first event to the first of another part; what is
    the same in all deltas of an item is encoded once, when it opens."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._envelope = _Envelope(request, exchange_id, created)
        self._items = _Items(request, exchange_id)
        self._sequence = 0
        self._part: _OutputPart | None = None  # the open one; what it says is in _pieces until it closes
        self._pieces: list[str] = []
        self._item_id = ""
        self._index = 0
        self._head = self._middle = self._tail = b""  # around a delta's number and text; no head: no deltas

    def start(self, usage: Usage | None) -> bytes:  # noqa: ARG002
        begun = self._envelope.begun()
        created = self._send(w.StreamEvent(type="response.created", response=begun))
        return created + self._send(w.StreamEvent(type="response.in_progress", response=begun))

    def feed(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            if not event.text:
                return b""
            opening = b"" if isinstance(self._part, Text) else self._open(Text(""))
            return opening + self._delta(event.text)
        if isinstance(event, CallDelta):
            return self._delta(event.arguments) if event.arguments else b""
        if isinstance(event, ReasoningDelta):
            if not event.text:
                return b""
            opening = b"" if isinstance(self._part, Reasoning) else self._open(Reasoning(""))
            return opening + self._delta(event.text)
        return self._open(ToolCall(event.id, event.name, "", event.kind, event.namespace))

    def finish(self, reply: Reply) -> bytes:
        outcome = _OUTCOMES[reply.finish_reason]
        closing = self._close(outcome.last_item)
        ended = self._envelope.ended(reply, outcome, self._items)
        return closing + self._send(w.StreamEvent(type=f"response.{outcome.status}", response=ended))

    def error(self, error: ApiError) -> bytes:
        """The open item stays open: a harness keeps finished items, and must not take half of one for whole."""
        failed = self._envelope.failed(_failure(error), self._items)
        return self._send(w.StreamEvent(type="response.failed", response=failed))

    def keep_alive(self) -> bytes:
        return sse.COMMENT

    def _open(self, part: "_OutputPart") -> bytes:
        closing = self._close("completed")
        item = self._items.make(part, "in_progress")
        self._part, self._pieces = part, []
        self._item_id, self._index = self._items.id_of(part), len(self._items.output)
        added = self._send(w.StreamEvent(type="response.output_item.added", output_index=self._index, item=item))
        if isinstance(item, w.MessageItem):
            self._prepare("response.output_text.delta", b',"content_index":0', b',"logprobs":[]')
            added += self._about(
                w.StreamEvent(type="response.content_part.added", content_index=0, part=w.OutputText(""))
            )
        elif isinstance(item, w.ReasoningItem) and self._items.reasoning_visible:
            self._prepare("response.reasoning_summary_text.delta", b',"summary_index":0')
            added += self._about(
                w.StreamEvent(type="response.reasoning_summary_part.added", summary_index=0, part=w.SummaryText(""))
            )
        elif isinstance(item, w.FunctionCallItem):
            self._prepare("response.function_call_arguments.delta")
        elif isinstance(item, w.CustomCallItem):
            self._prepare("response.custom_tool_call_input.delta")
        else:  # hidden reasoning, and a call whose arguments are an object: these come whole
            self._head = b""
        return closing + added

    def _close(self, status: w.Status) -> bytes:
        part = self._part
        if part is None:
            return b""
        said = "".join(self._pieces)
        if isinstance(part, ToolCall):
            part.arguments = said
        else:
            part.text = said
        self._part = None
        item = self._items.add(part, status)
        ends: list[w.StreamEvent] = []
        if isinstance(item, w.MessageItem):
            ends = [
                w.StreamEvent(type="response.output_text.done", content_index=0, text=said, logprobs=()),
                w.StreamEvent(type="response.content_part.done", content_index=0, part=w.OutputText(said)),
            ]
        elif isinstance(item, w.ReasoningItem) and item.summary:
            ends = [
                w.StreamEvent(type="response.reasoning_summary_text.done", summary_index=0, text=said),
                w.StreamEvent(type="response.reasoning_summary_part.done", summary_index=0, part=w.SummaryText(said)),
            ]
        elif isinstance(item, w.FunctionCallItem):
            ends = [w.StreamEvent(type="response.function_call_arguments.done", name=item.name, arguments=said)]
        elif isinstance(item, w.CustomCallItem):
            ends = [w.StreamEvent(type="response.custom_tool_call_input.done", input=said)]
        done = w.StreamEvent(type="response.output_item.done", output_index=self._index, item=item)
        return b"".join([*map(self._about, ends), self._send(done)])

    def _prepare(self, name: str, place: bytes = b"", tail: bytes = b"") -> None:
        """Gets ready for deltas of the item that was just opened."""
        self._head = f'event: {name}\ndata: {{"type":"{name}","sequence_number":'.encode()
        self._middle = b',"item_id":%b,"output_index":%d%b,"delta":' % (wire.encode(self._item_id), self._index, place)
        self._tail = tail + b"}\n\n"

    def _delta(self, text: str) -> bytes:
        self._pieces.append(text)
        if not self._head:
            return b""
        sequence = self._sequence
        self._sequence = sequence + 1
        return b"%b%d%b%b%b" % (self._head, sequence, self._middle, wire.encode(text), self._tail)

    def _about(self, event: w.StreamEvent) -> bytes:
        """An event of the open item."""
        event.item_id = self._item_id
        event.output_index = self._index
        return self._send(event)

    def _send(self, event: w.StreamEvent) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return sse.event(wire.encode(event), event.type.encode())


# Requests, decoding


def _decode_request(fields: w.RequestIn, wire_request: Wire) -> Request:
    if not fields.model:
        raise ApiError("invalid_request", "`model` is required.", param="model")
    conversation = Conversation()
    conversation.declare(fields.tools or (), "tools")
    if fields.instructions:
        conversation.add(Message("system", [Text(fields.instructions)]))
    if fields.input is not None:
        conversation.add(Message("user", [Text(fields.input)]))
    for index, raw in enumerate(wire_request.items):
        conversation.read(raw, f"input[{index}]")
    if not conversation.messages:
        raise ApiError("invalid_request", "`input` is required, with at least one item.", param="input")
    asks_logprobs = fields.top_logprobs or _LOGPROBS in (fields.include or ())
    echo = {name: _on_one_line(sent) for name in w.ECHO if (sent := w.given(wire_request.fields.get(name)))}
    if conversation.runs_tool_search:
        echo[TOOL_SEARCH] = Raw(b'"client"')  # so that calls of it go out as the item that the harness expects
    return Request(
        model=fields.model,
        messages=conversation.messages,
        tools=conversation.tools,
        tool_choice=decode_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        sampling=_decode_sampling(fields),
        response_format=_decode_format(conversation.text or fields.text),
        thinking=_decode_thinking(fields, conversation.effort),
        stream=bool(fields.stream),
        logprobs=(fields.top_logprobs or 0) if asks_logprobs else None,
        echo=echo,
    )


def _decode_sampling(fields: w.RequestIn) -> Sampling:
    return Sampling(
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


def _decode_thinking(fields: w.RequestIn, updated: str | None) -> Thinking:
    """Reasoning is shown whether or not a summary was asked for: a harness that can't read it skips the item, and one
    that drops sealed content still echoes the text."""
    asked = fields.reasoning or w.ReasoningConfigIn()
    if asked.mode not in (None, "standard"):
        raise wire.unsupported("reasoning.mode", "one call samples one reply")
    if fields.prompt_cache_options and fields.prompt_cache_options.prewarm:
        raise wire.unsupported("prompt_cache_options.prewarm", "every call samples a reply")
    effort = updated or asked.effort or None
    return Thinking(enabled=None if effort is None else effort != "none", effort=effort)


def _decode_format(text: w.TextConfigIn | None) -> ResponseFormat:
    if text is None or text.format is None or text.format.type == "text":
        return ResponseFormat()
    found = text.format
    if found.type == "json_object":
        return ResponseFormat("json_object")
    schema = w.given(found.schema)
    if schema is None:
        raise ApiError("invalid_request", "`text.format.schema` is required.", param="text.format.schema")
    return ResponseFormat("json_schema", schema, found.name, found.strict)


def _on_one_line(raw: Raw) -> Raw:
    """An event of a stream is one line, however the harness laid out its JSON."""
    data = bytes(raw)
    return Raw(msgspec.json.format(data, indent=-1)) if b"\n" in data or b"\r" in data else raw


# Requests, encoding


def _encode_request(request: Request) -> w.RequestOut:
    if isinstance(request.prompt, list):
        raise ApiError("unsupported", "A prompt of token ids can't be sent as a response's input.", param="prompt")
    sampling, thinking, form = request.sampling, request.thinking, request.response_format
    effort = thinking.effort or ("none" if thinking.enabled is False else None)
    include = ["reasoning.encrypted_content"]
    if request.logprobs is not None:
        include.append(_LOGPROBS)
    text: w.TextConfigOut | UnsetType = UNSET
    if form.kind != "text":
        text = w.TextConfigOut(w.TextFormatOut(form.kind, w.said(form.name), w.said(form.schema), w.said(form.strict)))
    prompt = [] if request.prompt is None else [Message("user", [Text(request.prompt)])]
    return w.RequestOut(
        model=request.model,
        input=list(encode_messages([*prompt, *request.messages])),
        stream=request.stream,
        include=include,
        tools=list(encode_tools(request.tools)) or UNSET,
        tool_choice=encode_choice(request),
        parallel_tool_calls=w.said(request.parallel_tool_calls),
        reasoning=w.ReasoningConfigOut(w.said(effort), "auto" if thinking.visible else UNSET),
        text=text,
        max_output_tokens=w.said(sampling.max_tokens),
        temperature=w.said(sampling.temperature),
        top_p=w.said(sampling.top_p),
        top_logprobs=request.logprobs or UNSET,
        top_k=w.said(sampling.top_k),
        min_p=w.said(sampling.min_p),
        presence_penalty=w.said(sampling.presence_penalty),
        frequency_penalty=w.said(sampling.frequency_penalty),
        repetition_penalty=w.said(sampling.repetition_penalty),
        seed=w.said(sampling.seed),
        min_tokens=w.said(sampling.min_tokens),
        stop=sampling.stop or UNSET,
        logit_bias=sampling.logit_bias or UNSET,
        metadata=w.said(request.echo.get("metadata")),
        user=w.said(request.echo.get("user")),
        prompt_cache_key=w.said(request.echo.get("prompt_cache_key")),
        safety_identifier=w.said(request.echo.get("safety_identifier")),
    )


# Replies

_OutputPart: TypeAlias = Text | Reasoning | ToolCall


class _Outcome(NamedTuple):
    status: str
    last_item: w.Status
    incomplete: w.IncompleteOut | None = None
    error: w.FailureOut | None = None


_OUTCOMES: dict[FinishReason, _Outcome] = {
    "stop": _Outcome("completed", "completed"),
    "tool_calls": _Outcome("completed", "completed"),
    "length": _Outcome("incomplete", "incomplete", w.IncompleteOut("max_output_tokens")),
    "content_filter": _Outcome("incomplete", "incomplete", w.IncompleteOut("content_filter")),
    "abort": _Outcome("failed", "incomplete", error=w.FailureOut("server_error", "The generation was aborted.")),
}

_FAILURE_CODES: dict[ApiErrorKind, str] = {
    "invalid_request": "invalid_prompt",
    "unsupported": "invalid_prompt",
    "context_length": "context_length_exceeded",
    "too_large": "invalid_prompt",
    "rate_limit": "rate_limit_exceeded",
}
"""Codes of a reply that failed; all other kinds are a `server_error`. Among these is `overloaded`, for which OpenAI has
`server_is_overloaded`: codex takes that one as final, any other as worth another try."""


def _failure(error: ApiError) -> w.FailureOut:
    message = error.message
    if error.kind == "rate_limit" and error.retry_after is not None:
        message += f" Please try again in {error.retry_after:g}s."  # codex reads the delay from these words
    return w.FailureOut(_FAILURE_CODES.get(error.kind, "server_error"), message)


def _says_something(part: Part) -> TypeGuard[_OutputPart]:
    """An empty part never opens an item in a stream, so a whole reply has none for it either."""
    if isinstance(part, Reasoning):
        return bool(part.text or part.seal)
    return isinstance(part, ToolCall) or (isinstance(part, Text) and bool(part.text))


class _Items:
    """A reply's output items: what makes them the same in a stream and in a whole reply."""

    def __init__(self, request: Request, exchange_id: str) -> None:
        self.output: list[w.OutputItem] = []
        self.reasoning_visible = request.thinking.visible
        self._searches = TOOL_SEARCH in request.echo
        self._exchange_id = exchange_id
        self._thoughts = 0

    def add(self, part: _OutputPart, status: w.Status) -> w.OutputItem:
        item = self.make(part, status)
        self.output.append(item)
        self._thoughts += isinstance(part, Reasoning)
        return item

    def id_of(self, part: _OutputPart) -> str:
        """The id of the next item, if it is made of this part."""
        if isinstance(part, ToolCall):
            prefix = "ctc" if part.kind == "custom" else "tsc" if self._is_search(part) else "fc"
            return f"{prefix}_{part.id}"
        return f"{'rs' if isinstance(part, Reasoning) else 'msg'}_{self._exchange_id}_{len(self.output)}"

    def make(self, part: _OutputPart, status: w.Status) -> w.OutputItem:
        """In progress, an item is what is known when its first token comes: nothing of what it says."""
        item_id, begun = self.id_of(part), status == "in_progress"
        if isinstance(part, Text):
            return w.MessageItem("assistant", [] if begun else [w.OutputText(part.text)], item_id, status)
        if isinstance(part, Reasoning):
            if begun:
                return w.ReasoningItem(item_id, [])
            summary = [w.SummaryText(part.text)] if self.reasoning_visible and part.text else []
            seal = part.seal or ids.seal(self._exchange_id, self._thoughts)
            return w.ReasoningItem(item_id, summary, pack(seal, part.text))
        call_id = f"call_{part.id}"
        if part.kind == "custom":
            return w.CustomCallItem(call_id, part.name, part.arguments, w.said(part.namespace), item_id, status)
        if self._is_search(part):
            return w.ToolSearchCallItem(item_id, call_id, _as_object(part.arguments), status)
        return w.FunctionCallItem(call_id, part.name, part.arguments, w.said(part.namespace), item_id, status)

    def attach(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Tokens and parts don't line up, so all tokens stand at the first text; a stream has them in its last
        event."""
        for item in self.output:
            if isinstance(item, w.MessageItem):
                text = item.content[0]
                assert isinstance(text, w.OutputText)
                text.logprobs = [_finite(token) for token in logprobs]
                return

    def _is_search(self, call: ToolCall) -> bool:
        return self._searches and call.name == TOOL_SEARCH and call.namespace is None


def _as_object(arguments: str) -> Raw:
    """Arguments for an item that carries them as JSON. What is no JSON goes out as a string: the harness then tells the
    model that it can't be parsed."""
    try:
        return Raw(wire.encode(wire.loads(arguments or "{}")))
    except (msgspec.DecodeError, RecursionError):
        return Raw(wire.encode(arguments))


def _finite(token: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token.token,
        openai_chat_wire.finite(token.logprob),
        token.bytes,
        [_finite(other) for other in token.top_logprobs],
    )


class _Envelope:
    """The `response` object around a reply's items."""

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._request = request
        self._id = f"resp_{exchange_id}"
        self._created = created

    def begun(self) -> Raw:
        """Tools and instructions, which may be long, are repeated only at the end."""
        long = {name: w.ECHO[name] for name in ("tools", "instructions")}
        return self._write(self._response("in_progress", []), long)

    def ended(self, reply: Reply, outcome: _Outcome, items: _Items) -> Raw:
        if self._request.logprobs is not None and reply.logprobs:
            items.attach(reply.logprobs)
        response = self._response(outcome.status, items.output, outcome.error)
        response.model = reply.model
        response.incomplete_details = outcome.incomplete
        response.usage = w.UsageOut(
            reply.usage.prompt,
            w.CachedOut(reply.usage.cached),
            reply.usage.completion,
            w.ThoughtOut(reply.usage.reasoning),
            reply.usage.prompt + reply.usage.completion,
        )
        return self._write(response)

    def failed(self, failure: w.FailureOut, items: _Items) -> Raw:
        return self._write(self._response("failed", items.output, failure))

    def _response(
        self, status: str, output: Sequence[w.OutputItem], error: w.FailureOut | None = None
    ) -> w.ResponseOut:
        return w.ResponseOut(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._request.model,
            output=output,
            error=error,
        )

    def _write(self, response: w.ResponseOut, instead: dict[str, Raw] | None = None) -> Raw:
        echo = {name: self._request.echo.get(name, default) for name, default in w.ECHO.items()} | (instead or {})
        return Raw(wire.encode(response)[:-1] + b"," + wire.encode(echo)[1:])


def _decode_reply(found: w.ReplyIn) -> Reply:
    if found.error is not None or found.status not in (None, "completed", "incomplete"):
        failure = found.error or w.FailureIn()
        kind: ApiErrorKind = next((k for k, code in _FAILURE_CODES.items() if code == failure.code), "engine")
        raise EngineError(f"The response is {found.status}: {failure.message or 'no reason given'}", kind=kind)
    conversation = Conversation()
    for index, raw in enumerate(found.output):
        conversation.read(raw, f"output[{index}]")
    parts = [part for message in conversation.messages for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    for call in calls:
        call.id = call.id.removeprefix("call_")
    finish: FinishReason = "tool_calls" if calls else "stop"
    if found.status == "incomplete":
        reason = found.incomplete_details.reason if found.incomplete_details else None
        finish = "content_filter" if reason == "content_filter" else "length"
    counts = found.usage or w.UsageIn()
    return Reply(
        exchange_id=ids.exchange_named(found.id) or found.id,
        model=found.model,
        created=int(found.created_at),
        parts=parts,
        finish_reason=finish,
        usage=Usage(
            prompt=counts.input_tokens,
            completion=counts.output_tokens,
            cached=counts.input_tokens_details.cached_tokens if counts.input_tokens_details else 0,
            reasoning=counts.output_tokens_details.reasoning_tokens if counts.output_tokens_details else 0,
        ),
        logprobs=conversation.logprobs or None,
    )
