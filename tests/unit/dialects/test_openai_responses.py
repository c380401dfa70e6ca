"""The Responses API: what real harnesses send decodes, and what we write is what OpenAI's own client reads."""

import base64
import copy
import json
import zlib
from itertools import chain, groupby, pairwise
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from polar import ids
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.openai_responses.items import _ITEM_READERS
from polar.dialects.openai_responses.wire import (
    ECHO_DEFAULTS,
    FunctionCallIn,
    ObjectCallIn,
    PartIn,
    ReasoningIn,
    ToolIn,
)
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind, EngineError
from polar.types import (
    FinishReason,
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

responses = OpenAIResponses()
CAPTURES = captures.names_for("/v1/responses")
OTHER = "x9999999999zzzzzzzzzzzzzzz"


def decode(body: dict[str, Any]) -> Request:
    return responses.decode_request(responses.split(json.dumps(body).encode()), {})


def ask(**fields: Any) -> Request:
    return decode({"model": "m", "input": "hello", **fields})


def read(*items: Any) -> list[Message]:
    return decode({"model": "m", "input": list(items)}).messages


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    return caught.value


def refused_item(item: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(item)
    assert caught.value.param is not None
    assert caught.value.param.startswith("input[0]")
    return caught.value


def without_echo(request: Request) -> Request:
    request.echo = {}
    return request


def again(request: Request) -> Request:
    """Sent on as a client would, and read once more."""
    return responses.decode_request(responses.split(responses.encode_request(request)), {})


def bodies(name: str) -> list[dict[str, Any]]:
    return [record["body"] for record in captures.load(name)]


def events_of(stream: str | bytes) -> list[dict[str, Any]]:
    lines = (stream if isinstance(stream, str) else stream.decode()).split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


# Requests of real harnesses


def test_there_are_captures() -> None:
    assert {"codex", "codex_gpt55", "codex_sub", "pi_openai", "mswe_responses", "agents"} <= set(CAPTURES)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_decodes_with_everything_in_place(name: str) -> None:
    for body in bodies(name):
        request = decode(body)
        assert request.model == body["model"]
        assert request.stream == body.get("stream", False)
        assert request.sampling.max_tokens == body.get("max_output_tokens")
        assert request.parallel_tool_calls == body.get("parallel_tool_calls")
        assert request.thinking.effort == body.get("reasoning", {}).get("effort")
        found = [part for message in request.messages for part in message.parts]
        calls = [part for part in found if isinstance(part, ToolCall)]
        assert [(call.id, call.name, call.arguments, call.namespace) for call in calls] == [
            (item["call_id"], item["name"], item.get("arguments", item.get("input")), item.get("namespace"))
            for item in body["input"]
            if item.get("type") in ("function_call", "custom_tool_call")
        ]
        assert [(part.call_id, part.parts) for part in found if isinstance(part, ToolResult)] == [
            (item["call_id"], [Text(item["output"])]) for item in body["input"] if "output" in item
        ]
        assert [(part.text, part.seal) for part in found if isinstance(part, Reasoning)] == [
            (item["summary"][0]["text"], item["encrypted_content"])
            for item in body["input"]
            if item.get("type") == "reasoning"
        ]
        contents = [item["content"] for item in body["input"] if "role" in item]
        texts = [[content] if isinstance(content, str) else [part["text"] for part in content] for content in contents]
        system = [body["instructions"]] if body.get("instructions") else []
        assert [part.text for part in found if isinstance(part, Text)] == [*system, *chain.from_iterable(texts)]


@pytest.mark.parametrize("name", CAPTURES)
def test_a_captures_tools_are_all_there(name: str) -> None:
    for body in bodies(name):
        expected: list[tuple[str, str, str | None]] = []
        for tool in body.get("tools", []):
            if tool["type"] == "namespace":
                expected += [(inner["type"], inner["name"], tool["name"]) for inner in tool["tools"]]
            elif tool["type"] == "tool_search":
                expected.append(("function", "tool_search", None))
            elif tool["type"] in ("function", "custom"):
                expected.append((tool["type"], tool["name"], None))
            else:
                expected.append(("hosted", tool["type"], None))
        assert [(tool.kind, tool.name, tool.namespace) for tool in decode(body).tools] == expected


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_is_the_same_after_encoding(name: str) -> None:
    for body in bodies(name):
        assert without_echo(again(decode(body))) == without_echo(decode(body))


@pytest.mark.parametrize("name", ["codex", "codex_gpt55", "codex_parallel", "agents", "mswe_responses", "pi_openai"])
def test_a_turn_holds_the_turns_before_it_and_the_reply_between(name: str) -> None:
    records = captures.load(name)
    assert len(records) == 3
    for earlier, later in pairwise(records):
        before, after = decode(earlier["body"]).messages, decode(later["body"]).messages
        assert after[: len(before)] == before
        turn = after[len(before)]
        assert turn.role == "assistant"
        assert {message.role for message in after[len(before) + 1 :]} == {"tool"}
        answered = earlier.get("resp") or events_of(earlier["resp_sse"])[-1]["response"]
        said = responses.decode_reply(json.dumps(answered).encode()).parts
        for part in said:
            if isinstance(part, ToolCall):
                part.id = "call_" + part.id
                part.arguments = part.arguments if name != "pi_openai" else echoed_by_pi(part.arguments)
        assert turn.parts == said


def echoed_by_pi(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)


def test_calls_of_codex_carry_their_namespace() -> None:
    calls = [
        part
        for body in bodies("codex_sub")
        for message in decode(body).messages
        for part in message.parts
        if isinstance(part, ToolCall)
    ]
    assert {(call.namespace, call.name) for call in calls} >= {
        ("multi_agent_v1", "spawn_agent"),
        (None, "exec_command"),
    }


# Items


def test_plain_text_is_a_user_message_after_the_instructions() -> None:
    assert ask(instructions="be brief").messages == [
        Message("system", [Text("be brief")]),
        Message("user", [Text("hello")]),
    ]


def test_messages_of_all_roles_stay_in_place() -> None:
    roles = ["system", "user", "developer", "assistant", "user", "system"]
    wire = [{"role": role, "content": f"{index} "} for index, role in enumerate(roles)]
    assert [(message.role, message.parts) for message in read(*wire)] == [
        (role, [Text(f"{index} ")]) for index, role in enumerate(roles)
    ]


def test_items_of_one_turn_make_one_message() -> None:
    turn = [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{ }"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x\n", "namespace": "n"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    said: list[Part] = [
        Reasoning("hm"),
        Text("a"),
        ToolCall("c1", "f", "{ }"),
        ToolCall("c2", "g", "x\n", "custom", "n"),
        Text("no"),
    ]
    assert read(*turn, *results, *turn) == [
        Message("assistant", said),
        Message("tool", [ToolResult("c1", [Text("1")])]),
        Message("tool", [ToolResult("c2", [Text("2")])]),
        Message("assistant", said),
    ]


def test_turns_that_follow_each_other_are_told_apart_by_the_exchange_they_name() -> None:
    """A harness keeps the finished items of a stream that was cut; the next reply's follow directly."""

    def cut(exchange: str) -> list[dict[str, Any]]:
        sealed = f"{ids.make_seal(exchange, 0)}."
        return [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": sealed},
            {"type": "message", "role": "assistant", "content": "no id here"},
            {"type": "function_call", "call_id": f"call_{exchange}_0", "name": "f", "arguments": ""},
        ]

    turns = read(*cut(EXCHANGE), *cut(OTHER))
    assert [len(turn.parts) for turn in turns] == [3, 3]
    text_only = [
        {"role": "assistant", "id": f"msg_{exchange}_0", "content": "again"} for exchange in (EXCHANGE, OTHER, OTHER)
    ]
    assert [len(turn.parts) for turn in read(*text_only)] == [1, 2]


def test_images_files_and_sound() -> None:
    content = [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"},
        {"type": "input_image", "image_url": "https://example.org/a.png"},
        {"type": "input_image", "image_url": {"url": "https://example.org/b.png"}},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,BBBB", "filename": "a.pdf"},
        {"type": "input_file", "file_data": "QkJC"},
        {"type": "input_file", "file_url": "https://example.org/a.pdf"},
        {"type": "input_file", "file_id": "file-2"},
        {"type": "input_audio", "input_audio": {"data": "CCCC", "format": "mp3"}},
        {"type": "input_audio", "audio_url": "https://example.org/a.wav"},
        {"type": "input_text", "text": "what are these?"},
    ]
    expected: list[Part] = [
        Media("image", "image/png", data="AAAA", detail="high"),
        Media("image", url="https://example.org/a.png"),
        Media("image", url="https://example.org/b.png"),
        Media("image", file_id="file-1"),
        Media("file", "application/pdf", data="BBBB", name="a.pdf"),
        Media("file", data="QkJC"),
        Media("file", url="https://example.org/a.pdf"),
        Media("file", file_id="file-2"),
        Media("audio", "audio/mpeg", data="CCCC"),
        Media("audio", url="https://example.org/a.wav"),
        Text("what are these?"),
    ]
    request = decode({"model": "m", "input": [{"role": "user", "content": content}]})
    assert request.messages == [Message("user", expected)]
    assert again(request).messages == request.messages
    output = {"type": "function_call_output", "call_id": "c", "output": content}
    assert read(output) == [Message("tool", [ToolResult("c", expected)])]  # type: ignore[arg-type]
    screenshot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
    assert read({"type": "computer_call_output", "call_id": "c", "output": screenshot}) == [
        Message("tool", [ToolResult("c", [Media("image", "image/png", data="AAAA")])])
    ]


def test_reasoning_is_read_from_content_then_summary_then_the_seal() -> None:
    packed = base64.urlsafe_b64encode(zlib.compress("sealed ✓".encode())).decode()
    seal = ids.make_seal(EXCHANGE, 0)
    item: dict[str, Any] = {"type": "reasoning", "encrypted_content": f"{seal}.{packed}", "summary": []}
    assert read(item) == [Message("assistant", [Reasoning("sealed ✓", seal)])]
    item["summary"] = [{"type": "summary_text", "text": "one"}, {"type": "summary_text", "text": "two"}]
    assert read(item) == [Message("assistant", [Reasoning("one\n\ntwo", seal)])]
    item["content"] = [{"type": "reasoning_text", "text": "all "}, {"type": "reasoning_text", "text": "of it"}]
    assert read(item) == [Message("assistant", [Reasoning("all of it", seal)])]
    item["encrypted_content"] = "gAAAA-foreign"
    assert read(item) == [Message("assistant", [Reasoning("all of it", "gAAAA-foreign")])]


@pytest.mark.parametrize("packed", ["AAAA", "====", "x", "eJw"])
def test_a_damaged_seal_is_an_error_only_where_its_text_is_needed(packed: str) -> None:
    item: dict[str, Any] = {"type": "reasoning", "encrypted_content": f"{ids.make_seal(EXCHANGE, 0)}.{packed}"}
    assert refused_item(item).kind == "invalid_request"
    item["summary"] = [{"type": "summary_text", "text": "visible"}]
    assert read(item) == [Message("assistant", [Reasoning("visible", ids.make_seal(EXCHANGE, 0))])]


def test_a_seal_does_not_unpack_without_end() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(bytes(17 * 1024 * 1024))).decode()
    assert "too long" in refused_item({"type": "reasoning", "encrypted_content": f"polar.{EXCHANGE}.0.{bomb}"}).message


def test_tools_that_come_in_items() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    items = [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [
                {"type": "custom", "name": "exec", "description": "Runs code.", "format": lark},
                {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "exec"}]},
            ],
        },
        {"role": "user", "content": "go"},
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [{"type": "custom", "name": "exec", "description": "Runs more."}, {"type": "web_search"}],
        },
    ]
    request = decode({"model": "m", "input": items})
    assert request.messages == [Message("user", [Text("go")])]
    assert request.tools == [
        Tool("exec", "Runs more.", kind="custom"),
        Tool("exec", namespace="mcp"),
        Tool("web_search", kind="hosted"),
    ]
    assert decode({"model": "m", "input": items[:2]}).tools[0].grammar == Raw(json.dumps(lark).encode())


