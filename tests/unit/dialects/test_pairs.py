"""Any dialect into any other, through the canonical form: what a request or a reply means survives.

`meaning` says what is compared. Everything that it lets go of is something that one of the two wire formats has no word
for; each such loss stands in `LOSSES`, under the dialect that has it, with its reason.
"""

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.dialects.anthropic import Anthropic
from polar.dialects.base import Dialect
from polar.dialects.google import Google
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_completions import OpenAICompletions
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.sse import EventParser
from polar.errors import ApiError
from polar.types import (
    Media,
    Message,
    Part,
    Raw,
    Reasoning,
    Reply,
    ReplyEvent,
    Request,
    ResponseFormat,
    SamplingParams,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Usage,
)
from tests.unit.dialects.generated import replies, requests, samplings, streams, texts
from tests.unit.dialects.openai_client import EXCHANGE

CHAT, RESPONSES, ANTHROPIC, GOOGLE = OpenAIChat(), OpenAIResponses(), Anthropic(), Google()
DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, ANTHROPIC, GOOGLE)
PAIRS = list(itertools.product(DIALECTS, repeat=2))

every_pair = pytest.mark.parametrize(("one", "other"), PAIRS, ids=[f"{a.name}-{b.name}" for a, b in PAIRS])
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def through(dialect: Dialect, request: Request) -> Request:
    """Written and read again. Google has the model and the wish for a stream in the path."""
    verb = "streamGenerateContent" if request.stream else "generateContent"
    body = dialect.encode_request(request)
    return dialect.decode_request(dialect.split(body), {"model": request.model, "verb": verb, "alt": "sse"})


# What is compared.

Losses: TypeAlias = tuple[Callable[[Request], None], ...]
FREEFORM = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')


def meaning(request: Request, *dialects: Dialect) -> dict[str, Any]:
    """A request as plain data, less what one of these dialects can't say."""
    request = deepcopy(request)
    losses = EVERYWHERE + tuple(itertools.chain.from_iterable(LOSSES[dialect.name] for dialect in dialects))
    for loss in losses * 2:  # twice, since one may bring about what another is about: neighbours, say
        loss(request)
    request.echo = {}  # what the provider only repeats
    said: dict[str, Any] = json.loads(msgspec.json.encode(request))
    return said


def turns(request: Request) -> list[Message]:
    return [message for message in request.messages if message.role == "assistant"]


def made_calls(request: Request) -> list[ToolCall]:
    return [part for turn in turns(request) for part in turn.parts if isinstance(part, ToolCall)]


def results(request: Request) -> list[ToolResult]:
    return [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]


def all_media(request: Request) -> list[Media]:
    shown = [part for message in request.messages for part in message.parts]
    return [
        part
        for part in [*shown, *(part for result in results(request) for part in result.parts)]
        if isinstance(part, Media)
    ]


def spelling_of_json(request: Request) -> None:
    """Arguments are compared as values; no arguments at all are an empty object."""
    for call in made_calls(request):
        if call.kind == "function":
            with suppress(ValueError):
                call.arguments = json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)


def hosted_tools(request: Request) -> None:
    """Tools that only one provider can run: no engine has them, and other providers have no word for them."""
    request.tools = [tool for tool in request.tools if tool.kind != "hosted"]


EVERYWHERE: Losses = (spelling_of_json, hosted_tools)


def order_within_a_turn(request: Request) -> None:
    """A chat message has one reasoning, without a seal, then its content, then its calls."""
    for turn in turns(request):
        thought = "".join(part.text for part in turn.parts if isinstance(part, Reasoning))
        rest = [part for part in turn.parts if not isinstance(part, Reasoning | ToolCall)]
        called = [part for part in turn.parts if isinstance(part, ToolCall)]
        turn.parts = [*([Reasoning(thought)] if thought else []), *rest, *called]


def seals_of_calls(request: Request) -> None:
    """Only Google's API has them there."""
    for call in made_calls(request):
        call.seal = None


def error_flags(request: Request) -> None:
    """What went wrong is told in the result's own words."""
    for result in results(request):
        result.is_error = False


def namespaces(request: Request) -> None:
    """They become part of the name."""
    flat = {tool.name: f"{tool.namespace}__{tool.name}" for tool in request.tools if tool.namespace}
    request.tool_choice.names = [flat.get(name, name) for name in request.tool_choice.names]
    callables: list[ToolCall | Tool] = [*made_calls(request), *request.tools]
    for named in callables:
        if named.namespace:
            named.name, named.namespace = f"{named.namespace}__{named.name}", None


