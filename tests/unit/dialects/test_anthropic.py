"""The Anthropic dialect, against real captures and the official client."""

import json
from collections.abc import Iterable
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar import ids
from polar.dialects.anthropic import Anthropic
from polar.errors import ApiError
from polar.types import (
    Media,
    Message,
    Part,
    Raw,
    Reasoning,
    ReasoningDelta,
    Reply,
    ReplyEvent,
    Request,
    ResponseFormat,
    SamplingParams,
    Text,
    TextDelta,
    Thinking,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    ToolChoice,
    ToolResult,
    Usage,
)
from tests import captures

DIALECT = Anthropic()
EXCHANGE = "x" + "0123456789abcdefghjkmnpq"
NAMES = captures.names_for("/v1/messages")
COUNT = {"verb": "count_tokens"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}


def decode(value: Any, params: dict[str, str] | None = None) -> Request:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return DIALECT.decode_request(DIALECT.split(raw), params or {})


def decode_content(role: str, *blocks: Any) -> list[Message]:
    return decode(body(messages=[{"role": role, "content": list(blocks)}])).messages


def schema_of(tool: Tool) -> Any:
    assert tool.parameters is not None
    return json.loads(bytes(tool.parameters))


def refusal(value: Any, params: dict[str, str] | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(value, params)
    return caught.value


# Real requests.


def requests_of(name: str) -> list[Request]:
    return [decode(record["body"]) for record in captures.load(name)]


def test_there_are_captures() -> None:
    assert {"claude", "claude_parallel", "claude_sub", "claude_toolsearch", "pi_anthropic"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_contains_the_turns_before(name: str) -> None:
    """What stood before an answered turn is exactly an earlier request: nothing volatile is left."""
    seen: list[list[Message]] = []
    answered = 0
    for request in requests_of(name):
        turns = [index for index, message in enumerate(request.messages) if message.role == "assistant"]
        if turns:
            assert request.messages[: turns[-1]] in seen
            answered += 1
        seen.append(request.messages)
    assert answered >= 2


@pytest.mark.parametrize("name", NAMES)
def test_requests_survive_the_way_out_and_back(name: str) -> None:
    for request in requests_of(name):
        assert decode(DIALECT.encode_request(request)) == request


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_results_are_kept_verbatim(name: str) -> None:
    for record in captures.load(name):
        raw = json.dumps(record["body"], ensure_ascii=False)
        request = decode(raw.encode())
        calls = [part for message in request.messages for part in message.parts if isinstance(part, ToolCall)]
        results = [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]
        assert [call.id for call in calls] == [result.call_id for result in results]
        for call in calls:
            assert f'"id": "{call.id}", "name": "{call.name}", "input": {call.arguments}' in raw


def test_claude_code() -> None:
    first, *_, last = requests_of("claude")
    system, *rest = last.messages
    assert system.role == "system"
    assert len(system.parts) == 2  # the billing header is gone
    assert [message.role for message in rest] == ["user", "assistant", "tool", "assistant", "tool"]
    thinking, text, call = rest[1].parts
    assert isinstance(thinking, Reasoning)
    assert thinking.seal is not None
    assert thinking.seal.startswith("SIG-")
    assert text == Text("\n Let me run the first command.  \n\n")
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments)["command"].startswith("echo")
    assert first.thinking == Thinking(enabled=True, budget=31999)
    assert first.sampling == SamplingParams(max_tokens=32000)
    assert first.stream


def test_claude_code_with_a_foreign_model_keeps_system_messages_in_place() -> None:
    for request in requests_of("claude_unknownmodel"):
        assert [message.role for message in request.messages[:3]] == ["system", "user", "system"]
        assert request.thinking == Thinking(enabled=True, effort="high")


def test_deferred_tools_appear_when_they_are_referenced() -> None:
    before, after, _ = requests_of("claude_toolsearch")
    assert {tool.name for tool in after.tools} - {tool.name for tool in before.tools} == {"WebFetch"}
    assert "DeferredToolPlaceholder" not in {tool.name for tool in after.tools}
    tool, user = after.messages[-2:]
    assert tool.parts == [ToolResult(tool.parts[0].call_id, [Text("The tool WebFetch is available now.")])]  # type: ignore[union-attr]
    assert user.role == "user"
    assert user.parts[0] == Text("Tool loaded.")


def test_parallel_results_become_messages_of_their_own() -> None:
    roles = [message.role for message in requests_of("claude_parallel")[1].messages]
    assert roles == ["system", "user", "assistant", "tool", "tool"]


# Requests by hand.


def test_system() -> None:
    assert decode(body(system="be brief")).messages[0] == Message("system", [Text("be brief")])
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    assert decode(body(system=blocks)).messages[0] == Message("system", [Text("a"), Text("b")])
    for none in ("", [], None, blocks[:1]):
        assert [message.role for message in decode(body(system=none)).messages] == ["user"]


def test_an_expired_system_message_is_not_shown() -> None:
    notice = {"role": "system", "content": "only now", "clear_at": "next_user_message"}
    user = {"role": "user", "content": "hi"}
    assert [m.role for m in decode(body(messages=[user, notice])).messages] == ["user", "system"]
    assert [m.role for m in decode(body(messages=[user, notice, user])).messages] == ["user", "user"]
    lasting = {**notice, "clear_at": "never"}
    assert [m.role for m in decode(body(messages=[user, lasting, user])).messages] == ["user", "system", "user"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({"type": "text", "text": " a\n", "citations": None}, [Text(" a\n")]),
        (IMAGE, [Media("image", "image/png", data="aGk=")]),
        ({"type": "image", "source": {"type": "url", "url": "http://x/y"}}, [Media("image", url="http://x/y")]),
        ({"type": "image", "source": {"type": "file", "file_id": "f1"}}, [Media("image", file_id="f1")]),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
            },
            [Text("Context: C\n\n"), Media("file", "application/pdf", data="aGk=", name="T")],
        ),
        ({"type": "document", "source": {"type": "url", "url": "http://x"}}, [Media("file", url="http://x")]),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, [Media("file", file_id="f")]),
        (
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
            [Text("Title: T\n\n"), Text("d")],
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}, IMAGE]}},
            [Text("d"), Media("image", "image/png", data="aGk=")],
        ),
        ({"type": "document", "source": {"type": "content", "content": "d"}}, [Text("d")]),
        (
            {"type": "search_result", "source": "http://x", "title": "T", "content": [{"type": "text", "text": "d"}]},
            [Text("Title: T\nSource: http://x\n\n"), Text("d")],
        ),
    ],
)
def test_blocks_that_any_turn_and_tool_result_may_hold(block: dict[str, Any], parts: list[Any]) -> None:
    assert decode_content("user", block) == [Message("user", parts)]
    assert decode_content("assistant", block) == [Message("assistant", parts)]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block], "is_error": True}
    assert decode_content("user", result) == [Message("tool", [ToolResult("t", parts, is_error=True)])]


