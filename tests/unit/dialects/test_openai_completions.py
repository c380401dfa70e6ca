"""Legacy Completions: raw prompts, as text or as token ids, and text back."""

import json
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from polar.dialects.openai_completions import CompletionRequest, OpenAICompletions
from polar.errors import ApiError, EngineError
from polar.types import (
    FinishReason,
    Message,
    Reply,
    ReplyEvent,
    Request,
    SamplingParams,
    Text,
    TextDelta,
    TokenLogprob,
    Usage,
)
from tests.unit.dialects.openai_client import EXCHANGE, failing, parts, streaming, whole, written

completions = OpenAICompletions()
ASKED = Request("m", [], prompt="Once", stream=True)


def decode(body: dict[str, Any]) -> Request:
    return completions.decode_request(completions.split(json.dumps(body).encode()), {})


def ask(**fields: Any) -> Request:
    return decode({"model": "m", "prompt": "Once", **fields})


def sent(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(completions.encode_request(request))
    return body


def refused(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(body)
    return caught.value


# Requests


@pytest.mark.parametrize(
    ("wire", "prompt"),
    [
        ("Once", "Once"),
        ("", ""),
        ([1, 2, 3], [1, 2, 3]),
        ([7], [7]),
        (["Once"], "Once"),
        ([[1, 2]], [1, 2]),
    ],
)
def test_prompts(wire: Any, prompt: str | list[int]) -> None:
    request = ask(prompt=wire)
    assert request.prompt == prompt
    assert request.messages == []
    assert sent(request)["prompt"] == prompt


@pytest.mark.parametrize(
    "prompt", [None, [], ["a", "b"], [[1], [2]], [1, "a"], [1, [2]], ["a", 1], 1, {}, [-1], [2**31], [1.5], [[["a"]]]]
)
def test_what_is_not_one_prompt_is_refused(prompt: Any) -> None:
    error = refused({"model": "m", "prompt": prompt})
    assert (error.kind, error.param) == ("invalid_request", "prompt")


def test_several_prompts_are_counted() -> None:
    assert "2 prompts" in refused({"model": "m", "prompt": ["a", "b"]}).message


def test_what_is_required() -> None:
    assert refused({"prompt": "Once"}).param == "model"
    assert refused({"model": "m"}).param == "prompt"
    assert refused({"model": "m", "messages": [{"role": "user", "content": "x"}]}).param == "prompt"


def test_fields() -> None:
    request = ask(
        temperature=0.5,
        top_k=5,
        max_tokens=7,
        stop=["\n"],
        seed=1,
        logit_bias={"1": 2},
        logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
    )
    assert request == Request(
        "m",
        [],
        sampling=SamplingParams(temperature=0.5, top_k=5, max_tokens=7, stop=["\n"], seed=1, logit_bias={"1": 2.0}),
        stream=True,
        logprobs=3,
        prompt="Once",
    )
    assert completions.decode_request(completions.split(completions.encode_request(request)), {}) == request


def test_the_limit_that_the_api_promises() -> None:
    assert ask().sampling.max_tokens == 16


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"best_of": 2}, {"echo": True}, {"suffix": "end"}, {"response_format": {"type": "json_object"}}],
)
def test_what_would_change_the_sampling_is_refused(fields: dict[str, Any]) -> None:
    error = refused({"model": "m", "prompt": "Once", **fields})
    assert (error.kind, error.param) == ("unsupported", next(iter(fields)))


def test_neutral_fields_pass() -> None:
    assert ask(n=1, best_of=1, echo=False, suffix=None, logprobs=None, stop=None) == ask()


def test_messages_are_no_prompt() -> None:
    with pytest.raises(ApiError) as caught:
        completions.encode_request(Request("m", [Message("user", [Text("x")])]))
    assert caught.value.kind == "unsupported"


# Replies

TURNS: dict[str, tuple[list[ReplyEvent], FinishReason]] = {
    "text": ([TextDelta(" upon"), TextDelta(" a\n"), TextDelta(" ")], "stop"),
    "cut": ([TextDelta(" upon")], "length"),
    "nothing": ([], "stop"),
    "unicode": ([TextDelta("é \u2028 \U0001f9ea"), TextDelta('"\\ \r\n\n data: [DONE]\n\n')], "stop"),
}


