"""Chat Completions: what real harnesses send decodes, and what we write is what OpenAI's own client reads."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageCustomToolCall

from polar import ids
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_chat.wire import ChatRequest
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind, EngineError
from polar.types import (
    FinishReason,
    Media,
    Message,
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
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    ToolChoice,
    ToolResult,
    Usage,
)
from tests import captures
from tests.unit.dialects.openai_client import EXCHANGE, failing, parts, streaming, whole, written

chat = OpenAIChat()
CAPTURES = captures.names_for("/v1/chat/completions")
HELLO = {"role": "user", "content": "hello"}


def decode(body: dict[str, Any]) -> Request:
    return chat.decode_request(chat.split(json.dumps(body).encode()), {})


def ask(**fields: Any) -> Request:
    return decode({"model": "m", "messages": [HELLO], **fields})


def messages(*wire: dict[str, Any]) -> list[Message]:
    return decode({"model": "m", "messages": list(wire)}).messages


def sent(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(chat.encode_request(request))
    return body


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    return caught.value


def bodies(name: str) -> list[dict[str, Any]]:
    return [record["body"] for record in captures.load(name)]


# Requests of real harnesses


def test_there_are_captures() -> None:
    assert {"qwen", "pi", "opencode", "mswe", "lang", "agents_chat"} <= set(CAPTURES)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_decodes_with_everything_in_place(name: str) -> None:
    for body in bodies(name):
        request = decode(body)
        assert request.model == body["model"]
        assert [message.role for message in request.messages] == [message["role"] for message in body["messages"]]
        assert [tool.name for tool in request.tools] == [tool["function"]["name"] for tool in body.get("tools", [])]
        assert request.stream == body.get("stream", False)
        assert request.sampling.max_tokens == body.get("max_completion_tokens", body.get("max_tokens"))
        for message, wire in zip(request.messages, body["messages"], strict=True):
            calls = [part for part in message.parts if isinstance(part, ToolCall)]
            assert [(call.id, call.name, call.arguments) for call in calls] == [
                (call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in wire.get("tool_calls") or ()
            ]
            thoughts = [part.text for part in message.parts if isinstance(part, Reasoning)]
            assert thoughts == [wire["reasoning_content"]] if wire.get("reasoning_content") else not thoughts
            if wire["role"] == "tool":
                (result,) = message.parts
                assert isinstance(result, ToolResult)
                assert result.call_id == wire["tool_call_id"]


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_is_the_same_after_encoding(name: str) -> None:
    for body in bodies(name):
        request = decode(body)
        assert chat.decode_request(chat.split(chat.encode_request(request)), {}) == request


@pytest.mark.parametrize("name", ["agents_chat", "lang", "lang_stream", "mswe", "mswe_text", "pi", "qwen", "opencode"])
def test_a_turn_holds_the_turns_before_it(name: str) -> None:
    requests = [decode(body) for body in bodies(name) if body["model"] != "fake-small"]  # opencode's title
    assert len(requests) == 3
    for earlier, later in pairwise(requests):
        assert len(later.messages) > len(earlier.messages)
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert later.tools == earlier.tools


def test_an_echoed_turn_says_what_the_reply_said() -> None:
    """mini-swe-agent sends replies back to the byte."""
    records = captures.load("mswe")
    for record, following in pairwise(records):
        reply = chat.decode_reply(json.dumps(record["resp"]).encode())
        echoed = decode(following["body"]).messages[len(record["body"]["messages"])]
        for part in reply.parts:
            if isinstance(part, ToolCall):
                part.id = "call_" + part.id
        assert echoed.parts == reply.parts
        assert reply.finish_reason == "tool_calls"
        assert reply.usage == Usage(record["resp"]["usage"]["prompt_tokens"], completion=50, reasoning=5)


# Messages


def test_roles_and_names_stay_in_place() -> None:
    assert messages(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u", "name": "ada"},
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ) == [
        Message("developer", [Text("d")]),
        Message("user", [Text("u")], "ada"),
        Message("system", [Text("a"), Text("b")]),
    ]


def test_an_assistant_turn() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{ "a":1.0 }'}}
    freeform = {"id": "call_2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert messages(
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call, freeform]},
        {"role": "assistant", "content": "", "reasoning_content": "a", "reasoning": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never", "audio": None},
        {"role": "assistant", "tool_calls": None},
    ) == [
        Message(
            "assistant",
            [
                Reasoning("r"),
                ToolCall("call_1", "f", '{ "a":1.0 }'),
                ToolCall("call_2", "patch", "*** Begin", "custom"),
            ],
        ),
        Message("assistant", [Reasoning("a")]),
        Message("assistant", [Text("t"), Text("no")]),
        Message("assistant", [Text("never")]),
        Message("assistant", []),
    ]


def test_tool_results() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}
    assert messages(
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        {"role": "tool", "tool_call_id": "c2", "name": "f", "content": [{"type": "text", "text": "out"}, image]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ) == [
        Message("tool", [ToolResult("c1", [Text("out")])]),
        Message(
            "tool",
            [ToolResult("c2", [Text("out"), Media("image", url="https://example.org/a.png", detail="low")], name="f")],
        ),
        Message("tool", [ToolResult("c3", [])]),
    ]


def test_calls_of_the_old_kind_are_paired_with_their_results() -> None:
    assert messages(
        HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "function", "name": "g", "content": "2"},
    )[1:] == [
        Message("assistant", [ToolCall("function_call_1", "f", "{}")]),
        Message("tool", [ToolResult("function_call_1", [Text("1")], name="f")]),
        Message("assistant", [ToolCall("function_call_3", "g", "{}")]),
        Message("tool", [ToolResult("function_call_3", [Text("2")], name="g")]),
    ]


MEDIA: list[tuple[dict[str, Any], Media]] = [
    (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
        Media("image", "image/png", data="iVBO"),
    ),
    ({"type": "image_url", "image_url": {"url": "http://a/b?c,d"}}, Media("image", url="http://a/b?c,d")),
    (
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>", "detail": "high"}},
        Media("image", url="data:image/svg+xml,<svg/>", detail="high"),
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
        Media("audio", "audio/wav", data="UklG"),
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "SUQz", "format": "mp3"}},
        Media("audio", "audio/mpeg", data="SUQz"),
    ),
    ({"type": "audio_url", "audio_url": {"url": "https://a/b.wav"}}, Media("audio", url="https://a/b.wav")),
    ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, Media("video", url="https://a/b.mp4")),
    (
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        Media("video", "video/mp4", data="AAAA"),
    ),
    (
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE", "filename": "a.pdf"}},
        Media("file", "application/pdf", data="JVBE", name="a.pdf"),
    ),
    ({"type": "file", "file": {"file_data": "JVBE"}}, Media("file", data="JVBE")),
    ({"type": "file", "file": {"file_data": "https://a/b.pdf"}}, Media("file", url="https://a/b.pdf")),
    ({"type": "file", "file": {"file_id": "file-1"}}, Media("file", file_id="file-1")),
]


@pytest.mark.parametrize(("wire", "media"), MEDIA)
def test_media_both_ways(wire: dict[str, Any], media: Media) -> None:
    text = {"type": "text", "text": "what is this?"}
    found = messages({"role": "user", "content": [text, wire]})
    assert found == [Message("user", [Text("what is this?"), media])]
    assert sent(Request("m", found))["messages"] == [{"role": "user", "content": [text, wire]}]


@pytest.mark.parametrize(
    ("wire", "place"),
    [
        ({"role": "robot", "content": "x"}, "messages[1]"),
        ({"role": "user", "content": 1}, "messages[1]"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[1]"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "messages[1].content[0]"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, "messages[1].audio"),
        ("x", "messages[1]"),
    ],
)
def test_a_wrong_message_is_named(wire: Any, place: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages(HELLO, wire)
    assert caught.value.param == place
    assert place in caught.value.message


# Fields


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "m"},
        {"messages": [HELLO]},
        {"model": "m", "messages": []},
        {"model": "m", "messages": "hello"},
        {"model": 1, "messages": [HELLO]},
    ],
)
def test_model_and_messages_are_required(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        decode(body)
    assert caught.value.kind == "invalid_request"
    assert caught.value.param in ("model", "messages")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"nope"])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(ApiError):
        chat.split(body)


def test_sampling() -> None:
    assert ask(
        temperature=0.5,
        top_p=1,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        repetition_penalty=1.1,
        seed=7,
        max_completion_tokens=5,
        max_tokens=6,
        min_tokens=1,
        stop="END",
        logit_bias={"42": -100},
    ).sampling == SamplingParams(
        temperature=0.5,
        top_p=1.0,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        repetition_penalty=1.1,
        seed=7,
        max_tokens=5,
        min_tokens=1,
        stop=["END"],
        logit_bias={"42": -100.0},
    )
    assert ask(stop=["a", "b"], max_tokens=6, logit_bias={}).sampling == SamplingParams(stop=["a", "b"], max_tokens=6)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": "hot"}, {"max_tokens": 0}, {"stop": [1]}, {"stream": "yes"}, {"tools": {}}, {"logit_bias": [1]}],
)
def test_a_wrong_field_is_named(fields: dict[str, Any]) -> None:
    error = refused(**fields)
    assert error.kind == "invalid_request"
    assert error.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"web_search_options": {}},
        {"guided_json": {"type": "object"}},
        {"stop_token_ids": [1]},
        {"ignore_eos": True},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"date_string": "today"}},
    ],
)
def test_what_would_change_the_sampling_is_refused(fields: dict[str, Any]) -> None:
    error = refused(**fields)
    assert error.kind == "unsupported"
    assert next(iter(fields)) in error.message


def test_neutral_and_harmless_fields_pass() -> None:
    assert (
        ask(
            n=1,
            best_of=None,
            functions=[],
            function_call="auto",
            modalities=["text"],
            audio=None,
            web_search_options=None,
            prediction={"type": "content", "content": "x"},
            metadata={"a": "b"},
            store=False,
            user="u",
            safety_identifier="s",
            prompt_cache_key="k",
            prompt_cache_retention="24h",
            service_tier="auto",
            verbosity="low",
            logprobs=False,
            something_new={"a": [1]},
        )
        == ask()
    )


def test_streaming_and_its_usage() -> None:
    assert (ask().stream, ask(stream=True).stream) == (False, True)
    assert not ask(stream=True).stream_usage
    assert not ask(stream=True, stream_options=None).stream_usage
    assert ask(stream=True, stream_options={"include_usage": True}).stream_usage


def test_log_probabilities() -> None:
    assert ask(logprobs=True).logprobs == 0
    assert ask(logprobs=True, top_logprobs=5).logprobs == 5
    assert ask(top_logprobs=5).logprobs is None


def test_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}
    tools = [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": True}},
        {"type": "function", "function": {"name": "g"}},
        {"type": "custom", "custom": {"name": "patch", "description": "p", "format": grammar}},
        {"type": "web_search", "user_location": {}},
    ]
    request = ask(tools=tools, parallel_tool_calls=False)
    assert request.tools == [
        Tool("f", "d", Raw(json.dumps(schema).encode()), strict=True),
        Tool("g"),
        Tool("patch", "p", kind="custom", grammar=Raw(json.dumps(grammar).encode())),
        Tool("web_search", kind="hosted"),
    ]
    assert sent(request)["tools"] == tools[:3]
    assert sent(request)["parallel_tool_calls"] is False
    assert refused(tools=[{"type": "function", "name": "f"}]).param == "tools[0]"


F, G = {"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (F, ToolChoice("named", ["f"])),
        (G, ToolChoice("named", ["g"])),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F, G]}},
            ToolChoice("auto", ["f", "g"]),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [F, G]}},
            ToolChoice("named", ["f", "g"]),
        ),
    ],
)
def test_tool_choice_both_ways(wire: Any, choice: ToolChoice) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}]
    request = ask(tools=tools, tool_choice=wire)
    assert request.tool_choice == choice
    assert sent(request)["tool_choice"] == wire


def test_tool_choice_auto_is_the_default() -> None:
    assert ask(tools=[F], tool_choice="auto") == ask(tools=[F])
    assert "tool_choice" not in sent(ask(tools=[F]))
    assert refused(tool_choice="any").param == "tool_choice"
    assert refused(tool_choice={"type": "function"}).param == "tool_choice"


def test_response_format_both_ways() -> None:
    wire = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    request = ask(response_format=wire)
    assert request.response_format == ResponseFormat("json_schema", Raw(b'{"type": "object"}'), "n", True)
    assert sent(request)["response_format"] == wire
    assert ask(response_format={"type": "text"}) == ask()
    assert sent(ask(response_format={"type": "json_object"}))["response_format"] == {"type": "json_object"}
    assert refused(response_format={"type": "json_schema"}).param == "response_format.json_schema"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "high"}, Thinking(effort="high")),
        ({"reasoning_effort": "none"}, Thinking(enabled=False, effort="none")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": True}}, Thinking(enabled=True)),
        ({"chat_template_kwargs": {"thinking": True, "thinking_budget": 512}}, Thinking(enabled=True, budget=512)),
        ({"enable_thinking": True, "thinking_budget": 8}, Thinking(enabled=True, budget=8)),
        ({"thinking": {"type": "disabled"}}, Thinking(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Thinking(enabled=True, budget=9)),
        (
            {"reasoning": {"effort": "low", "max_tokens": 7, "exclude": True}},
            Thinking(effort="low", budget=7, visible=False),
        ),
        ({"include_reasoning": False}, Thinking(visible=False)),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: Thinking) -> None:
    request = ask(**fields)
    assert request.thinking == thinking
    again = chat.decode_request(chat.split(chat.encode_request(request)), {})
    assert again.thinking == msgspec.structs.replace(thinking, visible=True)


# Requests to an engine


def test_a_request_to_an_engine() -> None:
    request = Request(
        model="m",
        messages=[
            Message("system", [Text("s")]),
            Message("user", [Text("u")], "ada"),
            Message(
                "assistant",
                [
                    Reasoning("think "),
                    Text("a"),
                    ToolCall("call_1", "f", "{}"),
                    Reasoning("more"),
                    Text("b"),
                    ToolCall("call_2", "patch", "x", "custom", "ns"),
                ],
            ),
            Message("tool", [ToolResult("call_1", [Text("boom")], is_error=True)]),
            Message("tool", [ToolResult("call_2", [Text("1"), Text("2")], name="patch")]),
            Message("assistant", [ToolCall("call_3", "f", "{}")]),
            Message("tool", [ToolResult("call_3", [])]),
            Message("assistant", []),
        ],
        tools=[Tool("f"), Tool("patch", kind="custom", namespace="ns"), Tool("web_search", kind="hosted")],
        sampling=SamplingParams(temperature=0.0, max_tokens=9, stop=["END"]),
        thinking=Thinking(enabled=True, effort="low", budget=5, visible=False),
        stream=True,
        logprobs=0,
    )
    assert sent(request) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_completion_tokens": 9,
        "stop": ["END"],
        "logprobs": True,
        "top_logprobs": 0,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True, "thinking_budget": 5},
        "tools": [
            {"type": "function", "function": {"name": "f"}},
            {"type": "custom", "custom": {"name": "ns__patch"}},
        ],
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u", "name": "ada"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "reasoning_content": "think more",
                "reasoning": "think more",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "call_2", "type": "custom", "custom": {"name": "ns__patch", "input": "x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "boom"},
            {
                "role": "tool",
                "tool_call_id": "call_2",
                "name": "patch",
                "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
            },
            {
                "role": "assistant",
                "tool_calls": [{"id": "call_3", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "call_3", "content": ""},
            {"role": "assistant", "content": ""},
        ],
    }


def test_a_raw_prompt_is_no_chat() -> None:
    with pytest.raises(ApiError) as caught:
        chat.encode_request(Request("m", [], prompt="Once"))
    assert caught.value.kind == "unsupported"


# Replies

CALL = ToolCallStart(ids.make_call_id(EXCHANGE, 0), "bash")
SECOND = ToolCallStart(ids.make_call_id(EXCHANGE, 1), "read")

TURNS: dict[str, tuple[list[ReplyEvent], FinishReason]] = {
    "text": ([TextDelta("Hel"), TextDelta("lo\n"), TextDelta(" ")], "stop"),
    "reasoning": ([ReasoningDelta("Let me "), ReasoningDelta("see."), TextDelta("\n\n4")], "stop"),
    "call": ([CALL, ToolCallDelta('{ "command": '), ToolCallDelta('"ls"}')], "tool_calls"),
    "call without arguments": ([CALL], "tool_calls"),
    "everything": (
        [
            ReasoningDelta("Hm."),
            TextDelta("So:"),
            CALL,
            ToolCallDelta("{}"),
            SECOND,
            ToolCallDelta('{"a":'),
            ToolCallDelta("1}"),
        ],
        "tool_calls",
    ),
    "text after calls": ([CALL, ToolCallDelta("{}"), TextDelta("done"), SECOND, ToolCallDelta("{}")], "tool_calls"),
    "interleaved thoughts": ([ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("c"), TextDelta("d")], "stop"),
    "no JSON": ([CALL, ToolCallDelta('{"command": "ls')], "length"),
    "nothing": ([], "stop"),
    "empty pieces": ([ReasoningDelta(""), TextDelta(""), TextDelta("x"), TextDelta("")], "stop"),
    "unicode": ([TextDelta("é \u2028 \U0001f9ea"), TextDelta('"\\ \x00 \r\n\n data: [DONE]\n\n')], "stop"),
    "cut": ([TextDelta("and th")], "length"),
    "aborted": ([TextDelta("and th")], "abort"),
    "filtered": ([TextDelta("x")], "content_filter"),
}


def reply_of(events: list[ReplyEvent], finish_reason: FinishReason) -> Reply:
    return Reply(
        exchange_id=EXCHANGE,
        model="m",
        created=1_700_000_000,
        parts=parts(events),
        finish_reason=finish_reason,
        usage=Usage(prompt=100, completion=20, cached=64, reasoning=5),
    )


def streamed(request: Request, events: list[ReplyEvent], reply: Reply) -> bytes:
    return written(chat.create_stream_encoder(request, EXCHANGE, reply.created), events, reply)


def read_whole(request: Request, reply: Reply) -> dict[str, Any]:
    client = whole(chat.encode_reply(request, reply))
    return client.chat.completions.create(model="m", messages=[]).to_dict()


def read_stream(body: bytes, size: int) -> dict[str, Any]:
    """What OpenAI's client makes of a stream, in the words of a whole reply."""
    state = ChatCompletionStreamState()
    for chunk in streaming(body, size).chat.completions.create(model="m", messages=[], stream=True):
        state.handle_chunk(chunk)
    completion = state.current_completion_snapshot.to_dict()
    for call in completion["choices"][0]["message"].get("tool_calls") or ():  # type: ignore[index]
        del call["index"]
    return completion


