"""What goes back to the harness: whole replies and streams, put together of the same output items."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import msgspec

from polar import ids
from polar.dialects import raw_fields, sse
from polar.dialects.openai_chat import wire as openai_chat_wire
from polar.dialects.openai_responses import wire as w
from polar.dialects.openai_responses.items import TOOL_SEARCH, ItemReader, pack_seal
from polar.errors import ApiError, ApiErrorKind, EngineError
from polar.types import (
    FinishReason,
    Part,
    Raw,
    Reasoning,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    Request,
    Text,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

_OutputPart: TypeAlias = Text | Reasoning | ToolCall


class _ReplyOutcome(NamedTuple):
    status: str
    last_item: w.ItemStatus
    incomplete: w.IncompleteOut | None = None
    error: w.FailureOut | None = None


_OUTCOMES: dict[FinishReason, _ReplyOutcome] = {
    "stop": _ReplyOutcome("completed", "completed"),
    "tool_calls": _ReplyOutcome("completed", "completed"),
    "length": _ReplyOutcome("incomplete", "incomplete", w.IncompleteOut("max_output_tokens")),
    "content_filter": _ReplyOutcome("incomplete", "incomplete", w.IncompleteOut("content_filter")),
    "abort": _ReplyOutcome("failed", "incomplete", error=w.FailureOut("server_error", "The generation was aborted.")),
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


def _encode_failure(error: ApiError) -> w.FailureOut:
    message = error.message
    if error.kind == "rate_limit" and error.retry_after is not None:
        message += f" Please try again in {error.retry_after:g}s."  # codex reads the delay from these words
    return w.FailureOut(_FAILURE_CODES.get(error.kind, "server_error"), message)


def _has_content(part: Part) -> TypeGuard[_OutputPart]:
    """An empty part never opens an item in a stream, so a whole reply has none for it either."""
    if isinstance(part, Reasoning):
        return bool(part.text or part.seal)
    return isinstance(part, ToolCall) or (isinstance(part, Text) and bool(part.text))


class _OutputItems:
    """A reply's output items: what makes them the same in a stream and in a whole reply."""

    def __init__(self, request: Request, exchange_id: str) -> None:
        self.output: list[w.OutputItem] = []
        self.reasoning_visible = request.thinking.visible
        self._runs_tool_search = TOOL_SEARCH in request.echo
        self._exchange_id = exchange_id
        self._reasoning_count = 0

    def add(self, part: _OutputPart, status: w.ItemStatus) -> w.OutputItem:
        item = self.make_item(part, status)
        self.output.append(item)
        self._reasoning_count += isinstance(part, Reasoning)
        return item

    def issue_item_id(self, part: _OutputPart) -> str:
        """The id of the next item, if it is made of this part."""
        if isinstance(part, ToolCall):
            prefix = "ctc" if part.kind == "custom" else "tsc" if self._is_search(part) else "fc"
            return f"{prefix}_{part.id}"
        return f"{'rs' if isinstance(part, Reasoning) else 'msg'}_{self._exchange_id}_{len(self.output)}"

    def make_item(self, part: _OutputPart, status: w.ItemStatus) -> w.OutputItem:
        """In progress, an item is what is known when its first token comes: nothing of what it says."""
        item_id, is_in_progress = self.issue_item_id(part), status == "in_progress"
        if isinstance(part, Text):
            return w.MessageItem("assistant", [] if is_in_progress else [w.OutputText(part.text)], item_id, status)
        if isinstance(part, Reasoning):
            if is_in_progress:
                return w.ReasoningItem(item_id, [])
            summary = [w.SummaryText(part.text)] if self.reasoning_visible and part.text else []
            seal = part.seal or ids.make_seal(self._exchange_id, self._reasoning_count)
            return w.ReasoningItem(item_id, summary, pack_seal(seal, part.text))
        call_id = f"call_{part.id}"
        if part.kind == "custom":
            return w.CustomCallItem(
                call_id, part.name, part.arguments, w.none_to_unset(part.namespace), item_id, status
            )
        if self._is_search(part):
            return w.ToolSearchCallItem(item_id, call_id, _arguments_to_json(part.arguments), status)
        return w.FunctionCallItem(call_id, part.name, part.arguments, w.none_to_unset(part.namespace), item_id, status)

    def attach_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Tokens and parts don't line up, so all tokens stand at the first text; a stream has them in its last
        event."""
        for item in self.output:
            if isinstance(item, w.MessageItem):
                text = item.content[0]
                assert isinstance(text, w.OutputText)
                text.logprobs = [_clamp_logprobs(token) for token in logprobs]
                return

    def _is_search(self, call: ToolCall) -> bool:
        return self._runs_tool_search and call.name == TOOL_SEARCH and call.namespace is None


def _arguments_to_json(arguments: str) -> Raw:
    """Arguments for an item that carries them as JSON. What is no JSON goes out as a string: the harness then tells the
    model that it can't be parsed."""
    try:
        return Raw(raw_fields.encode(raw_fields.loads(arguments or "{}")))
    except (msgspec.DecodeError, RecursionError):
        return Raw(raw_fields.encode(arguments))