def test_a_namespaces_description_is_said_once() -> None:
    inner = [{"type": "function", "name": "a", "description": "A."}, {"type": "function", "name": "b"}]
    tool = {"type": "namespace", "name": "n", "description": "All letters.", "tools": inner}
    request = ask(tools=[tool])
    assert [tool.description for tool in request.tools] == ["All letters.\n\nA.", ""]
    assert again(request).tools == request.tools


def test_a_tool_search_run_by_the_harness() -> None:
    found = [{"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]}]
    items = [
        {"role": "user", "content": "go"},
        {
            "type": "tool_search_call",
            "call_id": "c",
            "execution": "client",
            "arguments": {"query": "mail", "limit": 1},
        },
        {
            "type": "tool_search_output",
            "call_id": "c",
            "status": "completed",
            "execution": "client",
            "tools": found,
        },
    ]
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    search = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": parameters}
    request = decode({"model": "m", "input": items, "tools": [search]})
    assert request.tools == [
        Tool("tool_search", "Finds.", Raw(json.dumps(parameters).encode())),
        Tool("send", namespace="mail"),
    ]
    assert request.messages[1:] == [
        Message("assistant", [ToolCall("c", "tool_search", '{"query": "mail", "limit": 1}')]),
        Message("tool", [ToolResult("c", [Text(json.dumps(found))])]),
    ]
    assert ask(tools=[{"type": "tool_search"}]).tools == [Tool("tool_search", kind="hosted")]


def test_other_calls_that_a_harness_runs_stay_visible() -> None:
    action = {"type": "exec", "command": ["ls"]}
    assert read(
        {"type": "local_shell_call", "id": "lsh", "call_id": "c", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "b"}]},
        {"type": "apply_patch_call", "call_id": "e", "operation": {"type": "delete_file", "path": "b"}},
        {"type": "apply_patch_call_output", "call_id": "e", "status": "completed", "output": "Done"},
    ) == [
        Message("assistant", [ToolCall("c", "local_shell", json.dumps(action))]),
        Message("tool", [ToolResult("c", [Text("a.txt")])]),
        Message("assistant", [ToolCall("d", "shell", '{"commands": ["ls"]}')]),
        Message("tool", [ToolResult("d", [Text('[{"stdout": "b"}]')])]),
        Message("assistant", [ToolCall("e", "apply_patch", '{"type": "delete_file", "path": "b"}')]),
        Message("tool", [ToolResult("e", [Text("Done")])]),
    ]