def test_blocks_that_only_the_model_writes() -> None:
    (message,) = decode_content(
        "assistant",
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "thinking", "thinking": "unsigned", "signature": ""},
        {"type": "redacted_thinking", "data": "zzz"},
        {"input": {}, "name": "f", "id": "t1", "type": "tool_use", "caller": {"type": "direct"}},
    )
    assert message.parts[:2] == [Reasoning("hm", "s"), Reasoning("unsigned")]
    redacted, call = message.parts[2:]
    assert isinstance(redacted, Reasoning)
    assert redacted.text == ""
    assert redacted.seal is not None
    assert redacted.seal.endswith("zzz")
    assert call == ToolCall("t1", "f", "{}")
    again = json.loads(DIALECT.encode_request(decode(body(messages=[{"role": "user", "content": "x"}]))))
    assert again["messages"] == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    sent = json.loads(DIALECT.encode_request(Request("m", [message])))["messages"][0]["content"]
    assert sent[2] == {"type": "redacted_thinking", "data": "zzz"}


def test_input_keeps_its_bytes() -> None:
    raw = b'{ "b" : 1.0,"a":[1e2 , "\\u00e9"] }'
    sent = b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":['
    sent += b'{"type":"tool_use","id":"i","name":"n","input":'
    request = decode(sent + raw + b"}]}]}")
    assert request.messages[0].parts == [ToolCall("i", "n", raw.decode())]
    assert raw in DIALECT.encode_request(request)


def test_mixed_user_message_is_split_in_order() -> None:
    messages = decode_content(
        "user",
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "2"},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c"},
        {"type": "tool_result", "tool_use_id": "3", "content": []},
    )
    assert messages == [
        Message("user", [Text("a")]),
        Message("tool", [ToolResult("1", [Text("one")])]),
        Message("tool", [ToolResult("2", [])]),
        Message("user", [Text("b"), Text("c")]),
        Message("tool", [ToolResult("3", [])]),
    ]


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, Thinking()),
        ({"type": "enabled", "budget_tokens": 2048}, Thinking(enabled=True, budget=2048)),
        ({"type": "adaptive", "display": "omitted"}, Thinking(enabled=True)),
        ({"type": "disabled"}, Thinking(enabled=False, visible=False)),
    ],
)
def test_thinking(thinking: Any, expected: Thinking) -> None:
    assert decode(body(thinking=thinking)).thinking == expected


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), None),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice("required"), True),
        ({"type": "tool", "name": "f"}, ToolChoice("named", ["f"]), None),
        ({"type": "none"}, ToolChoice("none"), None),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice, parallel: bool | None) -> None:
    request = decode(body(tool_choice=choice))
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)
    assert decode(DIALECT.encode_request(request)) == request