def custom_tools(request: Request) -> None:
    """They become functions of one string, `input`, and the format of that is told in words."""
    for call in made_calls(request):
        if call.kind == "custom":
            call.kind, call.arguments = "function", json.dumps({"input": call.arguments}, sort_keys=True)
    for tool in request.tools:
        if tool.kind == "custom":
            tool.kind, tool.parameters = "function", FREEFORM
            if tool.grammar is not None:
                tool.description += f"\n\nThe format of `input`: {bytes(tool.grammar).decode()}"
                tool.description = tool.description.lstrip()
                tool.grammar = None


def message_names(request: Request) -> None:
    for message in request.messages:
        message.name = None


def result_names(request: Request) -> None:
    """The call has the name."""
    for result in results(request):
        result.name = None


def developers(request: Request) -> None:
    """There is one role for instructions."""
    for message in request.messages:
        if message.role == "developer":
            message.role = "system"


def adjacent_turns(request: Request) -> None:
    """What the model says in a row is one turn."""
    merged: list[Message] = []
    for message in request.messages:
        if merged and merged[-1].role == message.role == "assistant":
            merged[-1].parts += message.parts
        else:
            merged.append(message)
    request.messages = merged


def stream_usage(request: Request) -> None:
    """A stream always carries usage."""
    request.stream_usage = True


def visibility(request: Request) -> None:
    """Whether the client wants to see the reasoning: only Google's API asks."""
    request.thinking.visible = True


def names_of_formats(request: Request) -> None:
    request.response_format.name = request.response_format.strict = None


def default_name_of_a_format(request: Request) -> None:
    """Here a schema must have a name."""
    if request.response_format.kind == "json_schema":
        request.response_format.name = request.response_format.name or "response"


def implied_thinking(request: Request) -> None:
    """Who asks for an effort or a budget asks for thinking; effort `none` is none."""
    thinking = request.thinking
    if thinking.enabled is False or thinking.effort == "none":
        request.thinking = Thinking(enabled=False, visible=thinking.visible)
    elif thinking.effort or thinking.budget:
        thinking.enabled = True


def thinking_but_for_effort(request: Request) -> None:
    """Only how much effort, or none at all, can be said."""
    if request.thinking.enabled is not False:
        request.thinking.budget = None
        request.thinking.enabled = True if request.thinking.effort else None


def types_of_addressed_media(request: Request) -> None:
    for media in all_media(request):
        if media.url is not None or media.file_id is not None:
            media.media_type = ""


def details(request: Request) -> None:
    for media in all_media(request):
        media.detail = None


def details_in_results(request: Request) -> None:
    for result in results(request):
        for part in result.parts:
            if isinstance(part, Media):
                part.detail = None


def log_probabilities(request: Request) -> None:
    request.logprobs = None


def sampling_besides_the_basics(request: Request) -> None:
    """A limit is required, and there are three parameters."""
    asked = request.sampling
    request.sampling = SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        max_tokens=asked.max_tokens or 32_000,
        stop=asked.stop,
    )


def json_without_schema(request: Request) -> None:
    if request.response_format.kind == "json_object":
        request.response_format = ResponseFormat("json_schema", Raw(b'{"type":"object"}'))


def choices_among_some(request: Request) -> None:
    """One tool can be forced, or any; some of them are said by offering no others. Parallel calls are part of a choice
    to call."""
    choice = request.tool_choice
    if choice.names and not (choice.mode == "named" and len(choice.names) == 1):
        request.tools = [tool for tool in request.tools if tool.name in choice.names]
        request.tool_choice = ToolChoice("required" if choice.forces_call else "auto")
    if choice.mode == "none":
        request.parallel_tool_calls = None


def missing_schemas(request: Request) -> None:
    """A function must have one."""
    for tool in request.tools:
        if tool.kind == "function" and tool.parameters is None:
            tool.parameters = Raw(b'{"type": "object", "properties": {}}')


def place_of_instructions(request: Request) -> None:
    """There is one instruction, in front. What comes later is the user's."""
    leading = list(itertools.takewhile(lambda message: message.role == "system", request.messages))
    rest = request.messages[len(leading) :]
    for message in rest:
        if message.role == "system":
            message.role = "user"
    instruction = [Message("system", [part for message in leading for part in message.parts])] if leading else []
    request.messages = [*instruction, *rest]


def pieces_of_a_turn(request: Request) -> None:
    """A stream's pieces come back as they were sent, so neighbours are one: text always, thinking up to its seal."""
    for turn in turns(request):
        parts: list[Part] = []
        for part in turn.parts:
            last = parts[-1] if parts else None
            if isinstance(part, Text) and isinstance(last, Text):
                last.text += part.text
            elif isinstance(part, Reasoning) and isinstance(last, Reasoning) and last.seal is None:
                last.text, last.seal = last.text + part.text, part.seal
            else:
                parts.append(part)
        turn.parts = parts


