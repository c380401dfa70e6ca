"""Requests, replies and streams as harnesses and engines have them, in all their variety, for Hypothesis."""

import base64
import itertools
import json
from typing import Any

from hypothesis import strategies as st

from polar import ids
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
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    ToolChoice,
    ToolResult,
    Usage,
)
from tests.unit.dialects.openai_client import EXCHANGE
from tests.unit.dialects.openai_client import parts as parts_of

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
names = st.from_regex(r"[a-z][a-z0-9_]{0,6}[a-z]", fullmatch=True).filter(lambda name: "__" not in name)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.one_of(
    st.dictionaries(texts, values, max_size=3).map(json.dumps),
    st.dictionaries(texts, values, max_size=2).map(lambda value: json.dumps(value, indent=1, ensure_ascii=False)),
    st.sampled_from(["", "{}", '{"a": 1.0}', '{"a":', "[1]", "oops", ' {"a": "b"} ']),
)
schemas = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(names, st.just({"type": "string"}), max_size=2)}
).map(lambda schema: Raw(json.dumps(schema).encode()))
data = st.binary(min_size=1, max_size=9).map(lambda raw: base64.b64encode(raw).decode())

image_types = st.sampled_from(["image/png", "image/jpeg"])
images = st.one_of(
    st.builds(Media, st.just("image"), image_types, data, detail=st.sampled_from([None, "low", "high"])),
    st.builds(Media, st.just("image"), st.just("") | image_types, url=st.just("https://pictures.example/cat.png")),
)
files = st.one_of(
    st.builds(Media, st.just("file"), st.just("application/pdf"), data, name=st.none() | texts),
    st.builds(Media, st.just("file"), url=st.just("https://files.example/a.pdf")),
    st.builds(Media, st.just("file"), file_id=names),
)
audio = st.builds(Media, st.just("audio"), st.sampled_from(["audio/mpeg", "audio/wav"]), data)
text_parts = texts.map(Text)
seals = st.integers(0, 3).map(lambda n: ids.make_seal(EXCHANGE, n)) | data
reasonings = st.builds(Reasoning, texts, st.none() | seals) | st.builds(Reasoning, st.just(""), seals)


@st.composite
def calls(draw: st.DrawFn, call_id: str, tools: list[Tool]) -> ToolCall:
    callable_tools = [tool for tool in tools if tool.kind != "hosted"]
    if not callable_tools:
        return ToolCall(call_id, draw(names), draw(arguments))
    tool = draw(st.sampled_from(callable_tools))
    if tool.kind == "custom":
        return ToolCall(call_id, tool.name, draw(texts), "custom", tool.namespace)
    return ToolCall(call_id, tool.name, draw(arguments), "function", tool.namespace, draw(st.none() | seals))


@st.composite
def toolboxes(draw: st.DrawFn) -> list[Tool]:
    tools = []
    for name in draw(st.lists(names, max_size=3, unique=True)):
        kind = draw(st.sampled_from(["function", "function", "custom", "hosted"]))
        description = draw(st.just("") | texts)
        namespace = draw(st.sampled_from([None, None, "agents"]))
        if kind == "function":
            strict = draw(st.sampled_from([None, True, False]))
            tools.append(Tool(name, description, draw(st.none() | schemas), namespace=namespace, strict=strict))
        elif kind == "custom":
            grammar = draw(st.sampled_from([None, Raw(b'{"type":"text"}')]))
            tools.append(Tool(name, description, kind="custom", namespace=namespace, grammar=grammar))
        else:
            tools.append(Tool("web_search", kind="hosted"))
    return tools


@st.composite
def conversations(draw: st.DrawFn, tools: list[Tool]) -> list[Message]:
    media = images | files | audio
    messages = [
        Message(draw(st.sampled_from(["system", "developer"])), draw(st.lists(text_parts, min_size=1, max_size=2)))
        for _ in range(draw(st.integers(0, 2)))
    ]
    counter = itertools.count()
    messages.append(Message("user", draw(st.lists(text_parts | media, min_size=1, max_size=3))))
    for kind in draw(st.lists(st.sampled_from(["user", "system", "developer", "turn", "turn", "turn"]), max_size=4)):
        if kind == "user":
            messages.append(
                Message("user", draw(st.lists(text_parts | media, max_size=2)), draw(st.sampled_from([None, "ann"])))
            )
        elif kind != "turn":
            messages.append(Message(kind, draw(st.lists(text_parts, min_size=1, max_size=2))))  # type: ignore[arg-type]
        else:
            parts: list[Part] = draw(st.lists(text_parts | reasonings, max_size=3))
            called = [draw(calls(f"call_{next(counter)}", tools)) for _ in range(draw(st.integers(0, 2)))]
            for call in called:
                parts.insert(draw(st.integers(0, len(parts))), call)
            messages.append(Message("assistant", parts))
            for call in called:
                told = draw(st.lists(text_parts | images | files, max_size=3))
                name = None if call.namespace else call.name
                messages.append(Message("tool", [ToolResult(call.id, told, draw(st.booleans()), name)]))
    return messages