def test_messages_between_the_agents_of_codex() -> None:
    content = [
        {"type": "input_text", "text": "Payload:\n"},
        {"type": "encrypted_content", "encrypted_content": "look at the tests"},
    ]
    item = {"type": "agent_message", "author": "/lead", "recipient": "/lead/worker", "content": content}
    assert read(item) == [Message("user", [Text("Payload:\n"), Text("look at the tests")])]


def test_a_configuration_update_has_the_last_word() -> None:
    update = {
        "type": "configuration_update",
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_object"}},
    }
    request = decode(
        {"model": "m", "input": [{"role": "user", "content": "x"}, update], "reasoning": {"effort": "low"}}
    )
    assert request.thinking == Thinking(enabled=True, effort="high")
    assert request.response_format == ResponseFormat("json_object")


@pytest.mark.parametrize(
    ("item", "kind", "says"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "unsupported", "send the item itself"),
        ({"id": "msg_1"}, "unsupported", "send the item itself"),
        ({"type": "compaction", "encrypted_content": "gAAA"}, "unsupported", "compact by itself"),
        ({"type": "compaction_trigger"}, "unsupported", "compact by itself"),
        ({"type": "web_search_call", "id": "ws_1", "action": {}}, "unsupported", "web_search_call"),
        ({"type": "never_heard_of"}, "unsupported", "never_heard_of"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "invalid_request", "call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "invalid_request", "arguments"),
        ({"type": "function_call_output", "output": "x"}, "invalid_request", "call_id"),
        ({"role": "robot", "content": "x"}, "invalid_request", "role"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "invalid_request", "hologram"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "invalid_request", "missing"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "invalid_request", "missing"),
        ({"role": "user", "content": 7}, "invalid_request", "content"),
        ("text", "invalid_request", "object"),
    ],
)
def test_what_an_item_may_not_be(item: Any, kind: ApiErrorKind, says: str) -> None:
    error = refused_item(item)
    assert error.kind == kind
    assert says in error.message


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("truncation", "auto"),
        ("prompt", {"id": "pmpt_1"}),
        ("context_management", [{"type": "compaction"}]),
        ("generate", False),
        ("n", 2),
        ("reasoning.mode", "pro"),
        ("prompt_cache_options.prewarm", True),
        ("tool_choice", {"type": "web_search_preview"}),
        ("tool_choice", {"type": "mcp", "server_label": "x"}),
    ],
)
def test_what_would_change_the_sampling_is_refused(field: str, value: Any) -> None:
    outer, _, inner = field.partition(".")
    error = refused(**{outer: {inner: value} if inner else value})
    assert error.kind == "unsupported"
    assert error.param == field