def _clamp_logprobs(token: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token.token,
        openai_chat_wire.clamp_logprob(token.logprob),
        token.bytes,
        [_clamp_logprobs(other) for other in token.top_logprobs],
    )


class _ResponseBuilder:
    """The `response` object around a reply's items."""

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._request = request
        self._id = f"resp_{exchange_id}"
        self._created = created

    def encode_start(self) -> Raw:
        """Tools and instructions, which may be long, are repeated only at the end."""
        long = {name: w.ECHO_DEFAULTS[name] for name in ("tools", "instructions")}
        return self._encode_response(self._build_response("in_progress", []), long)

    def encode_end(self, reply: Reply, outcome: _ReplyOutcome, items: _OutputItems) -> Raw:
        if self._request.logprobs is not None and reply.logprobs:
            items.attach_logprobs(reply.logprobs)
        response = self._build_response(outcome.status, items.output, outcome.error)
        response.model = reply.model
        response.incomplete_details = outcome.incomplete
        response.usage = w.UsageOut(
            reply.usage.prompt,
            w.CachedTokensOut(reply.usage.cached),
            reply.usage.completion,
            w.ReasoningTokensOut(reply.usage.reasoning),
            reply.usage.prompt + reply.usage.completion,
        )
        return self._encode_response(response)

    def encode_failure(self, failure: w.FailureOut, items: _OutputItems) -> Raw:
        return self._encode_response(self._build_response("failed", items.output, failure))

    def _build_response(
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

    def _encode_response(self, response: w.ResponseOut, overrides: dict[str, Raw] | None = None) -> Raw:
        echo = {name: self._request.echo.get(name, default) for name, default in w.ECHO_DEFAULTS.items()} | (
            overrides or {}
        )
        return Raw(raw_fields.encode(response)[:-1] + b"," + raw_fields.encode(echo)[1:])


def encode_reply(request: Request, reply: Reply) -> bytes:
    outcome = _OUTCOMES[reply.finish_reason]
    items = _OutputItems(request, reply.exchange_id)
    shown_parts = [part for part in reply.parts if _has_content(part)]
    for index, part in enumerate(shown_parts):
        items.add(part, "completed" if index < len(shown_parts) - 1 else outcome.last_item)
    return bytes(_ResponseBuilder(request, reply.exchange_id, reply.created).encode_end(reply, outcome, items))


def decode_reply(body: bytes) -> Reply:
    try:
        return _read_reply(raw_fields.decode(w.REPLY, body, "response"))
    except ApiError as error:
        raise EngineError(f"The engine's answer can't be used: {error.message}") from error


def _read_reply(found: w.ReplyIn) -> Reply:
    if found.error is not None or found.status not in (None, "completed", "incomplete"):
        failure = found.error or w.FailureIn()
        kind: ApiErrorKind = next((k for k, code in _FAILURE_CODES.items() if code == failure.code), "engine")
        raise EngineError(f"The response is {found.status}: {failure.message or 'no reason given'}", kind=kind)
    conversation = ItemReader()
    for index, raw in enumerate(found.output):
        conversation.read_item(raw, f"output[{index}]")
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
        exchange_id=ids.find_exchange_id(found.id) or found.id,
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


class ResponsesStreamEncoder:
    """Writes the events of one reply. An output item is open from its first event to the first of another part; what is
    the same in all deltas of an item is encoded once, when it opens."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._envelope = _ResponseBuilder(request, exchange_id, created)
        self._items = _OutputItems(request, exchange_id)
        self._sequence = 0
        self._open_part: _OutputPart | None = None  # the open one; what it says is in _pieces until it closes
        self._pieces: list[str] = []
        self._item_id = ""
        self._index = 0
        self._head = self._middle = self._tail = b""  # around a delta's number and text; no head: no deltas

    def start(self, usage: Usage | None) -> bytes:  # noqa: ARG002
        begun = self._envelope.encode_start()
        created = self._encode_event(w.StreamEvent(type="response.created", response=begun))
        return created + self._encode_event(w.StreamEvent(type="response.in_progress", response=begun))

    def feed(self, event: ReplyEvent) -> bytes:
        if isinstance(event, TextDelta):
            if not event.text:
                return b""
            opening = b"" if isinstance(self._open_part, Text) else self._open_item(Text(""))
            return opening + self._encode_delta(event.text)
        if isinstance(event, ToolCallDelta):
            return self._encode_delta(event.arguments) if event.arguments else b""
        if isinstance(event, ReasoningDelta):
            if not event.text:
                return b""
            opening = b"" if isinstance(self._open_part, Reasoning) else self._open_item(Reasoning(""))
            return opening + self._encode_delta(event.text)
        return self._open_item(ToolCall(event.id, event.name, "", event.kind, event.namespace))

    def finish(self, reply: Reply) -> bytes:
        outcome = _OUTCOMES[reply.finish_reason]
        closing = self._close_item(outcome.last_item)
        ended = self._envelope.encode_end(reply, outcome, self._items)
        return closing + self._encode_event(w.StreamEvent(type=f"response.{outcome.status}", response=ended))

    def error(self, error: ApiError) -> bytes:
        """The open item stays open: a harness keeps finished items, and must not take half of one for whole."""
        failed = self._envelope.encode_failure(_encode_failure(error), self._items)
        return self._encode_event(w.StreamEvent(type="response.failed", response=failed))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE_COMMENT

    def _open_item(self, part: "_OutputPart") -> bytes:
        closing = self._close_item("completed")
        item = self._items.make_item(part, "in_progress")
        self._open_part, self._pieces = part, []
        self._item_id, self._index = self._items.issue_item_id(part), len(self._items.output)
        added = self._encode_event(
            w.StreamEvent(type="response.output_item.added", output_index=self._index, item=item)
        )
        if isinstance(item, w.MessageItem):
            self._prepare_deltas("response.output_text.delta", b',"content_index":0', b',"logprobs":[]')
            added += self._encode_item_event(
                w.StreamEvent(type="response.content_part.added", content_index=0, part=w.OutputText(""))
            )
        elif isinstance(item, w.ReasoningItem) and self._items.reasoning_visible:
            self._prepare_deltas("response.reasoning_summary_text.delta", b',"summary_index":0')
            added += self._encode_item_event(
                w.StreamEvent(type="response.reasoning_summary_part.added", summary_index=0, part=w.SummaryText(""))
            )
        elif isinstance(item, w.FunctionCallItem):
            self._prepare_deltas("response.function_call_arguments.delta")
        elif isinstance(item, w.CustomCallItem):
            self._prepare_deltas("response.custom_tool_call_input.delta")
        else:  # hidden reasoning, and a call whose arguments are an object: these come whole
            self._head = b""
        return closing + added

    def _close_item(self, status: w.ItemStatus) -> bytes:
        part = self._open_part
        if part is None:
            return b""
        said = "".join(self._pieces)
        if isinstance(part, ToolCall):
            part.arguments = said
        else:
            part.text = said
        self._open_part = None
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
        return b"".join([*map(self._encode_item_event, ends), self._encode_event(done)])

    def _prepare_deltas(self, name: str, place: bytes = b"", tail: bytes = b"") -> None:
        """Gets ready for deltas of the item that was just opened."""
        self._head = f'event: {name}\ndata: {{"type":"{name}","sequence_number":'.encode()
        self._middle = b',"item_id":%b,"output_index":%d%b,"delta":' % (
            raw_fields.encode(self._item_id),
            self._index,
            place,
        )
        self._tail = tail + b"}\n\n"

    def _encode_delta(self, text: str) -> bytes:
        self._pieces.append(text)
        if not self._head:
            return b""
        sequence = self._sequence
        self._sequence = sequence + 1
        return b"%b%d%b%b%b" % (self._head, sequence, self._middle, raw_fields.encode(text), self._tail)

    def _encode_item_event(self, event: w.StreamEvent) -> bytes:
        """An event of the open item."""
        event.item_id = self._item_id
        event.output_index = self._index
        return self._encode_event(event)

    def _encode_event(self, event: w.StreamEvent) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return sse.encode_event(raw_fields.encode(event), event.type.encode())
