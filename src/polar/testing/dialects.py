"""The contract of every dialect:

    class TestMine(DialectContract):
        plugin = Mine

Requests and replies are made from the canonical form by the dialect's own client side (`encode_request`,
`decode_reply`), so the suite needs no samples of the wire format. Test samples of real clients in your own tests.
"""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, ClassVar, get_args

import pytest

from polar.dialects.base import Dialect, RouteOperation
from polar.dialects.sse import EventParser
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind
from polar.ids import make_call_id
from polar.testing.contract import Contract, assert_helpful, requires
from polar.types import (
    Message,
    Raw,
    Reasoning,
    Reply,
    ReplyEvent,
    Request,
    SamplingParams,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    ToolResult,
    Usage,
)

EXCHANGE_ID = "x0123456789abcdefghjkmnpq"
TEXT = 'Größe 東京 🙂 \n\ttwo lines, "quotes" and \\ backslashes </tag> \x7f'
_SCHEMA = Raw(b'{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}')
_WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    "x",
    [],
    {},
    [[1]],
    [None],
    {"type": "no-such-type"},
    {"a": {"b": []}},
)
_UNREADABLE_BODIES = (
    b"",
    b"{",
    b"nothing",
    b"[]",
    b"1",
    b'"text"',
    b"null",
    b"\xff\xfe",
    b'{"a": NaN}x',
    b"[" * 100_000,
)