def callable_names(tools: list[Tool]) -> list[str]:
    return [tool.name for tool in tools if tool.kind != "hosted"]


def choices(tools: list[Tool]) -> st.SearchStrategy[ToolChoice]:
    found = callable_names(tools)
    if not found:
        return st.just(ToolChoice())
    some = st.lists(st.sampled_from(found), min_size=1, max_size=2, unique=True)
    return st.one_of(
        st.sampled_from([ToolChoice(), ToolChoice("none"), ToolChoice("required")]),
        some.map(lambda chosen: ToolChoice("named", chosen)),
        some.map(lambda chosen: ToolChoice("auto", chosen)),
    )


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


tenths = st.integers(0, 10).map(lambda number: number / 10)
samplings = st.builds(
    SamplingParams,
    temperature=maybe(tenths),
    top_p=maybe(tenths),
    top_k=maybe(st.integers(1, 99)),
    min_p=maybe(tenths),
    presence_penalty=maybe(tenths),
    frequency_penalty=maybe(tenths),
    repetition_penalty=maybe(tenths),
    seed=maybe(st.integers(0, 2**31 - 1)),
    max_tokens=maybe(st.integers(1, 10**5)),
    min_tokens=maybe(st.integers(1, 9)),
    stop=st.lists(texts, max_size=2),
    logit_bias=maybe(st.just({"7": -1.5})),
)
formats = st.one_of(
    st.just(ResponseFormat()),
    st.just(ResponseFormat("json_object")),
    st.builds(ResponseFormat, st.just("json_schema"), schemas, maybe(names), maybe(st.booleans())),
)
thinkings = st.one_of(
    st.sampled_from([Thinking(), Thinking(enabled=False), Thinking(enabled=True)]),
    st.builds(Thinking, effort=st.sampled_from(["low", "medium", "high"])),
    st.builds(Thinking, enabled=st.sampled_from([None, True]), budget=st.integers(1024, 9999)),
    st.just(Thinking(visible=False)),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    tools = draw(toolboxes())
    stream = draw(st.booleans())
    return Request(
        model=draw(names),
        messages=draw(conversations(tools)),
        tools=tools,
        tool_choice=draw(choices(tools)),
        parallel_tool_calls=draw(st.sampled_from([None, True, False])) if callable_names(tools) else None,
        sampling=draw(samplings),
        response_format=draw(formats),
        thinking=draw(thinkings),
        stream=stream,
        stream_usage=draw(st.booleans()) if stream else True,
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    tools = draw(toolboxes())
    parts: list[Part] = draw(st.lists(text_parts | reasonings, max_size=4))
    parts += [draw(calls(ids.make_call_id(EXCHANGE, nth), tools)) for nth in range(draw(st.integers(0, 2)))]
    finish: FinishReason = draw(st.sampled_from(["stop", "stop", "length", "content_filter"]))
    if finish == "stop" and any(isinstance(part, ToolCall) for part in parts):
        finish = "tool_calls"
    prompt, completion = draw(st.integers(1, 9999)), draw(st.integers(1, 9999))
    return Reply(
        EXCHANGE,
        "m",
        draw(st.integers(1, 2**31)),
        parts,
        finish,
        stop_sequence=draw(st.none() | texts) if finish == "stop" else None,
        usage=Usage(prompt, completion, draw(st.integers(0, prompt)), draw(st.integers(0, completion))),
    )


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[ReplyEvent], Reply]:
    """A reply, and the events that it came in: every part cut into pieces, some of them empty."""
    reply = draw(replies())
    events: list[ReplyEvent] = []
    for part in reply.parts:
        if isinstance(part, ToolCall):
            events.append(ToolCallStart(part.id, part.name, part.kind, part.namespace))
            events += [ToolCallDelta(piece) for piece in draw(cuts(part.arguments))]
        elif isinstance(part, Reasoning) and part.text:  # nothing at all is no event
            events += [ReasoningDelta(piece) for piece in draw(cuts(part.text))]
        elif isinstance(part, Text):
            events += [TextDelta(piece) for piece in draw(cuts(part.text))]
    reply.parts = parts_of(events)
    return events, reply


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    places = st.lists(st.integers(0, len(text)), max_size=3).map(sorted)
    return places.map(lambda at: [text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])])