def order_within_results(request: Request) -> None:
    """A result is one text; media stand beside it."""
    for result in results(request):
        text = "\n".join(part.text for part in result.parts if isinstance(part, Text))
        result.parts = [Text(text), *(part for part in result.parts if isinstance(part, Media))]


def strictness(request: Request) -> None:
    """It can be asked for all functions, or for none."""
    for tool in request.tools:
        tool.strict = None


def parallel_calls(request: Request) -> None:
    request.parallel_tool_calls = None


LOSSES: dict[str, Losses] = {
    "openai_chat": (
        order_within_a_turn,
        error_flags,
        namespaces,
        default_name_of_a_format,
        seals_of_calls,
        visibility,
        types_of_addressed_media,
    ),
    "openai_responses": (
        adjacent_turns,
        seals_of_calls,
        error_flags,
        message_names,
        stream_usage,
        implied_thinking,
        thinking_but_for_effort,
        visibility,
        types_of_addressed_media,
    ),
    "anthropic": (
        seals_of_calls,
        namespaces,
        custom_tools,
        message_names,
        result_names,
        developers,
        stream_usage,
        implied_thinking,
        visibility,
        names_of_formats,
        json_without_schema,
        types_of_addressed_media,
        details,
        log_probabilities,
        sampling_besides_the_basics,
        choices_among_some,
        missing_schemas,
    ),
    "google": (
        adjacent_turns,
        namespaces,
        custom_tools,
        message_names,
        result_names,
        developers,
        place_of_instructions,
        pieces_of_a_turn,
        order_within_results,
        stream_usage,
        implied_thinking,
        names_of_formats,
        details_in_results,
        strictness,
        parallel_calls,
    ),
}


def expressible(request: Request, *dialects: Dialect) -> Request:
    """Without what one of them refuses, in so many words, to send."""
    request = deepcopy(request)
    if ANTHROPIC in dialects:
        for message in request.messages:
            message.parts = [part for part in message.parts if not isinstance(part, Media) or part.kind != "audio"]
    if GOOGLE in dialects:
        asked = request.sampling
        asked.min_p = asked.repetition_penalty = asked.min_tokens = asked.logit_bias = None
    return request


@every_pair
@given(request=requests())
@quick
def test_requests(one: Dialect, other: Dialect, request: Request) -> None:
    request = expressible(request, one, other)
    translated = through(other, through(one, request))
    assert meaning(translated, one, other) == meaning(request, one, other)


# Legacy completions: a prompt instead of messages.


@given(prompt=texts, sampling=samplings.filter(lambda sampling: sampling.max_tokens is not None))
@quick
def test_prompts(prompt: str, sampling: SamplingParams) -> None:
    request = Request("m", [], prompt=prompt, sampling=sampling)
    assert through(OpenAICompletions(), request) == request
    for dialect in (RESPONSES, ANTHROPIC, GOOGLE):
        asked = expressible(request, dialect)
        assert through(dialect, asked).messages == [Message("user", [Text(prompt)])]


def test_prompts_that_cannot_be_said() -> None:
    ids_only = Request("m", [], prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=5))
    assert through(OpenAICompletions(), ids_only) == ids_only
    for dialect in DIALECTS:
        with pytest.raises(ApiError):
            dialect.encode_request(ids_only)
    with pytest.raises(ApiError):
        OpenAICompletions().encode_request(Request("m", [Message("user", [Text("Hi.")])]))


# Replies.


def reply_through(dialect: Dialect, reply: Reply) -> Reply:
    return dialect.decode_reply(dialect.encode_reply(Request(reply.model, []), reply))


def reply_meaning(reply: Reply, *dialects: Dialect) -> dict[str, Any]:
    """A reply's turn loses what a turn of a conversation does. Seals are left out: every dialect that has them fills
    them in on the way out, Google's even where there was no thought. Neighbours of one kind are one part in any reply
    (see `polar.types`), as they are where a dialect leaves out what stood between them."""
    custom = [Tool(part.name, kind="custom") for part in reply.parts if isinstance(part, ToolCall)]
    (turn,) = meaning(Request("m", [Message("assistant", reply.parts)], custom), *dialects)["messages"]
    parts: list[dict[str, Any]] = []
    for part in turn["parts"]:
        part.pop("seal", None)
        if parts and part["part"] == parts[-1]["part"] != "call":
            parts[-1]["text"] += part["text"]
        elif part["part"] == "call" or part["text"]:
            parts.append(part)
    told: dict[str, Any] = json.loads(msgspec.json.encode(reply))
    told["parts"] = parts
    if ANTHROPIC in dialects:
        told["created"] = None  # a message has no time
    if RESPONSES in dialects or GOOGLE in dialects:
        told["stop_sequence"] = None  # these don't tell which one it was
    return told


