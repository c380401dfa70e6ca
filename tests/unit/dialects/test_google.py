"""The Google dialect, against recorded harnesses and the official client."""

import base64
import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
from google import genai
from google.genai import errors, types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar import ids
from polar.dialects.base import Dialect, EncodedError
from polar.dialects.google import Google
from polar.dialects.google import wire as google_wire
from polar.dialects.google.replies import GoogleStreamEncoder
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind
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

GOOGLE: Dialect = Google()
EXCHANGE = "x0123456789abcdefghjkmnpq"
SEAL = ids.make_seal(EXCHANGE, 0)
SIGNATURE = base64.b64encode(SEAL.encode()).decode()
CAPTURES = captures.names_for("/v1beta/")


def decode(body: Any, verb: str = "generateContent", **params: str) -> Request:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return GOOGLE.decode_request(GOOGLE.split(raw), {"model": "m", "verb": verb} | params)


def decode_contents(*contents: Any) -> list[Message]:
    return decode({"contents": list(contents)}).messages


def refusal(body: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        decode(body)
    return raised.value


def again(request: Request) -> Request:
    """The request as it comes back from our own client."""
    verb = "streamGenerateContent" if request.stream else "generateContent"
    alt = {} if request.echo else {"alt": "sse"}
    return decode(GOOGLE.encode_request(request), verb, model=request.model, **alt)


# Recorded harnesses.


def recorded(name: str) -> list[Request]:
    requests = []
    for record in captures.load(name):
        path = record["path"]
        found = next(m for route in GOOGLE.routes if (m := route.path.fullmatch(path)) and route.method == "POST")
        params = found.groupdict() | dict(pair.split("=", 1) for pair in record["query"].split("&"))
        body = json.dumps(record["body"], ensure_ascii=False, separators=(",", ":")).encode()
        requests.append(GOOGLE.decode_request(GOOGLE.split(body), params))
    return requests


def test_the_captures_are_there() -> None:
    assert set(CAPTURES) == {"gemini", "gemini_parallel", "pi_google"}


@pytest.mark.parametrize("name", CAPTURES)
def test_a_recorded_conversation_grows(name: str) -> None:
    requests = recorded(name)
    assert len(requests) == 3
    for earlier, later in pairwise(requests):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert later.tools == earlier.tools
    for request in requests:
        assert request.stream
        assert request.echo == {}
        assert [message.role for message in request.messages[:2]] == ["system", "user"]
        assert all(tool.parameters for tool in request.tools)
        assert request.thinking.visible
        calls = [p for m in request.messages for p in m.parts if isinstance(p, ToolCall)]
        results = [p for m in request.messages for p in m.parts if isinstance(p, ToolResult)]
        assert [result.call_id for result in results] == [call.id for call in calls]
        assert [result.name for result in results] == [call.name for call in calls]
        assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_recorded_request_comes_back_from_our_client(name: str) -> None:
    for request in recorded(name):
        assert again(request) == request


def test_gemini_cli_drops_thoughts_and_keeps_ids() -> None:
    first, _, last = recorded("gemini_parallel")
    assert first.model == "gemini-2.5-pro"
    assert first.sampling == SamplingParams(temperature=1, top_p=0.95, top_k=64)
    assert first.thinking == Thinking(enabled=True, budget=8192)
    assert [message.role for message in last.messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool",
    ]  # fmt: skip
    turn = last.messages[2].parts
    assert turn[0] == Text("\n Let me run the first command.  \n\n")
    assert isinstance(turn[1], ToolCall)
    assert isinstance(turn[2], ToolCall)
    assert turn[1].id == "fc_t0ax48b08480cd"
    assert turn[1].seal == "U0lHLXNpZw=="  # not ours, so it stays as it came
    assert turn[1].arguments.startswith('{"command":"echo turn1-é-ok')


def test_pi_keeps_thoughts_and_drops_ids() -> None:
    last = recorded("pi_google")[-1]
    assert last.thinking == Thinking(enabled=True)
    assert last.sampling.max_tokens == 8192
    turn = last.messages[2].parts
    assert turn[0] == Reasoning("**Plan** I should run a shell command first. \n")
    assert [p.id for m in last.messages for p in m.parts if isinstance(p, ToolCall)] == ["call_0", "call_1"]


# Requests.


def call(name: str, args: Any = None, **more: Any) -> dict[str, Any]:
    signature = {"thoughtSignature": more.pop("signature")} if "signature" in more else {}
    return {"functionCall": {"name": name, "args": args or {}, **more}, **signature}


def result(name: str, response: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **more}}