def test_sampling_and_output() -> None:
    schema = {"type": "object"}
    fields = {"temperature": 1, "top_p": 0.5, "top_k": 3, "stop_sequences": ["X"], "metadata": {"user_id": "u"}}
    request = decode(
        body(**fields, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    )
    assert request.sampling == SamplingParams(temperature=1.0, top_p=0.5, top_k=3, stop=["X"], max_tokens=9)
    assert request.thinking.effort == "low"
    assert request.response_format == ResponseFormat("json_schema", Raw(b'{"type": "object"}'))
    older = decode(body(output_format={"type": "json_schema", "schema": schema}))
    assert older.response_format == request.response_format


def test_tools() -> None:
    tools = decode(
        body(
            tools=[
                {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True},
                {"name": "g", "type": "custom", "input_schema": {}, "input_examples": [{"a": 1}]},
                {"name": "bash", "type": "bash_20250124"},
                {"name": "str_replace_based_edit_tool", "type": "text_editor_20250728", "max_characters": 9},
                {"name": "memory", "type": "memory_20250818"},
                {"name": "web_search", "type": "web_search_20250305", "max_uses": 3},
            ]
        )
    ).tools
    assert tools[0] == Tool("f", "d", Raw(b'{"type": "object"}'), strict=True)
    assert tools[1].description == 'Examples of input: [{"a": 1}]'
    properties = {tool.name: schema_of(tool)["properties"] for tool in tools[2:5]}
    assert set(properties["bash"]) == {"command", "restart"}
    assert {"command", "path", "view_range", "insert_text"} <= set(properties["str_replace_based_edit_tool"])
    assert {"old_path", "new_path"} <= set(properties["memory"])
    assert tools[5] == Tool("web_search_20250305", kind="hosted")


def test_deferred_tools_are_shown_where_nobody_can_search_for_them() -> None:
    deferred = {"name": "f", "input_schema": {}, "defer_loading": True}
    assert decode(body(tools=[deferred])).tools == []
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert [tool.name for tool in decode(body(tools=[search, deferred])).tools] == [search["type"], "f"]


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "unsupported", "mcp_servers"),
        ({"thread": {"type": "create"}}, "unsupported", "thread"),
        ({"compaction": {"type": "summarize"}}, "unsupported", "compaction"),
        ({"container": {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}}, "unsupported", "skills"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "unsupported", "task_budget"),
        ({"thinking": {"type": "between_tools"}}, "unsupported", "thinking"),
        ({"max_tokens": 0}, "unsupported", "max_tokens"),
        ({"max_tokens": -1}, "invalid_request", "max_tokens"),
        ({"max_tokens": None}, "invalid_request", "max_tokens"),
        ({"model": 5}, "invalid_request", "model"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": "hi"}, "invalid_request", "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "invalid_request", "messages[0]"),
        ({"system": [{"type": "image"}]}, "invalid_request", "system"),
        ({"tools": [{"name": "f"}]}, "invalid_request", "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "invalid_request", "tools[0].name"),
        ({"tools": [{"name": "computer", "type": "computer_20251124"}]}, "unsupported", "computer_20251124"),
        ({"tools": [{"type": "mcp_toolset", "name": "x", "mcp_server_name": "x"}]}, "unsupported", "mcp_toolset"),
        ({"tool_choice": {"type": "tool"}}, "invalid_request", "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "invalid_request", "schema"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], kind: str, named: str) -> None:
    error = refusal(body(**fields))
    assert error.kind == kind
    assert named in error.message


@pytest.mark.parametrize("missing", ["model", "max_tokens", "messages"])
def test_missing_fields(missing: str) -> None:
    fields = body()
    del fields[missing]
    assert refusal(fields).param == missing


@pytest.mark.parametrize("block_type", ["mid_conv_system", "server_tool_use", "web_search_tool_result", "compaction"])
def test_unknown_blocks_are_refused_by_type_and_place(block_type: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": block_type}]
    error = refusal(body(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]))
    assert "messages[1].content[1]" in error.message
    assert block_type in error.message


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "thinking", "thinking": "", "signature": ""}),
        ("user", {"type": "tool_use", "id": "i", "name": "n", "input": {}}),
        ("assistant", {"type": "tool_result", "tool_use_id": "i"}),
        ("system", IMAGE),
    ],
)
def test_misplaced_blocks_are_refused(role: str, block: dict[str, Any]) -> None:
    error = refusal(body(messages=[{"role": role, "content": [block]}]))
    assert error.kind == "invalid_request"
    assert block["type"] in error.message


def test_harmless_fields_pass() -> None:
    decode(
        body(
            metadata={"user_id": "u"},
            service_tier="auto",
            container="c1",
            betas=["x"],
            mcp_servers=[],
            thread=None,
            cache_control={"type": "ephemeral"},
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            inference_geo="eu",
            speed="fast",
            fallbacks="default",
            anything={"at": "all"},
        )
    )