def test_a_stored_conversation_says_what_to_do() -> None:
    assert "send the whole `input`" in refused(previous_response_id="resp_1").message
    assert "send the whole `input`" in refused(conversation="conv_1").message


def test_what_changes_nothing_is_accepted() -> None:
    neutral = {
        "previous_response_id": None,
        "conversation": None,
        "background": False,
        "truncation": "disabled",
        "prompt": None,
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
        "safety_identifier": "s",
        "user": "u",
        "client_metadata": {"x": "y"},
        "max_tool_calls": 3,
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto", "context": "all_turns"},
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content"],
        "moderation": {"model": "omni"},
        "unheard_of": [1],
        "temperature": None,
        "tools": None,
        "tool_choice": None,
    }
    assert without_echo(ask(**neutral)) == without_echo(ask())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("temperature", "hot"),
        ("max_output_tokens", 0),
        ("max_output_tokens", 1.5),
        ("tools", {}),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "required", "tools": []}),
        ("text", {"format": {"type": "yaml"}}),
        ("stream", "yes"),
        ("input", 5),
        ("instructions", ["a"]),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.kind == "invalid_request"
    assert error.param == field


def test_what_is_missing_is_named() -> None:
    for body, param in (({"input": "x"}, "model"), ({"model": "m"}, "input"), ({"model": "m", "input": []}, "input")):
        with pytest.raises(ApiError) as caught:
            decode(body)
        assert caught.value.param == param
    error = refused(tools=[{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}])
    assert error.param == "tools[0].tools[0].name"


def test_sampling_thinking_and_format() -> None:
    schema = {"type": "object"}
    request = ask(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        top_logprobs=3,
        reasoning={"effort": "medium", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "out", "schema": schema, "strict": True}},
        parallel_tool_calls=False,
        top_k=20,
        seed=7,
        stop="END",
    )
    assert request.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=100, top_k=20, seed=7, stop=["END"]
    )
    assert request.thinking == Thinking(enabled=True, effort="medium")
    assert request.response_format == ResponseFormat("json_schema", Raw(b'{"type": "object"}'), "out", True)
    assert request.parallel_tool_calls is False
    assert request.logprobs == 3
    assert without_echo(again(request)) == without_echo(request)
    assert ask(include=["message.output_text.logprobs"]).logprobs == 0
    assert ask(reasoning={"effort": "none"}).thinking == Thinking(enabled=False, effort="none")


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ToolChoice("named", ["f"])),
        ({"type": "custom", "name": "g"}, ToolChoice("named", ["g"])),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]},
            ToolChoice("auto", ["f"]),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}],
            },
            ToolChoice("named", ["f", "g"]),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ToolChoice("none")),
    ],
)
def test_tool_choices(wire: Any, choice: ToolChoice) -> None:
    tools = [{"type": "function", "name": "f", "strict": True}, {"type": "custom", "name": "g"}]
    request = ask(tools=tools, tool_choice=wire)
    assert request.tool_choice == choice
    assert without_echo(again(request)) == without_echo(request)


def test_a_request_of_another_dialect_can_be_sent_on() -> None:
    request = Request(
        "m",
        [
            Message("system", [Text("be brief")]),
            Message("user", [Text("a"), Text("b")]),
            Message("assistant", [Text("c"), ToolCall("t1", "f", "{}"), ToolCall("t2", "g", "in", "custom")]),
            Message("tool", [ToolResult("t1", [Text("1")], is_error=True, name="f")]),
            Message("tool", [ToolResult("t2", [])]),
            Message("assistant", []),
        ],
        tools=[Tool("f"), Tool("g", kind="custom"), Tool("h", namespace="n"), Tool("i", namespace="n")],
    )
    sent = json.loads(responses.encode_request(request))
    assert [item["type"] for item in sent["input"]] == [
        "message",
        "message",
        "message",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
        "message",
    ]
    assert [tool["type"] for tool in sent["tools"]] == ["function", "custom", "namespace"]
    assert sent["tools"][0]["strict"] is None  # left out, it would mean true
    request.messages[3].parts = [ToolResult("t1", [Text("1")], name="f")]  # there is no word for an error here
    assert without_echo(again(request)) == request
    assert again(Request("m", [], prompt="once")).messages == [Message("user", [Text("once")])]
    with pytest.raises(ApiError):
        responses.encode_request(Request("m", [], prompt=[1, 2]))