def test_both_spellings_mean_the_same() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "sys"}]},
        "contents": [
            {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]},
            {"role": "user", "parts": [{"fileData": {"mimeType": "video/mp4", "fileUri": "gs://b/v"}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "c2ln"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "o"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {"maxOutputTokens": 5, "topK": 3, "thinkingConfig": {"includeThoughts": True}},
    }

    def snake(value: Any) -> Any:
        if isinstance(value, list):
            return [snake(item) for item in value]
        if isinstance(value, dict):
            return {"".join("_" + c.lower() if c.isupper() else c for c in k): snake(v) for k, v in value.items()}
        return value

    assert snake(camel) != camel
    request = decode(camel)
    assert decode(snake(camel)) == request
    assert request.messages == [
        Message("system", [Text("sys")]),
        Message("user", [Media("image", "image/png", data="aGk=")]),
        Message("user", [Media("video", "video/mp4", url="gs://b/v")]),
        Message("assistant", [ToolCall("call_0", "f", "{}", seal="c2ln")]),
        Message("tool", [ToolResult("call_0", [Text("o")], name="f")]),
    ]
    assert request.tool_choice == ToolChoice("named", ["f"])
    assert request.sampling == SamplingParams(max_tokens=5, top_k=3)


def test_the_verb_and_alt_decide_on_streaming() -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    assert not decode(body).stream
    assert decode(body, "streamGenerateContent", alt="sse").stream
    events = decode(body, "streamGenerateContent", alt="sse")
    array = decode(body, "streamGenerateContent")
    assert GOOGLE.create_stream_encoder(events, EXCHANGE, 0).content_type == "text/event-stream"
    assert GOOGLE.create_stream_encoder(array, EXCHANGE, 0).content_type == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "operation", "params"),
    [
        ("POST", "/v1beta/models/gemini-2.5-pro:generateContent", "generate", ("gemini-2.5-pro", "generateContent")),
        ("POST", "/v1/models/a/b:streamGenerateContent", "generate", ("a/b", "streamGenerateContent")),
        ("POST", "/v1alpha/models/q:7b:countTokens", "count_tokens", ("q:7b", "countTokens")),
        ("GET", "/v1beta/models", "list_models", ()),
        ("GET", "/v1/models", "list_models", ()),
        ("GET", "/v1beta/models/a/b", "get_model", ("a/b",)),
    ],
)
def test_routes(method: str, path: str, operation: str, params: tuple[str, ...]) -> None:
    matches = [(r, m) for r in GOOGLE.routes if r.method == method and (m := r.path.fullmatch(path))]
    assert [(route.operation, found.groups()) for route, found in matches] == [(operation, params)]
    assert GOOGLE.recognizes(path, {"x-goog-api-key": "k"})


def test_count_tokens_takes_both_forms() -> None:
    plain = {"contents": [{"parts": [{"text": "hi"}]}]}
    wrapped = {"generateContentRequest": plain | {"model": "models/m", "systemInstruction": "be kind"}}
    assert decode(plain, "countTokens").messages == [Message("user", [Text("hi")])]
    assert decode(wrapped, "countTokens").messages == [
        Message("system", [Text("be kind")]),
        Message("user", [Text("hi")]),
    ]


def test_results_find_their_calls_without_ids() -> None:
    messages = decode_contents(
        {"role": "model", "parts": [call("a"), call("b"), call("a", {"n": 2})]},
        {"role": "user", "parts": [result("b", {"output": "b"}), result("a", {"output": "a1"})]},
        {"role": "function", "parts": [result("a", {"output": "a2"}), {"text": "go on"}]},
        {"role": "model", "parts": [call("a")]},
        {"role": "user", "parts": [result("renamed", {"output": "a3"})]},
        {"role": "user", "parts": [result("a", {"output": "nobody asked"})]},
    )
    results = [p for m in messages for p in m.parts if isinstance(p, ToolResult)]
    assert [r.call_id for r in results] == ["call_1", "call_0", "call_2", "call_3", "result_4"]
    assert [m.role for m in messages] == [
        "assistant", "tool", "tool", "tool", "user", "assistant", "tool", "tool",
    ]  # fmt: skip


def test_ids_are_kept_where_they_are_given() -> None:
    messages = decode_contents(
        {"role": "model", "parts": [call("a", id="one"), call("a", id="two"), call("c")]},
        {"parts": [result("a", {"output": ""}, id="two"), result("a", {"output": ""}), result("c", {}, id="three")]},
    )
    assert [p.call_id for m in messages for p in m.parts if isinstance(p, ToolResult)] == [
        "two",
        "one",
        "call_0"[:-1] + "2",
    ]


def test_a_signature_brings_back_the_ids_that_a_harness_dropped() -> None:
    (turn,) = decode_contents({"role": "model", "parts": [call("a", signature=SIGNATURE), call("b")]})
    assert turn.parts == [
        ToolCall("call_" + ids.make_call_id(EXCHANGE, 0), "a", "{}", seal=SEAL),
        ToolCall("call_" + ids.make_call_id(EXCHANGE, 1), "b", "{}"),
    ]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"text": "a", "thoughtSignature": SIGNATURE}], [Reasoning("", SEAL), Text("a")]),
        (
            [{"text": "t", "thought": True}, {"text": "a"}, {"text": "b", "thoughtSignature": SIGNATURE}],
            [Reasoning("t", SEAL), Text("ab")],
        ),
        ([{"text": "a"}, {"text": "", "thoughtSignature": SIGNATURE}], [Reasoning("", SEAL), Text("a")]),
        ([{"thoughtSignature": "b3RoZXI="}], [Reasoning("", "b3RoZXI=")]),
        ([{"text": "t", "thought": True, "thoughtSignature": SIGNATURE}], [Reasoning("t", SEAL)]),
        ([{"text": "t", "thought": True}, {"text": "h", "thought": True}], [Reasoning("th")]),
        ([{"text": ""}], []),
        ([], []),
    ],
)
def test_a_model_turn_is_put_together_from_its_pieces(parts: list[Any], expected: list[Part]) -> None:
    assert decode_contents({"role": "model", "parts": parts}) == [Message("assistant", expected)]
    one_each = [{"role": "model", "parts": [part]} for part in parts] or [{"role": "model"}]
    assert decode_contents(*one_each) == [Message("assistant", expected)]


@pytest.mark.parametrize(
    ("response", "text", "is_error"),
    [
        ({"output": "o\n"}, "o\n", False),
        ({"result": "r"}, "r", False),
        ({"error": "e"}, "e", True),
        ({"error": {"code": 1}}, '{"error": {"code": 1}}', True),
        ({"output": 5}, '{"output": 5}', False),
        ({"output": "o", "code": 1.50}, '{"output": "o", "code": 1.5}', False),
        ({}, "{}", False),
        (None, "", False),
    ],
)
def test_a_result_is_its_text_or_its_json(response: Any, text: str, is_error: bool) -> None:
    request = decode({"contents": [{"parts": [result("f", response, id="i")]}]})
    assert request.messages == [Message("tool", [ToolResult("i", [Text(text)], is_error, "f")])]
    assert again(request) == request