def said(completion: dict[str, Any]) -> dict[str, Any]:
    (choice,) = completion["choices"]
    message = {key: value for key, value in choice["message"].items() if value is not None and key != "parsed"}
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
    return {
        "message": message,
        "finish_reason": choice["finish_reason"],
        "logprobs": choice["logprobs"],
        "id": completion["id"],
        "model": completion["model"],
        "created": completion["created"],
        "usage": completion["usage"],
    }


ASKED = Request("m", [Message("user", [Text("hello")])], stream=True)


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("name", TURNS)
def test_a_stream_says_what_the_whole_reply_says(name: str, size: int) -> None:
    events, finish_reason = TURNS[name]
    reply = reply_of(events, finish_reason)
    assert said(read_stream(streamed(ASKED, events, reply), size)) == said(read_whole(ASKED, reply))


def test_a_whole_reply_read_by_the_client() -> None:
    events, finish_reason = TURNS["everything"]
    completion = read_whole(ASKED, reply_of(events, finish_reason))
    assert completion["object"] == "chat.completion"
    assert said(completion) == {
        "id": f"chatcmpl-{EXCHANGE}",
        "model": "m",
        "created": 1_700_000_000,
        "finish_reason": "tool_calls",
        "logprobs": None,
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 64},
            "completion_tokens_details": {"reasoning_tokens": 5},
        },
        "message": {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": f"call_{EXCHANGE}_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}},
                {"id": f"call_{EXCHANGE}_1", "type": "function", "function": {"name": "read", "arguments": '{"a":1}'}},
            ],
        },
    }