# Replies

CALL: list[ReplyEvent] = [
    ToolCallStart(f"{EXCHANGE}_0", "bash"),
    ToolCallDelta('{"cmd": '),
    ToolCallDelta('"echo é \\n"}'),
]
TURNS: dict[str, tuple[list[ReplyEvent], FinishReason]] = {
    "text": ([TextDelta("Hel"), TextDelta("lo"), TextDelta("\n\n data: x\n")], "stop"),
    "reasoning": ([ReasoningDelta("I "), ReasoningDelta("think\n"), TextDelta("so")], "stop"),
    "call": (CALL, "tool_calls"),
    "parallel": (
        [
            ReasoningDelta("both"),
            TextDelta(" \n"),
            *CALL,
            ToolCallStart(f"{EXCHANGE}_1", "spawn", namespace="agents"),
            ToolCallDelta("{}"),
        ],
        "tool_calls",
    ),
    "custom": (
        [
            TextDelta("patch"),
            ToolCallStart(f"{EXCHANGE}_0", "apply_patch", "custom"),
            ToolCallDelta("*** Begin\n"),
            ToolCallDelta("+é"),
        ],
        "tool_calls",
    ),
    "search": (
        [ToolCallStart(f"{EXCHANGE}_0", "tool_search"), ToolCallDelta('{ "query":'), ToolCallDelta(' "mail"}')],
        "tool_calls",
    ),
    "bad search": ([ToolCallStart(f"{EXCHANGE}_0", "tool_search"), ToolCallDelta('{"query": ')], "tool_calls"),
    "no arguments": (
        [ToolCallStart(f"{EXCHANGE}_0", "now"), ToolCallStart(f"{EXCHANGE}_1", "tool_search")],
        "tool_calls",
    ),
    "text after calls": ([ReasoningDelta("a"), *CALL, ReasoningDelta("b"), TextDelta("done")], "stop"),
    "empty": ([], "stop"),
    "empty deltas": ([ReasoningDelta(""), TextDelta(""), TextDelta("x"), TextDelta("")], "stop"),
    "unicode": ([ReasoningDelta("𝕏"), TextDelta("日本"), TextDelta("語 \u2028\x00 \U0001f600")], "stop"),
    "length": ([ReasoningDelta("a"), TextDelta("and then")], "length"),
    "length in a call": ([TextDelta("a"), *CALL[:2]], "length"),
    "length before anything": ([], "length"),
    "filtered": ([TextDelta("Well")], "content_filter"),
    "aborted": ([TextDelta("We")], "abort"),
}
SEARCHING = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {}}
ASKED = {
    "instructions": "be brief",
    "tools": [{"type": "function", "name": "bash", "parameters": {}}, SEARCHING],
    "metadata": {"a": "b"},
    "temperature": 0.5,
    "stream": True,
}


def turn(name: str, request: Request) -> tuple[list[ReplyEvent], Reply]:
    events, finish = TURNS[name]
    said = [part for part in parts(events) if not isinstance(part, Text | Reasoning) or part.text]
    usage = Usage(prompt=10, completion=5, cached=4, reasoning=2)
    return events, Reply(EXCHANGE, request.model, 1700000000, said, finish, usage=usage)


def read_whole(request: Request, reply: Reply) -> Response:
    return whole(responses.encode_reply(request, reply)).responses.create(model="m", input="x")


def streamed(request: Request, name: str, size: int) -> list[Any]:
    events, reply = turn(name, request)
    body = written(responses.create_stream_encoder(request, EXCHANGE, 1700000000), events, reply)
    with streaming(body, size).responses.create(model="m", input="x", stream=True) as stream:
        return list(stream)


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("name", TURNS)
def test_a_stream_ends_in_the_whole_reply(name: str, size: int) -> None:
    request = ask(**ASKED)
    _, reply = turn(name, request)
    events = streamed(request, name, size)
    assert events[-1].response.to_dict() == read_whole(request, reply).to_dict()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]


@pytest.mark.parametrize("name", [name for name, (_, finish) in TURNS.items() if finish in ("stop", "tool_calls")])
def test_the_clients_own_accumulation_agrees(name: str) -> None:
    request = ask(**ASKED)
    events, reply = turn(name, request)
    body = written(responses.create_stream_encoder(request, EXCHANGE, 1700000000), events, reply)
    with streaming(body, 50).responses.stream(model="m", input="x") as stream:
        final = stream.get_final_response()
    expected = read_whole(request, reply)
    assert final.output_text == expected.output_text
    assert [item.type for item in final.output] == [item.type for item in expected.output]
    assert final.usage == expected.usage