def test_results_carry_media() -> None:
    blob = {"inlineData": {"mimeType": "image/png", "data": "-_-_", "displayName": "shot"}}
    request = decode({"contents": [{"parts": [result("f", {"output": "see"}, id="i", parts=[blob])]}]})
    media = Media("image", "image/png", data="+/+/", name="shot")
    assert request.messages[0].parts == [ToolResult("i", [Text("see"), media], name="f")]
    assert again(request) == request


def test_other_parts() -> None:
    request = decode(
        {
            "contents": [
                {"parts": [{"fileData": {"mimeType": "application/pdf", "fileUri": "files/abc"}}]},
                {
                    "parts": [
                        {
                            "inlineData": {"mimeType": "audio/wav", "data": "AAAA"},
                            "mediaResolution": {"level": "MEDIA_RESOLUTION_LOW"},
                        }
                    ]
                },
                {
                    "role": "model",
                    "parts": [
                        {"executableCode": {"language": "PYTHON", "code": "1+1"}},
                        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2"}},
                    ],
                },
            ]
        }
    )
    assert request.messages == [
        Message("user", [Media("file", "application/pdf", file_id="files/abc")]),
        Message("user", [Media("audio", "audio/wav", data="AAAA", detail="low")]),
        Message("assistant", [Text("```python\n1+1\n```\n```\n2\n```\n")]),
    ]
    assert again(request) == request


def test_googles_schemas_become_ordinary_ones() -> None:
    parameters = {
        "type": "OBJECT",
        "propertyOrdering": ["b", "a"],
        "properties": {
            "a": {"type": "STRING", "nullable": True, "enum": ["x"], "maxLength": "7"},
            "b": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1"},
            "type": {"any_of": [{"type": "NUMBER"}, {"type": "TYPE_UNSPECIFIED", "example": 1}]},
        },
        "required": ["a"],
    }
    ordinary = {
        "type": "object",
        "properties": {
            "b": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "a": {"type": ["string", "null"], "enum": ["x", None], "maxLength": 7},
            "type": {"anyOf": [{"type": "number"}, {"examples": [1]}]},
        },
        "required": ["a"],
    }
    raw = b'{"type": "object",  "properties":{}}'
    tools = decode(
        b'{"contents":[{"parts":[{"text":"hi"}]}],"tools":[{"functionDeclarations":['
        b'{"name":"f","description":"d","parameters":' + json.dumps(parameters).encode() + b"},"
        b'{"name":"g","parameters":' + raw + b'},{"name":"h"}]},{"googleSearch":{}},{"code_execution":{}}]}'
    ).tools
    assert [tool.name for tool in tools] == ["f", "g", "h", "googleSearch", "codeExecution"]
    assert [tool.kind for tool in tools] == ["function"] * 3 + ["hosted"] * 2
    schema = tools[0].parameters
    assert schema is not None
    assert json.loads(bytes(schema)) == ordinary
    assert list(json.loads(bytes(schema))["properties"]) == ["b", "a", "type"]
    assert tools[1].parameters == Raw(raw)
    assert tools[2].parameters is None


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({}, ToolChoice()),
        ({"mode": "AUTO"}, ToolChoice()),
        ({"mode": "ANY"}, ToolChoice("required")),
        ({"mode": "any", "allowedFunctionNames": ["f"]}, ToolChoice("named", ["f"])),
        ({"mode": "NONE"}, ToolChoice("none")),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["f"]}, ToolChoice("auto", ["f"])),
    ],
)
def test_tool_choice(config: Any, choice: ToolChoice) -> None:
    request = decode(
        {
            "contents": [{"parts": [{"text": "hi"}]}],
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
            "toolConfig": {"functionCallingConfig": config},
        }
    )
    assert request.tool_choice == choice
    assert request.tools[0].strict is (True if config.get("mode") == "VALIDATED" else None)
    assert again(request) == request


def test_generation_config() -> None:
    request = decode(
        {
            "contents": [{"parts": [{"text": "hi"}]}],
            "safetySettings": [{"category": "X"}],
            "labels": {"a": "b"},
            "generationConfig": {
                "temperature": 0.5,
                "topP": 0.9,
                "topK": 40.0,
                "maxOutputTokens": "100",
                "stopSequences": ["END"],
                "seed": 7,
                "presencePenalty": 0.1,
                "frequencyPenalty": 0.2,
                "candidateCount": 1,
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT"},
                "responseModalities": ["TEXT"],
                "responseLogprobs": True,
                "logprobs": 3,
                "thinkingConfig": {"thinkingLevel": "HIGH"},
                "mediaResolution": "MEDIA_RESOLUTION_LOW",
            },
        }
    )
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        max_tokens=100,
        stop=["END"],
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
    )
    assert request.response_format == ResponseFormat("json_schema", Raw(b'{"type":"object"}'))
    assert request.thinking == Thinking(effort="high", visible=False)
    assert request.logprobs == 3
    assert again(request) == request


@pytest.mark.parametrize(
    ("config", "thinking"),
    [
        (None, Thinking(visible=False)),
        ({"thinkingBudget": 0}, Thinking(enabled=False, visible=False)),
        ({"thinkingBudget": -1, "includeThoughts": True}, Thinking(enabled=True)),
        ({"thinkingBudget": 99}, Thinking(enabled=True, budget=99, visible=False)),
        ({"thinkingLevel": "low", "includeThoughts": True}, Thinking(effort="low")),
    ],
)
def test_thinking(config: Any, thinking: Thinking) -> None:
    request = decode({"contents": [{"parts": []}], "generationConfig": {"thinkingConfig": config}})
    assert request.thinking == thinking
    assert again(request) == request