@every_pair
@given(reply=replies())
@quick
def test_replies(one: Dialect, other: Dialect, reply: Reply) -> None:
    translated = reply_through(other, reply_through(one, reply))
    assert reply_meaning(translated, one, other) == reply_meaning(reply, one, other)


# Streams: put together, a stream is the whole reply to the same turn.


def written(dialect: Dialect, request: Request, events: list[ReplyEvent], reply: Reply, quiet: set[int]) -> list[Any]:
    """The events of a stream as a client decodes them, with keep-alives after the events numbered in `quiet`."""
    encoder = dialect.create_stream_encoder(request, EXCHANGE, reply.created)
    stream = [encoder.start(Usage(prompt=reply.usage.prompt))]
    for index, event in enumerate(events):
        stream.append(encoder.feed(event))
        if index in quiet:
            stream.append(encoder.keep_alive())
    stream.append(encoder.finish(reply))
    return [json.loads(data) for data in EventParser().feed(b"".join(stream)) if data != b"[DONE]"]


def chat_completion(chunks: list[Any]) -> Any:
    message: dict[str, Any] = {}
    choice: dict[str, Any] = {"index": 0, "message": message}
    for chunk in chunks[:-1]:
        (piece,) = chunk["choices"]
        assert chunk["usage"] is None
        for name, value in piece["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            (told,) = value
            made = message.setdefault("tool_calls", [])
            if told["index"] == len(made):
                made.append({name: value for name, value in told.items() if name != "index"})
                continue
            (kind,) = told.keys() - {"index"}
            for inner, more in told[kind].items():
                made[told["index"]][kind][inner] += more
        choice |= {name: value for name, value in piece.items() if name not in ("index", "delta")}
    last = chunks[-1]
    assert last["choices"] == []
    return last | {"object": "chat.completion", "choices": [choice]}


def responses_response(events: list[Any]) -> Any:
    """From the deltas; the last event, which repeats everything, must say the same."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[Any] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            continue
        item = output[event["output_index"]]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "output_text.done":
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "reasoning_summary_part.added":
            item["summary"].append(event["part"])
        elif kind == "reasoning_summary_text.delta":
            item["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind == "reasoning_summary_text.done":
            assert item["summary"][event["summary_index"]]["text"] == event["text"]
        elif kind == "reasoning_summary_part.done":
            assert item["summary"][event["summary_index"]] == event["part"]
        elif kind in ("function_call_arguments.delta", "custom_tool_call_input.delta"):
            item["arguments" if "function" in kind else "input"] += event["delta"]
        elif kind in ("function_call_arguments.done", "custom_tool_call_input.done"):
            name = "arguments" if "function" in kind else "input"
            assert item[name] == event[name]
        else:
            assert kind == "output_item.done"
            known_at_the_end = {
                name: event["item"][name] for name in ("status", "encrypted_content") if name in event["item"]
            }
            assert item | known_at_the_end == event["item"]
            output[event["output_index"]] = event["item"]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return response


def anthropic_message(events: list[Any]) -> Any:
    message: Any = None
    written_input: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    written_input[event["index"]] = written_input.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert events[-1]["type"] == "message_stop"
    for index, text in written_input.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:  # a stream has it as it was written; a whole reply can't
            message["content"][index]["input"] = {"__unparsedToolInput": {"raw": text, "len": len(text)}}
    return message


def google_response(chunks: list[Any]) -> Any:
    """All parts in one content, as our own client then reads them."""
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    whole = chunks[-1]
    whole["candidates"][0]["content"]["parts"] = parts
    return whole


def client_view(dialect: Dialect, events: list[Any]) -> Any:
    match dialect.name:
        case "openai_chat":
            return chat_completion(events)
        case "openai_responses":
            return responses_response(events)
        case "anthropic":
            return anthropic_message(events)
        case _:
            return google_response(events)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(streamed=streams(), visible=st.booleans(), quiet=st.sets(st.integers(0, 9), max_size=3))
@quick
def test_streams(dialect: Dialect, streamed: tuple[list[ReplyEvent], Reply], visible: bool, quiet: set[int]) -> None:
    events, reply = streamed
    request = Request("m", [], stream=True, thinking=Thinking(visible=visible))
    together = client_view(dialect, written(dialect, request, events, reply, quiet))
    whole = json.loads(dialect.encode_reply(request, reply))
    if dialect is GOOGLE:  # clients keep the pieces, so what must be the same is what they are read as
        assert GOOGLE.decode_reply(json.dumps(together).encode()) == GOOGLE.decode_reply(json.dumps(whole).encode())
    else:
        assert together == whole