@pytest.mark.parametrize("name", TURNS)
def test_a_reply_both_ways(name: str) -> None:
    events, finish_reason = TURNS[name]
    reply = reply_of(events, finish_reason)
    found = chat.decode_reply(chat.encode_reply(ASKED, reply))
    texts = "".join(part.text for part in reply.parts if isinstance(part, Text))
    thoughts = "".join(part.text for part in reply.parts if isinstance(part, Reasoning))
    reply.parts = [
        *([Reasoning(thoughts)] if thoughts else []),
        *([Text(texts)] if texts else []),
        *[part for part in reply.parts if isinstance(part, ToolCall)],
    ]
    if reply.finish_reason == "abort":
        reply.finish_reason = "length"
    assert found == reply


def test_the_chunks_of_a_stream() -> None:
    request = msgspec.structs.replace(ASKED, stream_usage=False)
    events = TURNS["call"][0]
    body = written(chat.create_stream_encoder(request, EXCHANGE, 7), events, reply_of(*TURNS["call"]))
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    for chunk in chunks:
        assert (chunk["id"], chunk["object"], chunk["created"]) == (f"chatcmpl-{EXCHANGE}", "chat.completion.chunk", 7)
        assert "usage" not in chunk
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": f"call_{EXCHANGE}_0",
                    "type": "function",
                    "function": {"name": "bash", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{ "command": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"ls"}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "tool_calls"]