HI = [{"parts": [{"text": "hi"}]}]


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({}, "invalid_request", "contents"),
        ({"contents": "hi"}, "invalid_request", "contents"),
        ({"contents": [{"role": "system", "parts": []}]}, "invalid_request", "contents[0].role"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "invalid_request", "contents[0]"),
        ({"contents": [{"parts": [{"text": "a"}, {}]}]}, "invalid_request", "contents[0].parts[1]"),
        ({"contents": [{"parts": [call("f")]}]}, "invalid_request", "contents[0].parts[0]"),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": [1]}}]}]},
            "invalid_request",
            "contents[0].parts[0].functionCall.args",
        ),
        (
            {"contents": [{"parts": [result("f", "text")]}]},
            "invalid_request",
            "contents[0].parts[0].functionResponse.response",
        ),
        (
            {"contents": [{"parts": [{"text": "", "videoMetadata": {"fps": 1}}]}]},
            "unsupported",
            "contents[0].parts[0].videoMetadata",
        ),
        ({"contents": HI, "cachedContent": "cachedContents/1"}, "unsupported", "cachedContent"),
        (
            {"contents": HI, "tools": [{"functionDeclarations": [{}]}]},
            "invalid_request",
            "tools[0].functionDeclarations[0]",
        ),
        (
            {"contents": HI, "toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}},
            "invalid_request",
            "toolConfig.functionCallingConfig.mode",
        ),
        ({"contents": HI, "generationConfig": {"topK": "many"}}, "invalid_request", "generationConfig"),
        ({"contents": HI, "generationConfig": {"candidateCount": 2}}, "unsupported", "generationConfig.candidateCount"),
        (
            {"contents": HI, "generationConfig": {"responseModalities": ["IMAGE"]}},
            "unsupported",
            "generationConfig.responseModalities",
        ),
        ({"contents": HI, "generationConfig": {"speechConfig": {}}}, "unsupported", "generationConfig.speechConfig"),
        (
            {"contents": HI, "generationConfig": {"responseMimeType": "text/x.enum"}},
            "unsupported",
            "generationConfig.responseMimeType",
        ),
    ],
)
def test_refusals_name_the_place(body: Any, kind: ApiErrorKind, param: str) -> None:
    error = refusal(body)
    assert (error.kind, error.param) == (kind, param)
    assert param.split(".")[-1] in error.message


def test_bytes_that_are_no_text_are_refused() -> None:
    assert refusal(b'{"contents":[{"parts":[{"text":"\xff"}]}]}').kind == "invalid_request"
    assert refusal(b"[1]").kind == "invalid_request"
    deep = b"[" * 100_000 + b"]" * 100_000
    assert refusal(b'{"contents":' + deep + b"}").kind == "invalid_request"


def test_what_google_lacks_goes_out_in_the_nearest_form() -> None:
    request = Request(
        model="m",
        messages=[
            Message("developer", [Text("first")]),
            Message("user", [Text("do")]),
            Message(
                "assistant", [ToolCall("1", "patch", "*** Begin", kind="custom"), ToolCall("2", "f", "", namespace="n")]
            ),
            Message("tool", [ToolResult("1", [Text("a"), Text("b")])]),
            Message("tool", [ToolResult("2", [Text('{"output":"x"}')], is_error=False)]),
            Message("system", [Text("later")]),
        ],
        tools=[Tool("patch", kind="custom"), Tool("f", namespace="n"), Tool("googleSearch", kind="hosted")],
        tool_choice=ToolChoice("required"),
        thinking=Thinking(visible=False),
    )
    decoded = again(request)
    assert decoded.messages == [
        Message("system", [Text("first")]),
        Message("user", [Text("do")]),
        Message("assistant", [ToolCall("1", "patch", '{"input":"*** Begin"}'), ToolCall("2", "n__f", "{}")]),
        Message("tool", [ToolResult("1", [Text("a\nb")], name="patch")]),
        Message("tool", [ToolResult("2", [Text('{"output":"x"}')], name="n__f")]),
        Message("user", [Text("later")]),
    ]
    assert [(tool.name, tool.kind) for tool in decoded.tools] == [
        ("patch", "function"), ("n__f", "function"), ("googleSearch", "hosted"),
    ]  # fmt: skip
    assert decoded.tool_choice == ToolChoice("required")
    with pytest.raises(ApiError, match="min_p"):
        GOOGLE.encode_request(Request("m", [], sampling=SamplingParams(min_p=0.1)))


# Replies, read by the official client.


class Pieces(httpx.SyncByteStream):
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces


class Server(httpx.BaseTransport):
    """Answers with the given bodies, one a request, in the given pieces, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self._answers: Iterator[tuple[EncodedError, Iterable[bytes]]] = iter(())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        head, pieces = next(self._answers)
        return httpx.Response(head.status, headers=head.headers, stream=Pieces(pieces))

    def answer(self, *bodies: Iterable[bytes], head: EncodedError | None = None) -> genai.Client:
        """The client, which takes long to make, so that there is one for all."""
        self.requests.clear()
        self._answers = ((head or EncodedError(200, b"", {}), body) for body in bodies)
        return CLIENT


SERVER = Server()
CLIENT = genai.Client(
    api_key="sk-polar",
    http_options=types.HttpOptions(base_url="http://polar", httpx_client=httpx.Client(transport=SERVER)),
)


def whole(request: Request, reply: Reply) -> types.GenerateContentResponse:
    client = SERVER.answer([GOOGLE.encode_reply(request, reply)])
    return client.models.generate_content(model="m", contents="hi")


def streamed(pieces: Iterable[bytes]) -> list[types.GenerateContentResponse]:
    return list(SERVER.answer(pieces).models.generate_content_stream(model="m", contents="hi"))


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def events_of(parts: list[Part]) -> Iterator[ReplyEvent]:
    """A turn the way that an engine would sample it, a few characters at a time."""
    for part in parts:
        if isinstance(part, ToolCall):
            yield ToolCallStart(part.id, part.name, part.kind, part.namespace)
            yield from (ToolCallDelta(part.arguments[at : at + 3]) for at in range(0, len(part.arguments), 3))
        elif isinstance(part, Text):
            yield from (TextDelta(part.text[at : at + 2]) for at in range(0, len(part.text), 2))
        elif isinstance(part, Reasoning):
            yield from (ReasoningDelta(part.text[at : at + 2]) for at in range(0, len(part.text), 2))


def written(request: Request, reply: Reply, *, keep_alive: bool = False) -> list[bytes]:
    """Every write of a stream."""
    stream = GOOGLE.create_stream_encoder(request, reply.exchange_id, reply.created)

    def pauses() -> list[bytes]:
        return [stream.keep_alive(), stream.keep_alive()] if keep_alive else []

    writes = [*pauses(), stream.start(Usage(prompt=reply.usage.prompt, cached=reply.usage.cached))]
    for event in events_of(reply.parts):
        writes += [stream.feed(event), *pauses()]
    writes.append(stream.finish(reply))
    return [data for data in writes if data]


def put_together(chunks: list[types.GenerateContentResponse]) -> dict[str, Any]:
    """What a client has at the end of a stream: pieces of one kind joined, everything else as it was said last."""
    parts: list[dict[str, Any]] = []
    total: dict[str, Any] = {"parts": parts}
    for chunk in chunks:
        assert chunk.candidates
        candidate = chunk.candidates[0]
        assert candidate.content
        assert candidate.content.role == "model"
        assert candidate.content.parts, "the client's chat forgets turns with empty chunks"
        for part in candidate.content.parts:
            piece = part.model_dump(exclude_none=True)
            last = parts[-1] if parts else {}
            if "text" in piece and "text" in last and piece.get("thought") == last.get("thought"):
                last |= {**piece, "text": last["text"] + piece["text"]}
            elif piece != {"text": ""}:
                parts.append(piece)
        assert total.setdefault("id", chunk.response_id) == chunk.response_id
        assert chunk.usage_metadata
        total |= {
            "finish": candidate.finish_reason,
            "usage": chunk.usage_metadata.model_dump(exclude_none=True),
            "model": chunk.model_version,
            "logprobs": candidate.logprobs_result,
        }
    return total


def reply(*parts: Part, finish_reason: FinishReason = "stop", logprobs: list[TokenLogprob] | None = None) -> Reply:
    usage = Usage(prompt=100, completion=20, cached=60, reasoning=5)
    return Reply(EXCHANGE, "m", 1_700_000_000, [*parts], finish_reason, usage=usage, logprobs=logprobs)


def tool_call(index: int, arguments: str = '{"a": 1}', **more: Any) -> ToolCall:
    return ToolCall(ids.make_call_id(EXCHANGE, index), "bash", arguments, **more)


SHOWN = Request("m", [], stream=True, thinking=Thinking(visible=True))
HIDDEN = Request("m", [], stream=True, thinking=Thinking(visible=False))

TURNS = {
    "text": reply(Text("Hello there.")),
    "reasoning": reply(Reasoning("think\n\n"), Text("said")),
    "reasoning only": reply(Reasoning("think, and then cut"), finish_reason="length"),
    "call": reply(tool_call(0), finish_reason="tool_calls"),
    "all": reply(Reasoning("hm"), Text(" first "), tool_call(0), finish_reason="tool_calls"),
    "parallel": reply(Reasoning("hm"), tool_call(0), tool_call(1, '{"b":[1,2.50]}'), finish_reason="tool_calls"),
    "text after calls": reply(Text("a"), tool_call(0), Text("b"), Reasoning("c"), tool_call(1), Text("d")),
    "reasoning last": reply(tool_call(0), Reasoning("c")),
    "empty": reply(),
    "unicode": reply(
        Text('é😀漢\u2028\u2029\x85 "quoted" \\ \x00\x1f\r\n\n'), tool_call(0, '{"é😀\u2028":"\\u00e9\\n"}')
    ),
    "length": reply(Text("cut o"), finish_reason="length"),
    "filter": reply(Text("no"), finish_reason="content_filter"),
    "abort": reply(Text("no"), finish_reason="abort"),
    "no arguments": reply(tool_call(0, "")),
    "arguments over lines": reply(tool_call(0, '{\n  "a": "b\\n",\r\n\t"c": {}\n}\n')),
    "no json": reply(tool_call(0, '{"a": oops')),
    "no object": reply(tool_call(0, "[1]")),
    "custom": reply(tool_call(0, "free\ntext", kind="custom", namespace="ns")),
}


@pytest.mark.parametrize("request_", [SHOWN, HIDDEN], ids=["shown", "hidden"])
@pytest.mark.parametrize("name", TURNS)
def test_a_stream_adds_up_to_the_whole_reply(name: str, request_: Request) -> None:
    expected = put_together([whole(request_, TURNS[name])])
    for keep_alive in (False, True):
        writes = written(request_, TURNS[name], keep_alive=keep_alive)
        assert put_together(streamed(writes)) == expected
        for size in (1, 2, 3, 7, 1 << 20):
            assert put_together(streamed(cut(b"".join(writes), size))) == expected


def test_what_the_client_sees() -> None:
    response = whole(SHOWN, TURNS["all"])
    assert response.candidates
    assert response.candidates[0].content
    thought, text, called = response.candidates[0].content.parts or []
    assert (thought.text, thought.thought, thought.thought_signature) == ("hm", True, None)
    assert text.text == " first "
    assert called.function_call
    assert (called.function_call.id, called.function_call.name) == (f"call_{EXCHANGE}_0", "bash")
    assert called.function_call.args == {"a": 1}
    assert called.thought_signature == SEAL.encode()
    assert response.candidates[0].finish_reason == types.FinishReason.STOP
    usage = response.usage_metadata
    assert usage
    assert (usage.prompt_token_count, usage.cached_content_token_count) == (100, 60)
    assert (usage.candidates_token_count, usage.thoughts_token_count, usage.total_token_count) == (15, 5, 120)
    assert response.response_id == EXCHANGE
    assert response.model_version == "m"
    assert json.loads(GOOGLE.encode_reply(SHOWN, TURNS["all"]))["createTime"] == "2023-11-14T22:13:20Z"


def test_hidden_thoughts_leave_their_signature() -> None:
    response = whole(HIDDEN, TURNS["reasoning"])
    assert response.candidates
    assert response.candidates[0].content
    (part,) = response.candidates[0].content.parts or []
    assert (part.text, part.thought_signature) == ("said", SEAL.encode())


@pytest.mark.parametrize(
    ("finish", "name"),
    [("length", "MAX_TOKENS"), ("filter", "SAFETY"), ("abort", "OTHER"), ("text", "STOP"), ("call", "STOP")],
)
def test_finish_reasons(finish: str, name: str) -> None:
    response = whole(SHOWN, TURNS[finish])
    assert response.candidates
    assert response.candidates[0].finish_reason == types.FinishReason(name)


def test_text_goes_out_at_once_and_a_call_when_it_is_whole() -> None:
    stream = GOOGLE.create_stream_encoder(SHOWN, EXCHANGE, 0)
    assert stream.start(None) == b""
    assert b'"Hel"' in stream.feed(TextDelta("Hel"))
    assert stream.feed(ToolCallStart("c_0", "bash")) == b""
    assert stream.feed(ToolCallDelta('{"a"')) == b""
    assert stream.feed(ToolCallDelta(":1}")) == b""
    out = stream.feed(ToolCallStart("c_1", "bash"))
    assert b'"args":{"a":1}' in out
    assert b"call_c_1" not in out
    assert b"call_c_1" in stream.finish(reply(finish_reason="tool_calls"))


def test_chunks_tell_the_prompts_length() -> None:
    first, *_, last = streamed(written(SHOWN, TURNS["text"]))
    assert first.usage_metadata
    assert first.usage_metadata.prompt_token_count == 100
    assert first.usage_metadata.total_token_count == 100
    assert last.usage_metadata
    assert last.usage_metadata.total_token_count == 120


def test_log_probabilities() -> None:
    tokens = [TokenLogprob("a", -0.5, top_logprobs=[TokenLogprob("b", -1.0)]), TokenLogprob("c", -1.5)]
    turn = reply(Text("ac"), logprobs=tokens)
    response = whole(SHOWN, turn)
    assert put_together(streamed(written(SHOWN, turn))) == put_together([response])
    assert response.candidates
    assert response.candidates[0].avg_logprobs == -1.0
    found = response.candidates[0].logprobs_result
    assert found
    assert [(c.token, c.log_probability) for c in found.chosen_candidates or []] == [("a", -0.5), ("c", -1.5)]
    assert GOOGLE.decode_reply(GOOGLE.encode_reply(SHOWN, turn)).logprobs == tokens


@pytest.mark.parametrize("name", TURNS)
def test_the_array_form(name: str) -> None:
    request = Request("m", [], stream=True, thinking=Thinking(visible=True), echo={"alt": Raw(b'"json"')})
    chunks = json.loads(b"".join(written(request, TURNS[name], keep_alive=True)))
    parsed = [types.GenerateContentResponse.model_validate(chunk) for chunk in chunks]
    assert put_together(parsed) == put_together([whole(SHOWN, TURNS[name])])
    stream = GOOGLE.create_stream_encoder(request, EXCHANGE, 0)
    broken = stream.feed(TextDelta("a")) + stream.error(ApiError("engine", "gone"))
    assert json.loads(broken)[-1]["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize("name", TURNS)
def test_our_own_client_reads_replies(name: str) -> None:
    turn = TURNS[name]
    read = GOOGLE.decode_reply(GOOGLE.encode_reply(SHOWN, turn))
    assert (read.exchange_id, read.model, read.created, read.usage) == (EXCHANGE, "m", turn.created, turn.usage)
    assert [p.text for p in read.parts if isinstance(p, Text)] == [p.text for p in turn.parts if isinstance(p, Text)]
    thoughts = [p.text for p in turn.parts if isinstance(p, Reasoning)]
    assert [p.text for p in read.parts if isinstance(p, Reasoning) and p.text] == thoughts
    assert any(isinstance(p, Reasoning | ToolCall) and p.seal == SEAL for p in read.parts)
    if name not in ("no arguments", "custom"):
        calls = [(p.id, p.name, p.arguments.strip()) for p in turn.parts if isinstance(p, ToolCall)]
        assert [(p.id, p.name, p.arguments) for p in read.parts if isinstance(p, ToolCall)] == calls
    has_calls = any(isinstance(part, ToolCall) for part in turn.parts)
    assert read.finish_reason == ("tool_calls" if has_calls and turn.finish_reason == "stop" else turn.finish_reason)


def test_a_blocked_prompt_and_garbage() -> None:
    blocked = GOOGLE.decode_reply(b'{"promptFeedback":{"blockReason":"SAFETY"}}')
    assert (blocked.finish_reason, blocked.parts) == ("content_filter", [])
    bad_args = b'{"candidates":[{"content":{"parts":[{"functionCall":{"name":"f","args":{"a":"\xff"}}}]}}]}'
    for body in (b"oops", b'{"candidates":5}', b'{"createTime":"soon"}', b'{"modelVersion":"\xff"}', bad_args):
        with pytest.raises(ApiError) as raised:
            GOOGLE.decode_reply(body)
        assert raised.value.kind == "engine"


# What the official client sends back.


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", TURNS)
def test_a_chats_echo_says_what_was_sampled(name: str, streams: bool) -> None:
    """The client's own chat keeps a stream as one content per chunk; it has to be the same turn all the same."""
    turn = TURNS[name]
    body = written(SHOWN, turn, keep_alive=True) if streams else [GOOGLE.encode_reply(SHOWN, turn)]
    chat = SERVER.answer(body, [GOOGLE.encode_reply(SHOWN, TURNS["text"])]).chats.create(model="m")
    if streams:
        list(chat.send_message_stream("do it"))
    else:
        chat.send_message("do it")
    chat.send_message("and?")
    user, echoed, last = decode(SERVER.requests[1].content).messages
    assert (user, last) == (Message("user", [Text("do it")]), Message("user", [Text("and?")]))
    assert echoed.role == "assistant"
    assert "".join(p.text for p in echoed.parts if isinstance(p, Text)) == "".join(
        p.text for p in turn.parts if isinstance(p, Text)
    )
    assert "".join(p.text for p in echoed.parts if isinstance(p, Reasoning)) == "".join(
        p.text for p in turn.parts if isinstance(p, Reasoning)
    )
    named = {ids.find_exchange_id(p.seal) for p in echoed.parts if isinstance(p, Reasoning | ToolCall) and p.seal}
    assert named == {EXCHANGE}
    calls = [p for p in turn.parts if isinstance(p, ToolCall)]
    echoes = [p for p in echoed.parts if isinstance(p, ToolCall)]
    assert [echo.id for echo in echoes] == [f"call_{sampled.id}" for sampled in calls]
    if name in ("no json", "no object"):
        assert [echo.arguments for echo in echoes] == [sampled.arguments for sampled in calls]
    elif name not in ("no arguments", "custom"):
        assert [json.loads(echo.arguments) for echo in echoes] == [json.loads(sampled.arguments) for sampled in calls]