def test_counting_needs_no_max_tokens_and_ignores_compaction() -> None:
    fields = body(compaction={"type": "summarize"})
    del fields["max_tokens"]
    assert decode(fields, COUNT).sampling.max_tokens is None


def test_routes() -> None:
    def operation(path: str) -> tuple[str, dict[str, str | None]] | None:
        for route in DIALECT.routes:
            if found := route.path.fullmatch(path):
                return route.operation, found.groupdict()
        return None

    assert operation("/v1/messages") == ("generate", {})
    assert operation("/v1/messages/count_tokens") == ("count_tokens", COUNT)
    assert operation("/v1/models") == ("list_models", {})
    assert operation("/v1/models/a/b") == ("get_model", {"model": "a/b"})
    assert operation("/v1/messages/batches") is None


def test_a_client_is_known_by_its_path_or_its_version() -> None:
    assert DIALECT.recognizes("/v1/messages/batches", {})
    assert DIALECT.recognizes("/v1/models", {"anthropic-version": "2023-06-01"})
    assert not DIALECT.recognizes("/v1/models", {"authorization": "Bearer k"})


# The way out: canonical requests of other dialects.


def rich_request() -> Request:
    """Everything canonical that Anthropic can say, so that the way out and back must be the identity."""
    return Request(
        model="m",
        messages=[
            Message("system", [Text("a"), Text("b")]),
            Message("user", [Text("look"), Media("image", "image/png", data="aGk="), Media("file", url="u", name="n")]),
            Message("system", [Text("mid")]),
            Message(
                "assistant",
                [
                    Reasoning("hm", "sig"),
                    Reasoning("", "redacted_thinking:data"),
                    Text("calling"),
                    ToolCall("c1", "f", '{"a": 1}'),
                    ToolCall("c2", "f", '{"a": '),
                ],
            ),
            Message("tool", [ToolResult("c1", [Text("x"), Media("image", url="u")])]),
            Message("tool", [ToolResult("c2", [Text("bad")], is_error=True)]),
            Message("user", [Text("go on")]),
            Message("user", [Text("please")]),
            Message("assistant", []),
            Message("tool", [ToolResult("c3", [])]),
            Message("user", []),
        ],
        tools=[Tool("f", "d", Raw(b'{"type":"object"}'), strict=True), Tool("web_fetch_20250910", kind="hosted")],
        tool_choice=ToolChoice("named", ["f"]),
        parallel_tool_calls=False,
        sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=5, max_tokens=7, stop=["S"]),
        response_format=ResponseFormat("json_schema", Raw(b'{"type":"object"}')),
        thinking=Thinking(enabled=True, effort="high", budget=1024),
        stream=True,
    )


def test_everything_that_can_be_said_survives_the_way_out_and_back() -> None:
    assert decode(DIALECT.encode_request(rich_request())) == rich_request()


def test_results_share_a_message_with_what_the_user_says_next() -> None:
    wire = json.loads(DIALECT.encode_request(rich_request()))["messages"]
    assert [message["role"] for message in wire] == ["user", "system", "assistant", "user", "user", "assistant"] + [
        "user"
    ] * 2
    assert [block["type"] for block in wire[3]["content"]] == ["tool_result", "tool_result", "text"]


def test_foreign_forms_become_the_nearest_form() -> None:
    request = Request(
        "m",
        [
            Message("developer", [Text("rules")]),
            Message(
                "assistant", [ToolCall("c", "patch", "*** Begin", kind="custom"), ToolCall("d", "g", "", namespace="n")]
            ),
        ],
        tools=[
            Tool("patch", "edits", kind="custom", grammar=Raw(b'{"syntax":"lark"}')),
            Tool("g", namespace="n"),
            Tool("h"),
            Tool("web_search", kind="hosted"),
        ],
        tool_choice=ToolChoice("auto", ["patch", "g"]),
        response_format=ResponseFormat("json_object"),
        thinking=Thinking(effort="minimal"),
    )
    again = decode(DIALECT.encode_request(request))
    assert again.messages == [
        Message("system", [Text("rules")]),
        Message("assistant", [ToolCall("c", "patch", '{"input":"*** Begin"}'), ToolCall("d", "n__g", "{}")]),
    ]
    assert [tool.name for tool in again.tools] == ["patch", "n__g"]
    assert "lark" in again.tools[0].description
    assert schema_of(again.tools[0])["required"] == ["input"]
    assert again.response_format.kind == "json_schema"
    assert again.thinking.effort == "low"


def test_a_forced_choice_keeps_its_force() -> None:
    def choice(mode: Any, names: list[str]) -> tuple[ToolChoice, list[str]]:
        tools = [Tool("f", namespace="n"), Tool("g"), Tool("h")]
        request = Request("m", [Message("user", [Text("x")])], tools=tools, tool_choice=ToolChoice(mode, names))
        again = decode(DIALECT.encode_request(request))
        return again.tool_choice, [tool.name for tool in again.tools]

    assert choice("named", ["f"]) == (ToolChoice("named", ["n__f"]), ["n__f", "g", "h"])
    assert choice("named", ["g", "h"]) == (ToolChoice("required"), ["g", "h"])
    assert choice("none", []) == (ToolChoice("none"), ["n__f", "g", "h"])