def test_usage_in_a_stream_stands_in_the_last_chunk_alone() -> None:
    body = streamed(ASKED, *_text_turn())
    chunks = [*streaming(body, 9).chat.completions.create(model="m", messages=[], stream=True)]
    assert [chunk.usage is not None for chunk in chunks] == [False, False, False, True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 100
    assert body.count(b'"usage":null') == 3


def _text_turn() -> tuple[list[ReplyEvent], Reply]:
    events: list[ReplyEvent] = [TextDelta("x")]
    return events, reply_of(events, "stop")


def test_hidden_reasoning_is_not_written() -> None:
    request = msgspec.structs.replace(ASKED, thinking=Thinking(visible=False))
    events, finish_reason = TURNS["everything"]
    reply = reply_of(events, finish_reason)
    assert "reasoning_content" not in read_whole(request, reply)["choices"][0]["message"]
    body = streamed(request, events, reply)
    assert b"Hm." not in body
    assert said(read_stream(body, 7)) == said(read_whole(request, reply))


def test_a_custom_call() -> None:
    """OpenAI's client has no type for these in streams, and keeps them as they come."""
    events: list[ReplyEvent] = [
        ToolCallStart(ids.make_call_id(EXCHANGE, 0), "patch", "custom"),
        ToolCallDelta("*** "),
        ToolCallDelta("End"),
    ]
    reply = reply_of(events, "tool_calls")
    client = whole(chat.encode_reply(ASKED, reply))
    calls = client.chat.completions.create(model="m", messages=[]).choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.id, call.custom.name, call.custom.input) == (f"call_{EXCHANGE}_0", "patch", "*** End")
    chunks = streaming(streamed(ASKED, events, reply), 3).chat.completions.create(model="m", messages=[], stream=True)
    deltas = [
        delta.to_dict() for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()
    ]
    assert deltas == [
        {"index": 0, "id": f"call_{EXCHANGE}_0", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 0, "custom": {"input": "*** "}},
        {"index": 0, "custom": {"input": "End"}},
    ]
    assert chat.decode_reply(chat.encode_reply(ASKED, reply)) == reply