def test_the_clients_requests_decode() -> None:
    client = SERVER.answer([GOOGLE.encode_reply(SHOWN, TURNS["text"])], [GOOGLE.encode_count(7)])
    weather = types.FunctionDeclaration(
        name="weather",
        description="of a place",
        parameters=types.Schema(type=types.Type.OBJECT, properties={"at": types.Schema(type=types.Type.STRING)}),
    )
    contents = [
        types.Content(role="user", parts=[types.Part.from_bytes(data=b"\xfb\xff\xfe", mime_type="image/png")]),
        types.Content(role="model", parts=[types.Part.from_function_call(name="weather", args={"at": "home"})]),
        types.Content(
            role="user", parts=[types.Part.from_function_response(name="weather", response={"result": "sun"})]
        ),
    ]
    client.models.generate_content(
        model="m",
        contents=contents,
        config=types.GenerateContentConfig(
            system_instruction="be kind",
            tools=[types.Tool(function_declarations=[weather])],
            top_k=40,
            thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_budget=0),
        ),
    )
    request = decode(SERVER.requests[0].content)
    assert request.messages == [
        Message("system", [Text("be kind")]),
        Message("user", [Media("image", "image/png", data=base64.b64encode(b"\xfb\xff\xfe").decode())]),
        Message("assistant", [ToolCall("call_0", "weather", request_arguments(request))]),
        Message("tool", [ToolResult("call_0", [Text("sun")], name="weather")]),
    ]
    schema = request.tools[0].parameters
    assert schema is not None
    assert json.loads(bytes(schema)) == {"type": "object", "properties": {"at": {"type": "string"}}}
    assert request.sampling.top_k == 40
    assert request.thinking == Thinking(enabled=False)

    assert client.models.count_tokens(model="m", contents="hi").total_tokens == 7
    assert all(GOOGLE.recognizes(sent.url.path, sent.headers) for sent in SERVER.requests)
    assert any(route.path.fullmatch(SERVER.requests[1].url.path) for route in GOOGLE.routes)
    assert decode(SERVER.requests[1].content, "countTokens").messages == [Message("user", [Text("hi")])]