@pytest.mark.parametrize("name", TURNS)
def test_deltas_add_up_to_the_items(name: str) -> None:
    """What a client shows while it streams is what it has in the end, event by event."""
    request = ask(**ASKED)
    deltas: dict[str, str] = {}
    dones: dict[str, str] = {}
    added: list[tuple[int, str]] = []
    finished: list[Any] = []
    for event in streamed(request, name, 1000):
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        elif event.type in (
            "response.output_text.done",
            "response.reasoning_summary_text.done",
            "response.function_call_arguments.done",
            "response.custom_tool_call_input.done",
        ):
            said = (getattr(event, field, None) for field in ("text", "arguments", "input"))
            dones[event.item_id] = next(text for text in said if text is not None)
        elif event.type == "response.output_item.added":
            assert len(added) == len(finished)  # one item at a time
            added.append((event.output_index, event.item.id))
        elif event.type == "response.output_item.done":
            finished.append(event.item)
            assert (event.output_index, event.item.id) == added[-1]
    assert {item_id: text for item_id, text in dones.items() if text} == deltas
    assert [index for index, _ in added] == list(range(len(added)))
    _, reply = turn(name, request)
    assert [item.to_dict() for item in finished] == [item.to_dict() for item in read_whole(request, reply).output]


def test_the_events_are_those_that_codex_was_seen_to_read() -> None:
    record = captures.load("codex_gpt55")[1]
    seen = events_of(record["resp_sse"])
    answer = responses.decode_reply(json.dumps(seen[-1]["response"]).encode())
    encoder = responses.create_stream_encoder(decode(record["body"]), EXCHANGE, 0)
    sent = encoder.start(None)
    for part in answer.parts:
        match part:
            case Reasoning():
                sent += encoder.feed(ReasoningDelta(part.text))
            case Text():
                sent += encoder.feed(TextDelta(part.text))
            case ToolCall():
                sent += encoder.feed(ToolCallStart(part.id, part.name, part.kind)) + encoder.feed(
                    ToolCallDelta(part.arguments)
                )
    ours = events_of(sent + encoder.finish(answer))
    assert {part.kind for part in answer.parts if isinstance(part, ToolCall)} == {"custom"}

    def once(events: list[dict[str, Any]]) -> list[str]:
        return [kind for kind, _ in groupby(event["type"] for event in events)]

    assert once(ours) == once(seen)
    fields = {event["type"]: set(event) for event in seen}
    for event in ours:
        assert set(event) >= fields[event["type"]]
        for inner in ("item", "part"):
            theirs = [other[inner] for other in seen if inner in other and other["type"] == event["type"]]
            for other in theirs:
                if other["type"] == event[inner]["type"]:
                    assert set(event[inner]) >= set(other)


def test_every_event_is_one_line_of_the_event_it_names() -> None:
    request = responses.decode_request(
        responses.split(json.dumps({"model": "m", "input": "x", **ASKED}, indent=1).encode()), {}
    )
    events, reply = turn("parallel", request)
    body = written(responses.create_stream_encoder(request, EXCHANGE, 0), events, reply).decode()
    for block in body.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert events_of(body)[-1]["response"]["tools"] == ASKED["tools"]


def test_ids_and_seals_carry_the_exchange() -> None:
    request = ask(**ASKED)
    for name in TURNS:
        _, reply = turn(name, request)
        response = json.loads(responses.encode_reply(request, reply))
        issued = [response["id"]]
        for item in response["output"]:
            issued += [item[field] for field in ("id", "call_id", "encrypted_content") if field in item]
        assert {ids.find_exchange_id(one) for one in issued} == {EXCHANGE}
        assert len(set(issued)) == len(issued)


@pytest.mark.parametrize("drops_text", [False, True])
@pytest.mark.parametrize("name", TURNS)
def test_an_echoed_turn_says_what_was_said(name: str, drops_text: bool) -> None:
    """Items come back as codex and the SDKs send them, also without the visible reasoning."""
    request = ask(**ASKED)
    _, reply = turn(name, request)
    output = json.loads(responses.encode_reply(request, reply))["output"]
    for item in output:
        if item["type"] == "reasoning" and drops_text:
            item["summary"] = []
    thoughts = 0
    for part in reply.parts:
        if isinstance(part, ToolCall):
            part.id = "call_" + part.id
            if name == "search":
                part.arguments = '{"query": "mail"}'  # an object on the wire: spelled as whoever writes it does
            elif part.name == "tool_search":
                part.arguments = part.arguments or "{}"
        elif isinstance(part, Reasoning):
            part.seal = ids.make_seal(EXCHANGE, thoughts)
            thoughts += 1
    expected = [Message("assistant", reply.parts)] if reply.parts else []
    assert read({"role": "user", "content": "x"}, *output)[1:] == expected


def test_a_search_of_the_harness_is_its_own_item_only_where_it_was_declared() -> None:
    request, plain = ask(**ASKED), ask(tools=[{"type": "function", "name": "tool_search"}])
    _, reply = turn("search", request)
    (item,) = json.loads(responses.encode_reply(request, reply))["output"]
    assert item == {
        "type": "tool_search_call",
        "id": f"tsc_{EXCHANGE}_0",
        "call_id": f"call_{EXCHANGE}_0",
        "arguments": {"query": "mail"},
        "status": "completed",
        "execution": "client",
    }
    (item,) = json.loads(responses.encode_reply(plain, reply))["output"]
    assert (item["type"], item["name"]) == ("function_call", "tool_search")
    _, reply = turn("bad search", request)
    (item,) = json.loads(responses.encode_reply(request, reply))["output"]
    assert item["arguments"] == '{"query": '  # codex tells the model that it can't be parsed