def test_a_stop_string_is_told() -> None:
    events, reply = _text_turn()
    reply.stop_sequence = "END"
    assert chat.decode_reply(chat.encode_reply(ASKED, reply)).stop_sequence == "END"
    assert b'"stop_reason":"END"' in streamed(ASKED, events, reply)


def test_log_probabilities_where_asked_for() -> None:
    request = msgspec.structs.replace(ASKED, logprobs=2)
    events, reply = _text_turn()
    other = TokenLogprob("y", float("-inf"))
    reply.logprobs = [TokenLogprob("x", -0.5, [120], [TokenLogprob("x", -0.5, [120]), other])]
    found = said(read_whole(request, reply))
    assert found["logprobs"]["content"] == [
        {
            "token": "x",
            "logprob": -0.5,
            "bytes": [120],
            "top_logprobs": [
                {"token": "x", "logprob": -0.5, "bytes": [120]},
                {"token": "y", "logprob": -9999.0, "bytes": None},
            ],
        }
    ]
    assert said(read_stream(streamed(request, events, reply), 5)) == found
    other.logprob = -9999.0
    assert chat.decode_reply(chat.encode_reply(request, reply)).logprobs == reply.logprobs
    assert said(read_whole(ASKED, reply))["logprobs"] is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"\xff", b'{"id":"a","object":"x","created":1,"model":"m","choices":[]}', b"<html>"]
)
def test_an_answer_that_is_none(body: bytes) -> None:
    with pytest.raises(EngineError):
        chat.decode_reply(body)