def request_arguments(request: Request) -> str:
    """Whatever white space the client writes, the object is this one."""
    (called,) = (p for m in request.messages for p in m.parts if isinstance(p, ToolCall))
    assert json.loads(called.arguments) == {"at": "home"}
    return called.arguments


def test_models() -> None:
    client = SERVER.answer([GOOGLE.encode_models(["a", "models/b"], None)], [GOOGLE.encode_models([], "never/heard")])
    assert [model.name for model in client.models.list()] == ["models/a", "models/b"]
    assert client.models.get(model="never/heard").name == "models/never/heard"


# Errors.

ERRORS: dict[ApiErrorKind, tuple[type[errors.APIError], str]] = {
    "invalid_request": (errors.ClientError, "INVALID_ARGUMENT"),
    "unsupported": (errors.ClientError, "INVALID_ARGUMENT"),
    "context_length": (errors.ClientError, "INVALID_ARGUMENT"),
    "too_large": (errors.ClientError, "INVALID_ARGUMENT"),
    "authentication": (errors.ClientError, "UNAUTHENTICATED"),
    "not_found": (errors.ClientError, "NOT_FOUND"),
    "method": (errors.ClientError, "UNIMPLEMENTED"),
    "upgrade": (errors.ClientError, "UNIMPLEMENTED"),
    "rate_limit": (errors.ClientError, "RESOURCE_EXHAUSTED"),
    "overloaded": (errors.ServerError, "UNAVAILABLE"),
    "engine": (errors.ServerError, "UNAVAILABLE"),
    "timeout": (errors.ServerError, "DEADLINE_EXCEEDED"),
    "internal": (errors.ServerError, "INTERNAL"),
}