class DialectContract(Contract):
    kind = "dialects"
    has_messages: ClassVar[bool] = True  # False: a request is one text, the `prompt`
    has_tools: ClassVar[bool] = True

    @pytest.fixture
    def dialect(self) -> Dialect:
        dialect: Dialect = self.plugin()
        return dialect

    def make_params(self, request: Request) -> dict[str, str]:
        """Parameters from the path of a request: here of a route that names the model and the verb."""
        return {"model": request.model, "verb": "streamGenerateContent" if request.stream else "generateContent"}

    def encode_and_decode(self, dialect: Dialect, request: Request) -> Request:
        """Encodes a request as the provider's client does, and decodes it again."""
        return dialect.decode_request(dialect.split(dialect.encode_request(request)), self.make_params(request))

    def make_request(self, **changes: Any) -> Request:
        sampling = SamplingParams(temperature=0.5, top_p=0.75, max_tokens=100, stop=["END"])
        if not self.has_messages:
            return Request("a-model", [], sampling=sampling, prompt=TEXT, **changes)
        messages = [Message("system", [Text("Be brief.")]), Message("user", [Text(TEXT)])]
        tools = [Tool("bash", "Runs a command.", _SCHEMA)] if self.has_tools else []
        return Request("a-model", messages, tools, sampling=sampling, **changes)

    def make_conversation(self) -> Request:
        """A request with tool calls and their results."""
        request = self.make_request()
        calls = [ToolCall(f"call_{index}", "bash", json.dumps({"command": f"ls {index}"})) for index in range(2)]
        results = [ToolResult(call.id, [Text(f"result of {call.id}")], name="bash") for call in calls]
        request.messages += [
            Message("assistant", [Text("I look."), *calls]),
            *(Message("tool", [result]) for result in results),
            Message("assistant", [Text("There are two.")]),
            Message("user", [Text("Go on.")]),
        ]
        return request

    def make_reply(self, **changes: Any) -> Reply:
        parts: list[Any] = [Text(TEXT)]
        if self.has_tools:
            parts.append(ToolCall(make_call_id(EXCHANGE_ID, 0), "bash", '{"command": "ls"}'))
        finish = "tool_calls" if self.has_tools else "stop"
        reply = Reply(EXCHANGE_ID, "a-model", 1_700_000_000, parts, finish, usage=Usage(20, 10))  # type: ignore[arg-type]
        for name, value in changes.items():
            setattr(reply, name, value)
        return reply

    # Routes

    def test_what_it_says_of_itself(self, dialect: Dialect) -> None:
        assert dialect.name
        assert any(route.operation == "generate" for route in dialect.routes)
        for route in dialect.routes:
            assert route.operation in get_args(RouteOperation)
            assert route.method in ("GET", "POST")
            assert isinstance(route.path, re.Pattern)
            assert set(route.path.groupindex) <= {"model", "verb"}

    # Requests

    def test_a_request_says_the_same_after_it_was_written_and_read(self, dialect: Dialect) -> None:
        request = self.make_request()
        read = self.encode_and_decode(dialect, request)
        assert (read.model, read.stream) == (request.model, False)
        assert _summarize_messages(read) == _summarize_messages(request)
        sent, received = request.sampling, read.sampling
        assert (received.temperature, received.top_p, received.max_tokens, received.stop) == (
            sent.temperature,
            sent.top_p,
            sent.max_tokens,
            sent.stop,
        )
        assert [(tool.name, tool.description) for tool in read.tools] == [
            (tool.name, tool.description) for tool in request.tools
        ]

    def test_a_stream_is_asked_for(self, dialect: Dialect) -> None:
        assert self.encode_and_decode(dialect, self.make_request(stream=True)).stream

    @requires("has_tools")
    def test_calls_and_results_belong_together(self, dialect: Dialect) -> None:
        read = self.encode_and_decode(dialect, self.make_conversation())
        parts = [part for message in read.messages for part in message.parts]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        results = [part for part in parts if isinstance(part, ToolResult)]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("bash", {"command": "ls 0"}),
            ("bash", {"command": "ls 1"}),
        ]
        assert [result.call_id for result in results] == [call.id for call in calls]
        assert ["".join(part.text for part in result.parts if isinstance(part, Text)) for result in results] == [
            "result of call_0",
            "result of call_1",
        ]

    def test_what_it_does_not_know_is_kept_and_passed(self, dialect: Dialect) -> None:
        """A harness may send fields that are newer than this dialect."""
        body = json.loads(dialect.encode_request(self.make_request()))
        raw = dialect.split(json.dumps(body | {"newer_than_this": {"a": [1]}}).encode())
        assert json.loads(bytes(raw.fields["newer_than_this"])) == {"a": [1]}
        assert _summarize_messages(
            dialect.decode_request(raw, self.make_params(self.make_request()))
        ) == _summarize_messages(self.make_request())

    def test_a_split_body_is_whole(self, dialect: Dialect) -> None:
        """The store keeps fields and items; together they are what the harness sent."""
        body = dialect.encode_request(self.make_request())
        raw = dialect.split(body)
        fields = {name: json.loads(bytes(value)) for name, value in raw.fields.items()}
        if raw.items:
            fields[raw.list_name] = [json.loads(bytes(item)) for item in raw.items]
        assert fields == json.loads(body)

    @pytest.mark.parametrize("body", _UNREADABLE_BODIES, ids=lambda body: repr(body[:12]))
    def test_a_body_that_is_no_object_is_refused(self, dialect: Dialect, body: bytes) -> None:
        with pytest.raises(ApiError) as error:
            dialect.split(body)
        assert error.value.kind == "invalid_request"
        assert_helpful(error.value)

    def test_whatever_else_is_wrong_is_an_api_error(self, dialect: Dialect) -> None:
        """Every value of a request is replaced by others of a wrong type, and left out."""
        request = self.make_conversation() if self.has_tools else self.make_request()
        for body in _iter_malformed_bodies(json.loads(dialect.encode_request(request))):
            try:
                dialect.decode_request(dialect.split(json.dumps(body).encode()), self.make_params(request))
            except ApiError as error:
                assert error.kind in get_args(ApiErrorKind)  # noqa: PT017  it may also be read
                assert_helpful(error)

    # Replies

    def test_a_reply_says_the_same_after_it_was_written_and_read(self, dialect: Dialect) -> None:
        reply = self.make_reply()
        read = dialect.decode_reply(dialect.encode_reply(self.make_request(), reply))
        assert _summarize_parts(read.parts) == _summarize_parts(reply.parts)
        assert (read.model, read.finish_reason) == (reply.model, reply.finish_reason)
        assert (read.usage.prompt, read.usage.completion) == (20, 10)

    def test_a_reply_that_was_cut_says_so(self, dialect: Dialect) -> None:
        reply = self.make_reply(parts=[Text("Half a")], finish_reason="length")
        assert dialect.decode_reply(dialect.encode_reply(self.make_request(), reply)).finish_reason == "length"

    def test_an_empty_reply_is_one(self, dialect: Dialect) -> None:
        reply = self.make_reply(parts=[], finish_reason="stop")
        read = dialect.decode_reply(dialect.encode_reply(self.make_request(), reply))
        assert _summarize_parts(read.parts) == []

    # Streams

    def encode_stream(self, dialect: Dialect, text_pieces: int, *, keep_alives: bool = False) -> list[bytes]:
        """The pieces of a stream, in order."""
        reply = self.make_reply()
        encoder = dialect.create_stream_encoder(self.make_request(stream=True), EXCHANGE_ID, reply.created)
        assert encoder.content_type
        step = -(-len(TEXT) // text_pieces)
        events: list[ReplyEvent] = [TextDelta(TEXT[at : at + step]) for at in range(0, len(TEXT), step)]
        if self.has_tools:
            events.append(ToolCallStart(make_call_id(EXCHANGE_ID, 0), "bash"))
            events += [ToolCallDelta(piece) for piece in ('{"comm', 'and": "ls"}')]
        pieces = [encoder.keep_alive()] if keep_alives else []
        pieces.append(encoder.start(Usage(prompt=20)))
        for event in events:
            pieces.append(encoder.feed(event))
            if keep_alives:
                pieces.append(encoder.keep_alive())
        return [*pieces, encoder.finish(reply)]

    def test_a_stream_is_bytes_from_its_first_event_on(self, dialect: Dialect) -> None:
        pieces = self.encode_stream(dialect, 3)
        assert all(isinstance(piece, bytes) for piece in pieces)
        assert pieces[-1]
        for piece in pieces:
            piece.decode()  # no character is cut in two
        streamed = b"".join(pieces).decode()
        assert "quotes" in streamed
        assert "bash" in streamed or not self.has_tools

    def test_keep_alives_say_nothing(self, dialect: Dialect) -> None:
        """Without them a stream has the same events."""

        def parse_events(pieces: list[bytes]) -> list[bytes]:
            return [data.strip() for data in EventParser().feed(b"".join(pieces)) if b'"ping"' not in data]

        without_keep_alives = parse_events(self.encode_stream(dialect, 3))
        with_keep_alives = parse_events(self.encode_stream(dialect, 3, keep_alives=True))
        assert with_keep_alives == without_keep_alives

    def test_streams_do_not_know_of_each_other(self, dialect: Dialect) -> None:
        """A dialect holds no state between calls."""
        request, reply = self.make_request(stream=True), self.make_reply()
        alone = self.encode_stream(dialect, 3)
        encoders = [dialect.create_stream_encoder(request, EXCHANGE_ID, reply.created) for _ in range(2)]
        together = [encoder.start(Usage(prompt=20)) for encoder in encoders]
        assert together[0] == together[1] == alone[0]
        assert self.encode_stream(dialect, 3) == alone

    def test_a_stream_that_breaks_says_why(self, dialect: Dialect) -> None:
        encoder = dialect.create_stream_encoder(self.make_request(stream=True), EXCHANGE_ID, 1_700_000_000)
        begun = encoder.start(None) + encoder.feed(TextDelta("Half a"))
        assert isinstance(begun, bytes)
        assert b"The engine went away." in encoder.error(ApiError("engine", "The engine went away."))

    # All else that is answered

    @pytest.mark.parametrize("kind", get_args(ApiErrorKind))
    def test_errors_have_the_providers_shape(self, dialect: Dialect, kind: ApiErrorKind) -> None:
        encoded = dialect.encode_error(ApiError(kind, 'What is wrong with "it".', retry_after=2))
        assert encoded.status // 100 == HTTP_STATUS[kind] // 100
        assert "What is wrong with" in json.dumps(json.loads(encoded.body))
        assert {name.lower() for name in encoded.headers} >= {"retry-after"}

    def test_counts_and_models(self, dialect: Dialect) -> None:
        assert "12345" in json.dumps(json.loads(dialect.encode_count(12345)))
        models = json.dumps(json.loads(dialect.encode_models(["first", "second"], None)))
        assert "first" in models
        assert "second" in models
        assert "anything" in json.dumps(json.loads(dialect.encode_models(["first"], "anything")))


def _summarize_messages(request: Request) -> Any:
    """Roles and texts, without the differences in form that a dialect may introduce."""
    if request.prompt is not None:
        return [("user", request.prompt)]
    roles = {"developer": "system"}
    return [
        (roles.get(message.role, message.role), "".join(part.text for part in message.parts if isinstance(part, Text)))
        for message in request.messages
    ]


def _summarize_parts(parts: list[Any]) -> list[Any]:
    summary: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCall):
            summary.append((part.name, json.loads(part.arguments)))
        elif isinstance(part, Text | Reasoning) and part.text:
            summary.append(part.text)
    return summary


def _iter_malformed_bodies(body: Any) -> Iterator[Any]:
    """Yields the body with one value at a time replaced or removed."""
    for path in list(_iter_paths(body)):
        for wrong in _WRONG_VALUES:
            malformed = deepcopy(body)
            _get_parent(malformed, path)[path[-1]] = deepcopy(wrong)
            yield malformed
        malformed = deepcopy(body)
        del _get_parent(malformed, path)[path[-1]]
        yield malformed


def _iter_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from _iter_paths(inner, (*path, key))


def _get_parent(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value