# Errors and models

EXCEPTIONS: dict[ApiErrorKind, type[openai.APIStatusError]] = {
    "invalid_request": openai.BadRequestError,
    "unsupported": openai.BadRequestError,
    "context_length": openai.BadRequestError,
    "too_large": openai.APIStatusError,
    "authentication": openai.AuthenticationError,
    "not_found": openai.NotFoundError,
    "method": openai.APIStatusError,
    "upgrade": openai.APIStatusError,
    "rate_limit": openai.RateLimitError,
    "overloaded": openai.InternalServerError,
    "engine": openai.InternalServerError,
    "timeout": openai.InternalServerError,
    "internal": openai.InternalServerError,
}


@pytest.mark.parametrize("kind", HTTP_STATUS)
def test_errors_raise_what_openai_raises(kind: ApiErrorKind) -> None:
    error = chat.encode_error(ApiError(kind, "It broke.", param="messages", retry_after=1.2))
    with pytest.raises(EXCEPTIONS[kind]) as caught:
        failing(error).chat.completions.create(model="m", messages=[])
    assert caught.value.status_code == HTTP_STATUS[kind]
    assert caught.value.param == "messages"
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.body["message"] == "It broke."
    assert caught.value.response.headers["retry-after"] == "2"


def test_error_codes_that_clients_look_for() -> None:
    codes = {kind: json.loads(chat.encode_error(ApiError(kind, "")).body)["error"]["code"] for kind in HTTP_STATUS}
    assert codes["context_length"] == "context_length_exceeded"
    assert codes["rate_limit"] == "rate_limit_exceeded"
    assert codes["authentication"] == "invalid_api_key"
    assert len(set(codes.values())) == len(HTTP_STATUS)
    assert "retry-after" not in chat.encode_error(ApiError("rate_limit", "")).headers