def test_hidden_reasoning_stays_sealed() -> None:
    request = ask()
    request.thinking.visible = False
    events, reply = turn("reasoning", request)
    body = responses.encode_reply(request, reply)
    stream = written(responses.create_stream_encoder(request, EXCHANGE, 1700000000), events, reply)
    for sent in (body, stream):
        assert b"think" not in sent
        assert b"summary_" not in sent
    assert events_of(stream)[-1]["response"] == json.loads(body)
    assert read(*json.loads(body)["output"])[0].parts[0] == Reasoning("I think\n", ids.make_seal(EXCHANGE, 0))


def test_the_reply_repeats_the_request() -> None:
    asked = {**ASKED, "reasoning": {"effort": "low"}, "user": "u", "max_output_tokens": 9, "truncation": "disabled"}
    request = ask(**asked)
    events, reply = turn("text", request)
    response = json.loads(responses.encode_reply(request, reply))
    assert {name: response[name] for name in asked if name in ECHO_DEFAULTS} == {
        name: value for name, value in asked.items() if name in ECHO_DEFAULTS
    }
    assert response["top_p"] == 1.0
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }
    created, going, *_ = events_of(written(responses.create_stream_encoder(request, EXCHANGE, 0), events, reply))
    for event in (created, going):
        assert (event["response"]["tools"], event["response"]["instructions"]) == ([], None)
        assert event["response"]["metadata"] == {"a": "b"}


def test_the_opening_events_stay_small() -> None:
    request = decode(bodies("codex")[0])
    assert len(responses.create_stream_encoder(request, EXCHANGE, 0).start(None)) < 4096


@pytest.mark.parametrize(
    ("name", "status", "reason", "last"),
    [
        ("text", "completed", None, "completed"),
        ("length", "incomplete", "max_output_tokens", "incomplete"),
        ("filtered", "incomplete", "content_filter", "incomplete"),
        ("aborted", "failed", None, "incomplete"),
    ],
)
def test_how_a_reply_ends(name: str, status: str, reason: str | None, last: str) -> None:
    request = ask()
    final = streamed(request, name, 1000)[-1]
    assert final.type == f"response.{status}"
    assert final.response.status == status
    assert (final.response.incomplete_details and final.response.incomplete_details.reason) == reason
    assert (final.response.error is not None) == (status == "failed")
    assert final.response.output[-1].status == last


def test_logprobs_go_to_a_harness_that_asked() -> None:
    tokens = [TokenLogprob("so", -0.5, [115, 111], [TokenLogprob("no", float("-inf"))])]
    request = ask(top_logprobs=1)
    events, reply = turn("reasoning", request)
    reply.logprobs = tokens
    response = json.loads(responses.encode_reply(request, reply))
    (text,) = response["output"][1]["content"]
    assert [(one["token"], one["logprob"]) for one in text["logprobs"]] == [("so", -0.5)]
    assert text["logprobs"][0]["top_logprobs"][0]["logprob"] == -9999.0
    stream = written(responses.create_stream_encoder(request, EXCHANGE, 1700000000), events, reply)
    assert events_of(stream)[-1]["response"] == response
    decoded = responses.decode_reply(responses.encode_reply(request, reply)).logprobs
    assert decoded is not None
    assert decoded[0].token == "so"
    assert b'"logprobs":[{' not in responses.encode_reply(ask(), reply)


@pytest.mark.parametrize("name", [name for name in TURNS if name not in ("aborted", "search", "no arguments")])
def test_a_reply_is_the_same_after_decoding(name: str) -> None:
    request = ask(**ASKED)
    _, reply = turn(name, request)
    decoded = responses.decode_reply(responses.encode_reply(request, reply))
    for index, part in enumerate(part for part in reply.parts if isinstance(part, Reasoning)):
        part.seal = ids.make_seal(EXCHANGE, index)
    if name == "text after calls":  # how a turn with calls ended is not on the wire
        reply.finish_reason = "tool_calls"
    assert decoded == reply


def test_a_provider_that_fails() -> None:
    def answer(**fields: Any) -> bytes:
        return json.dumps({"id": "resp_1", "output": [], **fields}).encode()

    error = {"code": "context_length_exceeded", "message": "too long"}
    with pytest.raises(EngineError) as caught:
        responses.decode_reply(answer(status="failed", error=error))
    assert caught.value.kind == "context_length"
    for body in (b"", b"[]", b'{"id": 1}', answer(status="queued"), answer(output=[{"type": "mcp_call"}])):
        with pytest.raises(EngineError):
            responses.decode_reply(body)


# Errors

RAISED: dict[ApiErrorKind, type[openai.APIStatusError]] = {
    "invalid_request": openai.BadRequestError,
    "unsupported": openai.BadRequestError,
    "context_length": openai.BadRequestError,
    "too_large": openai.APIStatusError,
    "authentication": openai.AuthenticationError,
    "not_found": openai.NotFoundError,
    "rate_limit": openai.RateLimitError,
    "overloaded": openai.InternalServerError,
    "engine": openai.InternalServerError,
    "timeout": openai.InternalServerError,
    "internal": openai.InternalServerError,
}