def test_prompts() -> None:
    request = Request("m", [], prompt="once")
    assert decode(DIALECT.encode_request(request)).messages == [Message("user", [Text("once")])]
    with pytest.raises(ApiError):
        DIALECT.encode_request(Request("m", [], prompt=[1, 2]))
    with pytest.raises(ApiError):
        DIALECT.encode_request(Request("m", [Message("user", [Media("audio", data="")])]))


# Replies, read by the official client.


def client(answer: Any) -> anthropic.Anthropic:
    """The official client, connected to `answer`: a function of the request that makes the response."""
    return anthropic.Anthropic(
        api_key="k",
        base_url="http://gateway",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
    )


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def streamed(chunks: list[bytes]) -> Any:
    headers = {"content-type": DIALECT.create_stream_encoder(REQUEST, EXCHANGE, 0).content_type}
    return client(lambda request: httpx2.Response(200, headers=headers, content=iter(chunks)))


def whole(data: bytes) -> Any:
    return client(lambda request: httpx2.Response(200, headers={"content-type": "application/json"}, content=data))


ASK: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def events_of(parts: Iterable[Part], step: int) -> list[ReplyEvent]:
    events: list[ReplyEvent] = []
    for part in parts:
        if isinstance(part, Text):
            events += [TextDelta(part.text[i : i + step]) for i in range(0, len(part.text), step)]
        elif isinstance(part, Reasoning):
            events += [ReasoningDelta(part.text[i : i + step]) for i in range(0, len(part.text), step)]
        elif isinstance(part, ToolCall):
            events.append(ToolCallStart(part.id, part.name, part.kind, part.namespace))
            events += [ToolCallDelta(part.arguments[i : i + step]) for i in range(0, len(part.arguments), step)]
    return events


def stream_bytes(request: Request, reply: Reply, step: int = 3, pings: bool = False, known: bool = True) -> bytes:
    encoder = DIALECT.create_stream_encoder(request, reply.exchange_id, reply.created)
    ping = encoder.keep_alive() if pings else b""
    usage = Usage(prompt=reply.usage.prompt, cached=reply.usage.cached) if known else None
    out = [ping, encoder.start(usage)]
    for event in events_of(reply.parts, step):
        out += [encoder.feed(event), ping]
    return b"".join([*out, encoder.finish(reply)])


def reply_of(*parts: Part, **fields: Any) -> Reply:
    fields.setdefault("usage", Usage(prompt=100, completion=20, cached=60, reasoning=5))
    return Reply(EXCHANGE, "m", 1, list(parts), **fields)


def call(n: int, arguments: str, **fields: Any) -> ToolCall:
    return ToolCall(ids.make_call_id(EXCHANGE, n), "f", arguments, **fields)


REPLIES = {
    "text": reply_of(Text("Hello, world")),
    "reasoning": reply_of(Reasoning("let me see"), Text("yes")),
    "call": reply_of(Reasoning("hm"), Text("\n\n"), call(0, '{ "a" : "b\\n" }'), finish_reason="tool_calls"),
    "parallel": reply_of(call(0, '{"a": 1}'), call(1, '{"b": [2, {}]}'), finish_reason="tool_calls"),
    "text after calls": reply_of(Text("a"), call(0, "{}"), Text("b"), Reasoning("c"), Text("d"), Reasoning("e")),
    "no arguments": reply_of(call(0, ""), finish_reason="tool_calls"),
    "freeform": reply_of(call(0, 'a "b" \\ \n ü', kind="custom"), finish_reason="tool_calls"),
    "namespace": reply_of(call(0, "{}", namespace="n"), finish_reason="tool_calls"),
    "empty": reply_of(),
    "unicode": reply_of(
        Reasoning("héllo\u2028\x85"), Text("日本 🎉 \x00 \r\n\n data: x\u2029"), call(0, '{"ä": "🎉"}')
    ),
    "length": reply_of(Text("cut of"), finish_reason="length"),
    "abort": reply_of(Text("cut of"), finish_reason="abort"),
    "refusal": reply_of(finish_reason="content_filter"),
    "stop sequence": reply_of(Text("a"), stop_sequence="STOP"),
    "no usage": reply_of(Text("a"), usage=Usage()),
}
REQUEST = Request("asked-for", [Message("user", [Text("hi")])])
HIDDEN = Request("asked-for", [], thinking=Thinking(enabled=False, visible=False))


def plain(message: Any) -> dict[str, Any]:
    """What the client made of a reply, less the fields that no reply has."""
    return {
        name: value
        for name, value in message.model_dump(warnings=False, exclude_none=True).items()
        if value is not None
    }