def test_an_error_in_the_middle_of_a_stream() -> None:
    encoder = chat.create_stream_encoder(ASKED, EXCHANGE, 7)
    body = encoder.start(None) + encoder.feed(TextDelta("half")) + encoder.error(ApiError("engine", "It broke."))
    seen: list[ChatCompletionChunk] = []
    stream = streaming(body, 11).chat.completions.create(model="m", messages=[], stream=True)
    with pytest.raises(openai.APIError, match="It broke"):
        seen.extend(stream)
    assert [chunk.choices[0].delta.content for chunk in seen] == ["", "half"]
    assert b"[DONE]" not in body


def test_models() -> None:
    listed = whole(chat.encode_models(["a", "org/b"], None)).models.list()
    assert [model.id for model in listed] == ["a", "org/b"]
    assert whole(chat.encode_models(["a"], "org/any")).models.retrieve("org/any").id == "org/any"


@pytest.mark.parametrize(
    ("method", "path", "operation", "params"),
    [
        ("POST", "/v1/chat/completions", "generate", {}),
        ("GET", "/v1/models", "list_models", {}),
        ("GET", "/v1/models/Qwen/Qwen3-8B", "get_model", {"model": "Qwen/Qwen3-8B"}),
    ],
)
def test_routes(method: str, path: str, operation: str, params: dict[str, str]) -> None:
    found = [
        (route.operation, match.groupdict())
        for route in chat.routes
        if route.method == method and (match := route.path.match(path))
    ]
    assert found == [(operation, params)]