@pytest.mark.parametrize("kind", HTTP_STATUS)
def test_the_client_raises_each_error(kind: ApiErrorKind) -> None:
    error = GOOGLE.encode_error(ApiError(kind, "It {broke.", retry_after=2.2))
    client = SERVER.answer([error.body], head=error)
    expected, status = ERRORS[kind]
    with pytest.raises(expected) as raised:
        client.models.generate_content(model="m", contents="hi")
    assert (raised.value.code, raised.value.status) == (HTTP_STATUS[kind], status)
    assert "It {broke." in (raised.value.message or "")
    assert error.headers["retry-after"] == "3"
    details = json.loads(error.body)["error"]["details"]
    assert {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3s"} in details


@pytest.mark.parametrize("kind", HTTP_STATUS)
@pytest.mark.parametrize("said", [0, 2])
@pytest.mark.parametrize("keep_alive", [False, True])
def test_the_client_raises_an_error_in_mid_stream(kind: ApiErrorKind, said: int, keep_alive: bool) -> None:
    stream = GOOGLE.create_stream_encoder(SHOWN, EXCHANGE, 0)
    writes = [stream.start(None), *(stream.feed(TextDelta(f"a{n}")) for n in range(said))]
    writes += [stream.keep_alive(), stream.keep_alive()] if keep_alive else []
    writes.append(stream.error(ApiError(kind, "It {broke.")))
    for size in (1, 7, 1 << 20):
        chunks = SERVER.answer(cut(b"".join(writes), size)).models.generate_content_stream(model="m", contents="hi")
        for n in range(said):
            assert next(chunks).text == f"a{n}"
        with pytest.raises(ERRORS[kind][0], match=r"It \{broke"):
            next(chunks)


def test_an_error_in_mid_stream_is_bare() -> None:
    """The JavaScript client parses an error only where what it reads at once is JSON."""
    stream = GOOGLE.create_stream_encoder(SHOWN, EXCHANGE, 0)
    stream.keep_alive()
    assert json.loads(stream.error(ApiError("rate_limit", "Slow down.")))["error"]["code"] == 429


def test_overflow_and_bad_fields_are_told_in_googles_words() -> None:
    overflow = json.loads(GOOGLE.encode_error(ApiError("context_length", "9 tokens are too many.")).body)["error"]
    assert overflow["message"].startswith("The input token count exceeds the maximum number of tokens allowed")
    refused = json.loads(GOOGLE.encode_error(refusal({"contents": []})).body)["error"]
    assert refused["details"][0]["fieldViolations"][0]["field"] == "contents"
    key = json.loads(GOOGLE.encode_error(ApiError("authentication", "Unknown key.")).body)["error"]
    assert key["details"][0]["reason"] == "API_KEY_INVALID"


def test_a_keep_alive_is_not_an_event() -> None:
    stream = GoogleStreamEncoder(SHOWN, EXCHANGE, 0)
    assert [stream.keep_alive() for _ in range(3)] == [b"data: ", b" ", b" "]
    assert stream.feed(TextDelta("a")).startswith(b'{"candidates"')
    assert stream.keep_alive() == b"data: "


# Whatever comes in, a Request or an ApiError comes out.

NAMES = st.sampled_from(
    sorted(
        {
            *(name for shape in vars(google_wire).values() for name in getattr(shape, "__struct_fields__", ())),
            *("type", "properties", "items", "anyOf", "nullable", "enum", "maxItems", "output", "error"),
            *("functionDeclarations", "googleSearch", "generateContentRequest"),
        }
    )
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**22), 10**22)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "model", "user", "ANY", "OBJECT", "12", "application/json", SIGNATURE, "c2ln", "\u00e9"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=25
)


def only_the_two(body: Any) -> None:
    """And what is accepted comes back the same from our own client."""
    try:
        request = decode(body)
    except ApiError:
        return
    assert again(request).messages == request.messages


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=5), st.lists(VALUES, max_size=3))
def test_any_object(body: dict[str, Any], contents: list[Any]) -> None:
    only_the_two(body)
    only_the_two(body | {"contents": contents})


PARTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "text": st.sampled_from(["", "a", "b\n"]),
            "thought": st.booleans(),
            "thoughtSignature": st.sampled_from([SIGNATURE, "c2ln", "b3RoZXI="]),
            "functionCall": st.fixed_dictionaries(
                {"name": st.sampled_from("fg")},
                optional={"id": st.sampled_from(["", "1", "2"]), "args": st.dictionaries(NAMES, LEAVES, max_size=2)},
            ),
            "functionResponse": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", ""])},
                optional={
                    "id": st.sampled_from(["", "1", "3"]),
                    "response": st.dictionaries(NAMES, LEAVES, max_size=2),
                },
            ),
        },
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "model"]), "parts": PARTS}), max_size=5))
def test_any_conversation(contents: list[Any]) -> None:
    only_the_two({"contents": contents})


def shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [shortened(item) for item in value[:4]]
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return value[:40] if isinstance(value, str) else value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


BODIES = [shortened(captures.load(name)[-1]["body"]) for name in CAPTURES]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_captures(data: st.DataObject) -> None:
    body = json.loads(json.dumps(data.draw(st.sampled_from(BODIES))))
    *way, last = data.draw(st.sampled_from(list(places(body))))
    owner = body
    for key in way:
        owner = owner[key]
    owner[last] = data.draw(VALUES)
    only_the_two(body)


def test_frames_are_one_line() -> None:
    """Every event of a stream is `data: ` and JSON on one line, whatever the model wrote."""
    for turn in TURNS.values():
        for line in b"".join(written(SHOWN, turn)).split(b"\n\n")[:-1]:
            assert len(line.decode().splitlines()) == 1
            msgspec.json.decode(line.removeprefix(b"data: "))