@pytest.mark.parametrize("request_", [REQUEST, HIDDEN], ids=["shown", "hidden"])
@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_says_what_the_whole_reply_says(name: str, request_: Request) -> None:
    reply = REPLIES[name]
    expected = plain(whole(DIALECT.encode_reply(request_, reply)).messages.create(**ASK))
    for size, step, pings, known in [(1, 3, False, True), (7, 1, True, False), (1 << 20, 1000, True, True)]:
        data = stream_bytes(request_, reply, step, pings, known)
        with streamed(in_pieces(data, size)).messages.stream(**ASK) as stream:
            assert plain(stream.get_final_message()) == expected
        with streamed(in_pieces(data, size)).beta.messages.stream(**ASK) as beta:
            assert plain(beta.get_final_message()) == expected


def test_every_cut_of_a_stream_reads_the_same() -> None:
    data = stream_bytes(REQUEST, REPLIES["unicode"], pings=True)
    expected = plain(whole(DIALECT.encode_reply(REQUEST, REPLIES["unicode"])).messages.create(**ASK))
    for cut in range(1, len(data), 7):
        with streamed([data[:cut], data[cut:]]).messages.stream(**ASK) as stream:
            assert plain(stream.get_final_message()) == expected


def test_a_whole_reply() -> None:
    reply = REPLIES["call"]
    message = whole(DIALECT.encode_reply(REQUEST, reply)).messages.create(**ASK)
    assert message.id == f"msg_{EXCHANGE}"
    assert message.model == "asked-for"
    thinking, text, use = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "hm", ids.make_seal(EXCHANGE, 0))
    assert (text.type, text.text) == ("text", "\n\n")
    assert (use.type, use.id, use.name, use.input) == ("tool_use", f"toolu_{EXCHANGE}_0", "f", {"a": "b\n"})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (40, 60, 0)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (20, 5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text", "end_turn"),
        ("call", "tool_use"),
        ("text after calls", "tool_use"),  # the engine said "stop", but there are calls to answer
        ("length", "max_tokens"),
        ("abort", "max_tokens"),
        ("refusal", "refusal"),
        ("stop sequence", "stop_sequence"),
    ],
)
def test_stop_reasons(name: str, reason: str) -> None:
    assert json.loads(DIALECT.encode_reply(REQUEST, REPLIES[name]))["stop_reason"] == reason


def test_seals_and_ids_differ_within_a_reply() -> None:
    content = json.loads(DIALECT.encode_reply(REQUEST, REPLIES["text after calls"]))["content"]
    seals = [block["signature"] for block in content if block["type"] == "thinking"]
    assert seals == [ids.make_seal(EXCHANGE, 0), ids.make_seal(EXCHANGE, 1)]
    assert all(ids.find_exchange_id(seal) == EXCHANGE for seal in seals)


def test_thinking_is_hidden_where_it_was_disabled() -> None:
    reply = reply_of(Text("a"), Reasoning("secret"), Text("b"))
    for data in (DIALECT.encode_reply(HIDDEN, reply), stream_bytes(HIDDEN, reply)):
        assert b"secret" not in data
        assert b"thinking_delta" not in data