def test_a_client_of_ours_is_recognised() -> None:
    assert chat.recognizes("/v1/nothing", {"Authorization": "Bearer sk-polar"})
    assert chat.recognizes("/v1/models", {})
    assert not chat.recognizes("/v1/messages", {"x-api-key": "sk-polar"})


# Whatever comes in

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*ChatRequest.__struct_fields__, "n", "modalities", "functions"}))


def survives(body: dict[str, Any]) -> None:
    """A request or a clear error; and what is a request can be sent on."""
    try:
        request = decode(body)
    except ApiError:
        return
    again = chat.decode_request(chat.split(chat.encode_request(request)), {})
    assert again.messages == request.messages
    assert again.sampling == request.sampling


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(FIELDS | st.text(max_size=8), JSON, max_size=6))
def test_any_object_is_a_request_or_an_error(body: dict[str, Any]) -> None:
    survives({"model": "m", "messages": [HELLO], **body})
    survives(body)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_spoilt_capture_is_a_request_or_an_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["pi", "qwen_parallel", "mswe", "agents_chat"]))
    body = json.loads(json.dumps(bodies(name)[-1]))
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(place[key], dict | list) and place[key]) or data.draw(st.integers(0, 4)) == 0:
            break
        place = place[key]
    if data.draw(st.booleans()):
        place[key] = data.draw(JSON)
    else:
        del place[key]
    survives(body)


def test_deep_nesting_is_an_error_or_harmless() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for body in (
        b'{"model":"m","messages":[{"role":"user","content":%b}]}' % deep,
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"guided_json":%b}' % deep,
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":%b}' % deep,
    ):
        with pytest.raises(ApiError):
            chat.decode_request(chat.split(body), {})