@pytest.mark.parametrize("kind", RAISED)
def test_the_client_raises_what_it_raises_for_openai(kind: ApiErrorKind) -> None:
    error = responses.encode_error(ApiError(kind, "Because.", param="input", retry_after=2.5))
    with pytest.raises(RAISED[kind]) as caught:
        failing(error).responses.create(model="m", input="x")
    assert caught.value.status_code == HTTP_STATUS[kind]
    assert "Because." in caught.value.message
    assert caught.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("context_length", "context_length_exceeded"),
        ("rate_limit", "rate_limit_exceeded"),
        ("invalid_request", "invalid_prompt"),
        ("overloaded", "server_error"),
        ("engine", "server_error"),
        ("timeout", "server_error"),
        ("internal", "server_error"),
    ],
)
def test_an_error_midway(kind: ApiErrorKind, code: str) -> None:
    encoder = responses.create_stream_encoder(ask(), EXCHANGE, 0)
    body = (
        encoder.start(None)
        + encoder.feed(ReasoningDelta("hm"))
        + encoder.feed(TextDelta("half of"))
        + encoder.keep_alive()
    )
    body += encoder.error(ApiError(kind, "It broke.", retry_after=1.5))
    with streaming(body, 9).responses.create(model="m", input="x", stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1]
    assert final.type == "response.failed"
    assert final.response.status == "failed"
    assert final.response.error is not None
    assert final.response.error.code == code
    assert final.response.error.message.startswith("It broke.")
    assert ("try again in 1.5s" in final.response.error.message) == (kind == "rate_limit")
    # Only what was finished counts: a harness keeps items that are done.
    assert [item.type for item in final.response.output] == ["reasoning"]
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == ["reasoning"]


def test_an_error_before_anything_was_said() -> None:
    encoder = responses.create_stream_encoder(ask(), EXCHANGE, 0)
    (event,) = events_of(encoder.error(ApiError("engine", "It broke.")))
    assert (event["type"], event["sequence_number"]) == ("response.failed", 0)


# The rest of the surface


def test_models_and_counts() -> None:
    client = whole(responses.encode_models(["a", "b"], None))
    assert [model.id for model in client.models.list()] == ["a", "b"]
    assert whole(responses.encode_models(["a"], "b")).models.retrieve("b").id == "b"
    assert json.loads(responses.encode_count(7)) == {"object": "response.input_tokens", "input_tokens": 7}


def test_routes() -> None:
    found = {
        path: [route.operation for route in responses.routes if route.path.fullmatch(path)]
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/resp_1", "/v1/models")
    }
    assert [*found.values()] == [["generate"], ["count_tokens"], [], []]
    assert responses.recognizes("/v1/responses/resp_1", {})
    assert not responses.recognizes("/v1/messages", {})


# Whatever comes in

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    sorted(
        {*_ITEM_READERS, *FunctionCallIn.__struct_fields__, *PartIn.__struct_fields__, *ToolIn.__struct_fields__}
        | {*ObjectCallIn.__struct_fields__, *ReasoningIn.__struct_fields__}
        | {"role", "input", "output", "input_text", "output_text", "input_image", "input_file", "input_audio"}
        | {"user", "assistant", "system", "developer", "function", "custom", "tool_search", "client", "namespace"}
        | {"allowed_tools", "auto", "required", "effort", "json_schema", "none"}
    )
)
LIKELY = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | WORDS | st.just(ids.make_seal(EXCHANGE, 0) + ".eJw"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=6),
    max_leaves=20,
)


def accepted(body: Any) -> Request | None:
    """A request, or an error that a harness can be told: nothing else may happen."""
    try:
        return responses.decode_request(responses.split(json.dumps(body).encode()), {})
    except ApiError:
        return None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model": "m", "input": [',
        b'{"model": "m", "input": "\xff"}',
        b'{"model": "m", "input": [{"type": "shell_call", "call_id": "c", "action": {"a": "\xff"}}]}',
        b'{"model": "m", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "input": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_json_is_an_error(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        responses.decode_request(responses.split(body), {})
    assert caught.value.kind == "invalid_request"


@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(["model", "input", "tools"]), JSON, max_size=5) | JSON)
def test_any_json_is_a_request_or_an_error(body: Any) -> None:
    accepted(body)


@settings(max_examples=60)
@given(
    st.lists(LIKELY, max_size=4),
    st.dictionaries(st.sampled_from([*ECHO_DEFAULTS, "input", "include"]), LIKELY, max_size=3),
)
def test_any_items_are_a_request_or_an_error(items: list[Any], fields: dict[str, Any]) -> None:
    accepted({"model": "m", "input": items, **fields})


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_capture_with_anything_in_it_is_a_request_or_an_error(data: st.DataObject) -> None:
    """What is accepted can be sent on, and means the same then."""
    body = copy.deepcopy(data.draw(st.sampled_from([bodies(name)[-1] for name in CAPTURES if name != "codex_sub"])))
    place: Any = body
    while True:
        key = data.draw(st.sampled_from([*(place if isinstance(place, dict) else range(len(place)))]))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = data.draw(LIKELY | JSON)
    request = accepted(body)
    if request is not None:
        assert without_echo(again(request)) == without_echo(request)