def test_the_order_of_events() -> None:
    data = stream_bytes(REQUEST, REPLIES["call"], step=100)
    names = [line.removeprefix("event: ") for line in data.decode().splitlines() if line.startswith("event: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *signed, *block, *block, "message_delta", "message_stop"]


def test_deltas_go_out_at_once() -> None:
    encoder = DIALECT.create_stream_encoder(REQUEST, EXCHANGE, 0)
    encoder.start(None)
    for event, sent in [
        (TextDelta("a"), b'"text":"a"'),
        (TextDelta(""), None),
        (ToolCallStart("i", "f"), b'"tool_use"'),
        (ToolCallDelta('{"a'), b'"partial_json":"{\\"a"'),
        (ToolCallDelta(""), None),
        (ReasoningDelta("b"), b'"thinking":"b"'),
    ]:
        out = encoder.feed(event)
        assert (sent in out) if sent else out == b""


def test_arguments_that_are_not_json() -> None:
    """In a stream the client gets them as they are; a whole reply wraps them, and they come back as they were."""
    reply = reply_of(call(0, '{"a": b}'), finish_reason="tool_calls")
    data = stream_bytes(REQUEST, reply, step=2)
    deltas = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    assert (
        "".join(d["delta"].get("partial_json", "") for d in deltas if d["type"] == "content_block_delta") == '{"a": b}'
    )
    message = whole(DIALECT.encode_reply(REQUEST, reply)).messages.create(**ASK)
    assert message.content[0].input == {"__unparsedToolInput": {"raw": '{"a": b}', "len": 8}}
    echoed = {"role": "assistant", "content": [message.content[0].to_dict()]}
    (part,) = decode(body(messages=[echoed])).messages[0].parts
    assert isinstance(part, ToolCall)
    assert part.arguments == '{"a": b}'
    assert DIALECT.decode_reply(DIALECT.encode_reply(REQUEST, reply)).parts == reply.parts


@pytest.mark.parametrize("alike", ['{"__unparsedToolInput":5}', '{"__unparsedToolInput":{"raw":"x"},"more":1}'])
def test_what_only_looks_like_unparsed_input_stays(alike: str) -> None:
    block = {"type": "tool_use", "id": "i", "name": "n", "input": json.loads(alike)}
    sent = json.dumps(body(messages=[{"role": "assistant", "content": [block]}]), separators=(",", ":"))
    (part,) = decode(sent.encode()).messages[0].parts
    assert isinstance(part, ToolCall)
    assert part.arguments == alike


@pytest.mark.parametrize(
    "name", sorted(set(REPLIES) - {"abort", "text after calls", "freeform", "namespace", "no arguments"})
)
def test_replies_survive_the_way_out_and_back(name: str) -> None:
    reply = REPLIES[name]
    again = DIALECT.decode_reply(DIALECT.encode_reply(REQUEST, reply))
    for part in again.parts:
        if isinstance(part, Reasoning):
            assert ids.find_exchange_id(part.seal) == EXCHANGE
            part.seal = None
    has_calls = any(isinstance(part, ToolCall) for part in reply.parts)
    finish = "tool_calls" if has_calls else reply.finish_reason
    assert again == msgspec.structs.replace(reply, model="asked-for", created=0, finish_reason=finish)


def test_a_real_reply_decodes_and_garbage_is_the_engines_fault() -> None:
    real = {
        "id": "msg_01",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "a", "citations": None}, {"type": "redacted_thinking", "data": "d"}],
        "stop_reason": "model_context_window_exceeded",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 2,
            "cache_read_input_tokens": 3,
            "output_tokens": 4,
        },
    }
    reply = DIALECT.decode_reply(json.dumps(real).encode())
    assert (reply.finish_reason, reply.usage) == ("length", Usage(prompt=6, completion=4, cached=3))
    for garbage in (b"", b"\xff", b"[]", b'{"type":"message"}'):
        with pytest.raises(ApiError) as caught:
            DIALECT.decode_reply(garbage)
        assert caught.value.kind == "engine"


# Errors.


@pytest.mark.parametrize(
    ("kind", "status", "error_type", "raised"),
    [
        ("invalid_request", 400, "invalid_request_error", anthropic.BadRequestError),
        ("unsupported", 400, "invalid_request_error", anthropic.BadRequestError),
        ("context_length", 400, "invalid_request_error", anthropic.BadRequestError),
        ("too_large", 413, "request_too_large", anthropic.APIStatusError),
        ("authentication", 401, "authentication_error", anthropic.AuthenticationError),
        ("not_found", 404, "not_found_error", anthropic.NotFoundError),
        ("method", 405, "invalid_request_error", anthropic.APIStatusError),
        ("upgrade", 426, "invalid_request_error", anthropic.APIStatusError),
        ("rate_limit", 429, "rate_limit_error", anthropic.RateLimitError),
        ("overloaded", 529, "overloaded_error", anthropic.InternalServerError),
        ("engine", 500, "api_error", anthropic.InternalServerError),
        ("timeout", 504, "timeout_error", anthropic.InternalServerError),
        ("internal", 500, "api_error", anthropic.InternalServerError),
    ],
)
def test_errors_are_the_providers(
    kind: Any, status: int, error_type: str, raised: type[anthropic.APIStatusError]
) -> None:
    error = DIALECT.encode_error(ApiError(kind, "why", retry_after=1.2))
    made = client(lambda request: httpx2.Response(error.status, headers=error.headers, content=error.body))
    with pytest.raises(raised) as caught:
        made.messages.create(**ASK)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "2"
    said = caught.value.body
    assert said["type"] == "error"  # type: ignore[index]
    assert said["error"]["type"] == error_type  # type: ignore[index]
    assert "why" in said["error"]["message"]  # type: ignore[index]


def test_a_prompt_that_is_too_long_is_told_in_words_that_harnesses_know() -> None:
    def message(text: str) -> str:
        return str(json.loads(DIALECT.encode_error(ApiError("context_length", text)).body)["error"]["message"])

    assert message("9 tokens > 8 maximum") == "prompt is too long: 9 tokens > 8 maximum"
    assert message("The prompt is too long.") == "The prompt is too long."