def reply_of(events: list[ReplyEvent], finish_reason: FinishReason) -> Reply:
    usage = Usage(prompt=10, completion=4, cached=8)
    return Reply(EXCHANGE, "m", 1_700_000_000, parts(events), finish_reason, usage=usage)


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("name", TURNS)
def test_a_stream_says_what_the_whole_reply_says(name: str, size: int) -> None:
    events, finish_reason = TURNS[name]
    reply = reply_of(events, finish_reason)
    body = written(completions.create_stream_encoder(ASKED, EXCHANGE, reply.created), events, reply)
    chunks = [*streaming(body, size).completions.create(model="m", prompt="Once", stream=True)]
    completion = whole(completions.encode_reply(ASKED, reply)).completions.create(model="m", prompt="Once")
    (choice,) = completion.choices
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert choice.text == "".join(part.text for part in reply.parts if isinstance(part, Text))
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [finish_reason]
    assert choice.finish_reason == finish_reason
    for chunk in chunks:
        assert (chunk.id, chunk.object, chunk.model) == (f"cmpl-{EXCHANGE}", "text_completion", "m")
    assert (completion.id, completion.object, completion.created) == (
        f"cmpl-{EXCHANGE}",
        "text_completion",
        1_700_000_000,
    )
    assert chunks[-1].usage == completion.usage
    assert completion.usage is not None
    assert completion.usage.total_tokens == 14
    assert completions.decode_reply(completions.encode_reply(ASKED, reply)) == reply


def test_no_usage_where_none_was_asked_for() -> None:
    events, finish_reason = TURNS["text"]
    request = msgspec.structs.replace(ASKED, stream_usage=False)
    body = written(completions.create_stream_encoder(request, EXCHANGE, 7), events, reply_of(events, finish_reason))
    assert b"usage" not in body


def test_log_probabilities() -> None:
    request = msgspec.structs.replace(ASKED, logprobs=1)
    events: list[ReplyEvent] = [TextDelta("é b")]
    reply = reply_of(events, "stop")
    reply.logprobs = [
        TokenLogprob("é", -0.5, top_logprobs=[TokenLogprob("e", -0.25)]),
        TokenLogprob(" b", -1.5, top_logprobs=[TokenLogprob(" c", -0.5)]),
    ]
    completion = whole(completions.encode_reply(request, reply)).completions.create(model="m", prompt="Once")
    found = completion.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["é", " b"]
    assert found.token_logprobs == [-0.5, -1.5]
    assert found.top_logprobs == [{"e": -0.25}, {" c": -0.5}]
    assert found.text_offset == [0, 1]
    body = written(completions.create_stream_encoder(request, EXCHANGE, 7), events, reply)
    chunks = [*streaming(body, 5).completions.create(model="m", prompt="Once", stream=True)]
    assert [chunk.choices[0].logprobs for chunk in chunks if chunk.choices] == [None, found]
    assert completions.decode_reply(completions.encode_reply(request, reply)) == reply
    assert b'"logprobs":null' in completions.encode_reply(ASKED, reply)


def test_an_error_in_the_middle_of_a_stream() -> None:
    encoder = completions.create_stream_encoder(ASKED, EXCHANGE, 7)
    body = encoder.start(None) + encoder.feed(TextDelta("half")) + encoder.error(ApiError("engine", "It broke."))
    seen: list[Completion] = []
    stream = streaming(body, 3).completions.create(model="m", prompt="Once", stream=True)
    with pytest.raises(openai.APIError, match="It broke"):
        seen.extend(stream)
    assert [chunk.choices[0].text for chunk in seen] == ["half"]


def test_errors_have_openais_shape() -> None:
    with pytest.raises(openai.RateLimitError):
        failing(completions.encode_error(ApiError("rate_limit", "Slow down."))).completions.create(model="m", prompt="")


def test_an_answer_that_is_none() -> None:
    with pytest.raises(EngineError):
        completions.decode_reply(b'{"object":"error"}')


def test_route() -> None:
    (route,) = completions.routes
    assert route.path.match("/v1/completions")
    assert not route.path.match("/v1/chat/completions")


# Whatever comes in

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*CompletionRequest.__struct_fields__, "n", "echo", "suffix"}))


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(FIELDS | st.text(max_size=8), JSON, max_size=6))
def test_any_object_is_a_request_or_an_error(body: dict[str, Any]) -> None:
    for candidate in (body, {"model": "m", "prompt": "Once", **body}):
        try:
            request = decode(candidate)
        except ApiError:
            continue
        assert completions.decode_request(completions.split(completions.encode_request(request)), {}) == request