@pytest.mark.parametrize("begun", [False, True])
def test_an_error_in_a_stream(begun: bool) -> None:
    encoder = DIALECT.create_stream_encoder(REQUEST, EXCHANGE, 0)
    data = encoder.keep_alive()
    if begun:
        data += encoder.start(None) + encoder.feed(TextDelta("half"))
    data += encoder.error(ApiError("overloaded", "later"))
    seen: list[str] = []
    with (
        streamed(in_pieces(data, 5)).messages.stream(**ASK) as stream,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        seen.extend(stream.text_stream)
    assert "".join(seen) == ("half" if begun else "")
    assert caught.value.type == "overloaded_error"
    assert "later" in str(caught.value)


# The official client's own requests.


def test_the_official_client_is_understood() -> None:
    asked: list[Request] = []

    def gateway(request: httpx2.Request) -> httpx2.Response:
        route = next(route for route in DIALECT.routes if route.path.fullmatch(request.url.path))
        found = route.path.fullmatch(request.url.path)
        assert found is not None
        asked.append(DIALECT.decode_request(DIALECT.split(request.content), found.groupdict()))
        if route.operation == "count_tokens":
            data = DIALECT.encode_count(42)
        else:
            data = DIALECT.encode_reply(asked[-1], REPLIES["call"])
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=data)

    made = client(gateway)
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    first = made.messages.create(**ASK, system="s", tools=[tool], thinking={"type": "enabled", "budget_tokens": 1024})
    turn: Any = {"role": "assistant", "content": first.content}
    result: Any = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "done"}  # type: ignore[union-attr]
    messages: Any = [*ASK["messages"], turn, {"role": "user", "content": [result]}]
    made.messages.create(model="m", max_tokens=9, system="s", tools=[tool], messages=messages)
    assert made.messages.count_tokens(model="m", system="s", tools=[tool], messages=messages).input_tokens == 42
    assert made.beta.messages.count_tokens(model="m", system="s", tools=[tool], messages=messages).input_tokens == 42

    one, two, *counts = asked
    assert two.messages[: len(one.messages)] == one.messages
    assistant, answer = two.messages[len(one.messages) :]
    assert assistant.parts[:2] == [Reasoning("hm", ids.make_seal(EXCHANGE, 0)), Text("\n\n")]
    echoed = assistant.parts[2]
    assert isinstance(echoed, ToolCall)
    assert ids.find_exchange_id(echoed.id) == EXCHANGE
    assert json.loads(echoed.arguments) == {"a": "b\n"}
    assert answer == Message("tool", [ToolResult(echoed.id, [Text("done")])])
    assert all(count.messages == two.messages for count in counts)


def test_models() -> None:
    listed = list(whole(DIALECT.encode_models(["a", "b"], None)).models.list())
    assert [model.id for model in listed] == ["a", "b"]
    assert listed[0].created_at.year == 1970
    assert list(whole(DIALECT.encode_models([], None)).models.list()) == []
    assert whole(DIALECT.encode_models(["a"], "whatever")).models.retrieve("whatever").id == "whatever"


# Whatever comes in.

FIELDS = """
    model messages max_tokens system stream temperature top_p top_k stop_sequences tools tool_choice thinking container
    mcp_servers output_config output_format thread compaction context_management role content type text source id name
    input
""".split()  # noqa: SIM905
WORDS = """
    user assistant system text image document search_result tool_use tool_result thinking redacted_thinking base64 url
    json_schema enabled adaptive disabled auto any tool none custom bash_20250124 web_search_20250305
""".split()  # noqa: SIM905
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    SCALARS | st.text(max_size=5) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def decodes_or_is_refused(data: bytes) -> None:
    for params in ({}, COUNT):
        try:
            request = DIALECT.decode_request(DIALECT.split(data), params)
        except ApiError:
            continue
        if not params:
            assert decode(DIALECT.encode_request(request)) == request


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_object_decodes_or_is_refused(value: dict[str, Any]) -> None:
    decodes_or_is_refused(json.dumps({**body(), **value}).encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_decodes_or_is_refused(data: bytes) -> None:
    decodes_or_is_refused(data)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mutated_captures_decode_or_are_refused(data: st.DataObject) -> None:
    value = json.loads(json.dumps(captures.load("pi_anthropic")[-1]["body"]))
    for _ in range(data.draw(st.integers(1, 3))):
        holder: Any = value
        while True:
            if not holder:
                break
            key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
            if isinstance(holder[key], dict | list) and data.draw(st.integers(0, 4)):
                holder = holder[key]
                continue
            if data.draw(st.booleans()):
                holder[key] = data.draw(JSON)
            else:
                del holder[key]
            break
    decodes_or_is_refused(json.dumps(value).encode())


@pytest.mark.parametrize(
    "data",
    [
        b'{"\xff":1}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"i","name":"n","input":{"a":"\xff"}}]}]}',
    ],
)
def test_what_is_no_text_is_refused(data: bytes) -> None:
    assert refusal(data).kind == "invalid_request"


def test_deep_nesting_is_refused() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    for template in (
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":%s}]}',
        '{"model":"m","max_tokens":1,"system":%s,"messages":[{"role":"user","content":"x"}]}',
    ):
        assert refusal((template % deep).encode()).kind == "invalid_request"
