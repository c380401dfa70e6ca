"""Engines that are down, slow, cut short, or answer garbage.

Whatever an engine does, a harness gets a valid reply or its provider's error, at once; what was sampled is recorded
with the right status; and the next good call works.
"""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.gateway.data_plane import DataPlane
from polar.records.exchange import Exchange
from tests.attack.parts import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    DIALECTS,
    GOOGLE,
    PATIENCE,
    RESPONSES,
    Bench,
    ByteEngine,
    Dialect,
    ask,
    bench,
    ends_in_error,
    is_error,
    recorded,
    sampled,
    still_works,
)
from tests.attack.replies import (
    DONE,
    GOOD,
    PROMPT,
    STREAM_HEAD,
    begin,
    choice,
    chunked,
    completion,
    event,
    finish,
    response,
    stream,
    token,
    usage,
    whole,
)
from tests.integration.stack import settings

NAN, INFINITY = math.nan, math.inf

# Streams that break


async def test_a_stream_cut_at_every_byte(tmp_path: Path) -> None:
    """What came is recorded, and the harness hears of the cut; all was said once the finish reason came."""
    data = stream(*GOOD)
    ends = {id: data.index(marker) + len(marker) for id, marker in ((11, GOOD[1]), (12, GOOD[2]), (2, GOOD[3]))}

    async def cut(bench: Bench, place: int) -> None:
        session, key = await bench.service.sessions.create({})
        answer = await ask(bench.url, key, stream=True, text=str(place))
        (exchange,) = await recorded_at_once(bench, session.session_id)
        came = [id for id, end in ends.items() if place >= end]
        assert sampled(exchange) == came, place
        if 2 in came:
            assert (exchange.status, exchange.delivered, exchange.untrainable) == ("complete", 3, None), place
            assert answer.body.endswith(DONE), place
        elif came:
            assert (exchange.status, exchange.delivered) == ("partial", len(came)), place
            assert exchange.prompt_ids is not None, place
            assert exchange.prompt_ids.tolist() == PROMPT
            assert exchange.finish_reason is None
            assert exchange.untrainable is None, place
            assert ends_in_error(CHAT, answer), place
        else:
            assert exchange.status == "failed", place
            assert exchange.untrainable == "no_reply"
            if answer.status == 200:
                assert ends_in_error(CHAT, answer), place
            else:
                is_error(CHAT, answer)

    async with bench(tmp_path, gateway={"grace": 0.1}) as it:

        async def script(call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            writer.write(data[: int(call["messages"][0]["content"])])
            await writer.drain()
            writer.close()

        it.engine.script = script
        places = range(len(data))
        for start in range(0, len(places), 16):
            await asyncio.gather(*(cut(it, place) for place in places[start : start + 16]))
        await still_works(it)


async def recorded_at_once(bench: Bench, session_id: str) -> list[Exchange]:
    """What is recorded of a session whose one call was answered, with the correction that may follow at once."""
    await bench.service.sessions.end(session_id)
    return [exchange async for exchange in bench.service.store.read_exchanges(session_id)]


async def test_a_stream_in_single_bytes_is_whole(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.engine.replay(STREAM_HEAD + chunked(*(bytes([byte]) for byte in b"".join(GOOD))))
        answer = await it.ask(stream=True)
        assert answer.body.endswith(DONE)
        (exchange,) = await it.recorded(1)
        assert (exchange.status, sampled(exchange), exchange.untrainable) == ("complete", [11, 12, 2], None)


BROKEN_STREAMS = {
    "an error event": [*GOOD[:3], event(error={"message": "out of memory", "code": 500}), DONE],
    "an error that is a string": [*GOOD[:3], event(error="out of memory"), DONE],
    "no finish reason": [*GOOD[:3], DONE],
    "garbage": [*GOOD[:3], b"data: {]\n\n", DONE],
    "bytes that are no text": [*GOOD[:3], b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'],
    "an unpaired surrogate": [*GOOD[:3], b'data: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n'],
    "deep nesting": [*GOOD[:3], b'data: {"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"],
    "choices of a wrong type": [*GOOD[:3], event(choices="none"), DONE],
    "a number for a text": [*GOOD[:3], event(choices=[choice(delta={"content": 5})]), DONE],
    "ids that are fractions": [*GOOD[:3], token("x", 1.5), finish(), DONE],
    "ids that are words": [*GOOD[:3], token("x", "x"), finish(), DONE],
    "calls whose pieces are mixed": [
        *GOOD[:3],
        event(choices=[choice(delta={"tool_calls": [{"index": 1, "function": {"name": "a", "arguments": "{"}}]})]),
        event(choices=[choice(delta={"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]})]),
        finish(),
    ],
    "a call before all calls": [
        *GOOD[:3],
        event(choices=[choice(delta={"tool_calls": [{"index": -1, "function": {"arguments": "}"}}]})]),
        finish(),
    ],
    "nothing more": GOOD[:3],
}


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC, GOOGLE], ids=lambda dialect: dialect.name)
async def test_streams_that_go_wrong_midway(tmp_path: Path, dialect: Dialect) -> None:
    """The harness sees its provider's way of breaking off, and what had come is recorded as it came."""
    async with bench(tmp_path) as it:
        for name, pieces in BROKEN_STREAMS.items():
            await it.new_session()
            it.engine.replay(stream(*pieces))
            answer = await it.ask(dialect, stream=True)
            assert ends_in_error(dialect, answer), (name, answer)
            (exchange,) = await recorded_at_once(it, it.session_id)
            assert exchange.status == "partial", name
            assert sampled(exchange)[:2] == [11, 12], name
            assert exchange.error, name
            assert exchange.prompt_ids is not None, name
        await it.new_session()
        await still_works(it)


FIRST = {
    "nothing at all": b"",
    "half a status line": b"HTTP/1.1 2",
    "no HTTP": b"\x15\x03\x01\x00\x02\x02\x28",
    "an empty answer": response(b""),
    "a page": response(b"<html><body>It works!</body></html>", content_type="text/html"),
    "half of a reply": response(whole()[:-40]),
    "a reply that is announced and not sent": response(whole())[:-40],
    "a list": response(b"[]"),
    "a number": response(b"17"),
    "nothing in it": response(b"{}"),
    "no choices": response(whole(choices=[])),
    "null for choices": response(b'{"choices":null}'),
    "no message": response(whole(message=None)),
    "a number for a text": response(whole(message={"content": 5})),
    "deep nesting": response(b"[" * 100_000 + b"]" * 100_000),
    "bytes that are no text": response(whole().replace(b"one two", b"\xff\xfe")),
    "no gzip, though it says so": response(whole(), extra="Content-Encoding: gzip\r\n"),
    "an error with status 200": response(b'{"error":{"message":"no"}}'),
    "401": response(b'{"error":{"message":"bad key"}}', "401 Unauthorized"),
    "404": response(b"not found", "404 Not Found", "text/plain"),
    "500": response(b"\xff\xfe\x00", "500 Oh No", "application/octet-stream"),
    "500, not text": response(b'{"message":"\xff"}', "500 Oh No"),
    "500, deep nesting": response(b'{"message":' + b"[" * 50_000, "500 Oh No"),
    "503": response(b"", "503 Busy"),
    "an unknown status": response(b"{}", "799 Whatever"),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
}


@pytest.mark.parametrize("streaming", [False, True])
async def test_answers_that_are_none(tmp_path: Path, streaming: bool) -> None:
    """Before anything was sampled the harness gets an error with a status of its own, in each dialect."""
    async with bench(tmp_path) as it:
        for name, data in FIRST.items():
            for dialect in DIALECTS:
                await it.new_session()
                it.engine.replay(data)
                answer = await it.ask(dialect, stream=streaming)
                message = is_error(dialect, answer)
                assert "Polar's gateway failed" not in message, name
                (exchange,) = await recorded_at_once(it, it.session_id)
                assert (exchange.status, exchange.untrainable) == ("failed", "no_reply"), name
                assert exchange.error
        await it.new_session()
        await still_works(it)


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        ("429 Slow Down", "too many requests", 429),
        ("400 Bad", "This model's maximum context length is 4096 tokens", 400),
        ("400 Bad", "unknown field", 400),
        ("413 Large", "too large", 413),
        ("422 No", "no", 400),
        ("504 Late", "late", 504),
    ],
)
async def test_refusals_keep_their_meaning(tmp_path: Path, status: str, text: str, told: int) -> None:
    async with bench(tmp_path) as it:
        it.engine.replay(
            response(json.dumps({"error": {"message": text}}).encode(), status, extra="Retry-After: 7\r\n")
        )
        for dialect in DIALECTS:
            for streaming in (False, True):
                assert text in is_error(dialect, await it.ask(dialect, stream=streaming), told)


async def test_redirects_are_not_followed(tmp_path: Path) -> None:
    """Neither for sampling nor for anything beside it: prompts and the engine's key stay where they belong."""
    async with ByteEngine() as elsewhere, bench(tmp_path, engine={"api_key": "secret"}) as it:
        elsewhere.replay(response(whole()))
        for code in ("301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"):
            it.engine.replay(response(b"", code, extra=f"Location: {elsewhere.url}/v1/chat/completions\r\n"))
            for streaming in (False, True):
                is_error(CHAT, await it.ask(stream=streaming))
            async with asyncio.timeout(PATIENCE):
                counted = await ask(it.url, it.key, ANTHROPIC._replace(path="/v1/messages/count_tokens"))
            is_error(ANTHROPIC, counted)
        assert elsewhere.connections == 0
        await still_works(it)


# Token ids and log-probabilities that are none

CONTENT: dict[str, tuple[dict[str, Any], str | None]] = {
    "as they should be": ({}, None),
    "NaN": ({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": NAN}, {"logprob": -1}]}}, "logprobs_nan"),
    "null": ({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": None}, {"logprob": -1}]}}, "logprobs_nan"),
    "infinite": (
        {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -INFINITY}, {"logprob": -1}]}},
        "logprobs_nan",
    ),
    "too small for a float": ({"logprobs": {"content": [{"logprob": -1e39}] * 3}}, "logprobs_infinite"),
    "a sentinel": (
        {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999}, {"logprob": -1}]}},
        "logprobs_sentinel",
    ),
    "positive": ({"logprobs": {"content": [{"logprob": 0.5}] * 3}}, "logprobs_positive"),
    "short": ({"logprobs": {"content": [{"logprob": -0.5}] * 2}}, "logprobs_short"),
    "long": ({"logprobs": {"content": [{"logprob": -0.5}] * 4}}, "logprobs_long"),
    "none": ({"logprobs": None}, "logprobs_missing"),
    "an empty object": ({"logprobs": {}}, "logprobs_missing"),
    "ids missing": ({"token_ids": None}, "no_token_ids"),
    "no ids": ({"token_ids": []}, "no_token_ids"),
    "negative ids": ({"token_ids": [11, -12, 2]}, "token_ids_invalid"),
    "ids beyond 32 bits": ({"token_ids": [11, 2**31, 2]}, "token_ids_invalid"),
    "ids beyond 64 bits": ({"token_ids": [11, 2**64, 2]}, "token_ids_invalid"),
    "fewer ids than were counted": ({"usage": {"prompt_tokens": 3, "completion_tokens": 9}}, "token_ids_short"),
    "no prompt": ({"prompt_token_ids": None}, "no_prompt_ids"),
    "a prompt of words": ({"prompt_token_ids": ["a", "b"]}, "no_prompt_ids"),
    "a prompt that is a word": ({"prompt_token_ids": "abc"}, "no_prompt_ids"),
    "a prompt beyond 32 bits": ({"prompt_token_ids": [5, 2**31]}, "no_prompt_ids"),
    "a negative prompt": ({"prompt_token_ids": [5, -1]}, "prompt_ids_invalid"),
    "an abort": ({"finish_reason": "abort"}, "aborted"),
}


async def test_a_whole_reply_says_why_it_may_not_be_trained(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        for name, (fields, reason) in CONTENT.items():
            await it.new_session()
            it.engine.replay(response(whole(**fields)))
            answer = await it.ask(ANTHROPIC)
            assert answer.status == 200, (name, answer)
            assert b"one two" in answer.body
            (exchange,) = await it.recorded(1)
            assert exchange.status == "complete", name
            assert exchange.untrainable == reason, name


def odd_chunk(**fields: Any) -> list[bytes]:
    odd: dict[str, Any] = {"delta": {"content": "two"}, "token_ids": [12], "logprobs": {"content": [{"logprob": -0.5}]}}
    return [begin(), token("one ", 11), event(choices=[choice(**odd | fields)]), finish(), usage(), DONE]


STREAMED: dict[str, tuple[list[bytes], str | None]] = {
    "as they should be": (GOOD, None),
    "no usage": ([*GOOD[:4], DONE], None),
    "usage null": ([*GOOD[:4], event(choices=[], usage=None), DONE], None),
    "usage of nulls": ([*GOOD[:4], usage(None, None), DONE], None),
    "negative usage": ([*GOOD[:4], usage(-5, -7), DONE], None),
    "no end mark": (GOOD[:5], None),
    "two finish reasons": ([*GOOD[:4], event(choices=[choice(finish_reason="stop")]), *GOOD[4:]], None),
    "chunks without choices": ([event(choices=[]), *GOOD[:3], event(), *GOOD[3:]], None),
    "comments and other fields": ([b": hello\n\nid: 5\nretry: 9\n\n", *GOOD], None),
    "white space": ([piece.replace(b'":', b'" : ') for piece in GOOD], None),
    "the prompt in every chunk": (
        [piece.replace(b'{"choices"', b'{"prompt_token_ids":[5,6,7],"choices"') for piece in GOOD],
        None,
    ),
    "carriage returns": ([b"".join(GOOD).replace(b"\n", b"\r\n")], None),
    "one token without its log-probability": (odd_chunk(logprobs=None), "logprobs_short"),
    "one log-probability too many": (odd_chunk(logprobs={"content": [{"logprob": -0.5}] * 2}), "logprobs_long"),
    "log-probabilities at other tokens": (
        [
            begin(),
            event(choices=[choice(delta={"content": "one "}, token_ids=[11])]),
            event(
                choices=[
                    choice(delta={"content": "two"}, token_ids=[12], logprobs={"content": [{"logprob": -0.5}] * 2})
                ]
            ),
            *GOOD[3:],
        ],
        "logprobs_misaligned",
    ),
    "one chunk without ids": (odd_chunk(token_ids=None, logprobs=None), "token_ids_short"),
    "a NaN": (odd_chunk(logprobs={"content": [{"logprob": NAN}]}), "logprobs_nan"),
    "an id beyond 32 bits": (odd_chunk(token_ids=[2**40]), "token_ids_invalid"),
    "a negative id": (odd_chunk(token_ids=[-1]), "token_ids_invalid"),
    "a prompt beyond 32 bits": ([begin([2**40]), *GOOD[1:]], "no_prompt_ids"),
    "a prompt that is none": ([begin({"a": 1}), *GOOD[1:]], "no_prompt_ids"),
    "an abort": ([*GOOD[:3], finish("abort"), *GOOD[4:]], "aborted"),
    "an unknown finish reason": ([*GOOD[:3], finish("tired"), *GOOD[4:]], None),
}


async def test_a_stream_says_why_it_may_not_be_trained(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        for name, (pieces, reason) in STREAMED.items():
            await it.new_session()
            it.engine.replay(stream(*pieces))
            answer = await it.ask(ANTHROPIC, stream=True)
            assert b"message_stop" in answer.body, (name, answer)
            (exchange,) = await it.recorded(1)
            assert exchange.status == "complete", name
            assert exchange.untrainable == reason, name
            assert exchange.usage.completion >= 0


async def test_what_harnesses_see_of_log_probabilities_that_are_none(tmp_path: Path) -> None:
    """A harness that asks for them gets a number all the same."""
    async with bench(tmp_path) as it:
        spoiled = [{"token": "one", "logprob": NAN}, {"token": "two", "logprob": None}, {"token": "", "logprob": -1}]
        it.engine.replay(response(whole(logprobs={"content": spoiled})))
        answer = await it.ask(logprobs=True)
        shown = json.loads(answer.body)["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in shown] == [-9999, -9999, -1]
        it.engine.replay(stream(begin(), token("one", 11, NAN), token("two", 12, None), finish(), DONE))
        answer = await it.ask(stream=True, logprobs=True)
        assert answer.body.endswith(DONE)
        assert [exchange.untrainable for exchange in await it.recorded(2)] == ["logprobs_nan"] * 2


CALLS: dict[str, list[Any]] = {
    "no name": [{"index": 0, "id": "a", "function": {"arguments": "{}"}}],
    "nothing": [{}],
    "an index that is skipped": [{"index": 7, "id": "a", "function": {"name": "f", "arguments": "{}"}}],
    "arguments that are no JSON": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{oops"}}],
    "the same id twice": [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"index": 1, "id": "a", "function": {"name": "g", "arguments": "{}"}},
    ],
}


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC, GOOGLE], ids=lambda dialect: dialect.name)
async def test_odd_tool_calls(tmp_path: Path, dialect: Dialect) -> None:
    """They are handed on as the model wrote them: whole JSON for the harness, streamed and not."""
    async with bench(tmp_path) as it:
        for name, calls in CALLS.items():
            for streaming in (False, True):
                await it.new_session()
                turn = {"tool_calls": calls}
                if streaming:
                    tail = [finish("tool_calls"), usage(3, 2), DONE]
                    it.engine.replay(
                        stream(
                            begin(),
                            event(choices=[choice(delta=turn, token_ids=[3], logprobs={"content": [{"logprob": -1}]})]),
                            *tail,
                        )
                    )
                else:
                    it.engine.replay(response(whole(message=turn, finish_reason="tool_calls")))
                answer = await it.ask(dialect, stream=streaming)
                assert answer.status == 200, (name, answer)
                (exchange,) = await it.recorded(1)
                assert exchange.status == "complete", name
                assert exchange.reply is not None
                assert len(exchange.reply.parts) == len(calls)


@pytest.mark.parametrize("written", ["", "{oops", '{"input":5}', "[" * 50_000, '{"input":"x","y":' + "[" * 50_000])
async def test_odd_input_of_custom_tools(tmp_path: Path, written: str) -> None:
    """What does not parse is handed on as the model wrote it."""
    calls = [{"index": 0, "id": "a", "function": {"name": "g", "arguments": written}}]
    async with bench(tmp_path) as it:
        tools = [{"type": "custom", "name": "g"}]
        it.engine.replay(response(whole(message={"tool_calls": calls}, finish_reason="tool_calls")))
        answer = await it.ask(RESPONSES, tools=tools)
        assert json.loads(answer.body)["output"][0]["input"] == written
        tail = [finish("tool_calls"), usage(3, 1), DONE]
        it.engine.replay(stream(begin(), event(choices=[choice(delta={"tool_calls": calls})]), *tail))
        answer = await it.ask(RESPONSES, stream=True, tools=tools)
        assert b"response.completed" in answer.body
        assert [exchange.status for exchange in await it.recorded(2)] == ["complete"] * 2


async def test_a_gigantic_line(tmp_path: Path) -> None:
    text = "x" * 4_000_000
    async with bench(tmp_path) as it:
        it.engine.replay(stream(begin(), token(text, 11), finish(), DONE))
        answer = await it.ask(stream=True)
        assert text.encode() in answer.body
        (exchange,) = await it.recorded(1)
        assert exchange.status == "complete"


# Engines that are slow, silent or gone


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_engine_that_falls_silent(tmp_path: Path, streaming: bool) -> None:
    silences = [b"", b"HTTP/1.1 200 OK\r\n", STREAM_HEAD, STREAM_HEAD + chunked(*GOOD[:3], end=False)]
    async with bench(tmp_path, engine={"timeout": 1}, gateway={"keep_alive": 0.1}) as it:

        async def silent(data: bytes) -> None:
            session, key = await it.service.sessions.create({})
            it.engine.replay(data, close=False)
            answer = await ask(it.url, key, ANTHROPIC, stream=streaming)
            if streaming:
                assert ends_in_error(ANTHROPIC, answer)
            else:
                is_error(ANTHROPIC, answer, 504)
            (exchange,) = await recorded_at_once(it, session.session_id)
            came = sampled(exchange)
            assert exchange.status == ("partial" if came else "failed")
            assert came == ([11, 12] if streaming and data is silences[-1] else [])

        for data in silences:
            await silent(data)
        await still_works(it)


async def test_an_engine_that_is_down_at_first_and_later(tmp_path: Path) -> None:
    engine = ByteEngine()
    port = int((await engine.start()).rsplit(":", 1)[1])
    await engine.stop()
    async with DataPlane(settings([engine.url], engine={"kind": "vllm", "timeout": 120}), tmp_path) as service:
        session, key = await service.sessions.create({})
        for dialect in DIALECTS:
            for streaming in (False, True):
                is_error(dialect, await ask(service.gateway_url, key, dialect, stream=streaming), 503)
        for _ in range(2):  # it comes up, and goes down again
            await engine.start(port)
            engine.replay(stream(*GOOD))
            answer = await ask(service.gateway_url, key, stream=True)
            assert answer.body.endswith(DONE)
            await engine.stop()
            is_error(CHAT, await ask(service.gateway_url, key, stream=True), 502, 503)
        found = await recorded(service, session.session_id, 14)
        assert [exchange.status for exchange in found].count("complete") == 2


async def test_an_engine_that_comes_late_is_asked_what_it_can_do(tmp_path: Path) -> None:
    """What kind its log-probabilities are must not depend on who was started first."""
    engine = ByteEngine()
    port = int((await engine.start()).rsplit(":", 1)[1])
    await engine.stop()

    async def after_temperature(call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        entry = {"token": "one two", "logprob": -1 / call["temperature"]}
        writer.write(response(whole(token_ids=[11], logprobs={"content": [entry]}, usage=None)))

    async with DataPlane(settings([engine.url], engine={"kind": "vllm", "timeout": 120}), tmp_path) as service:
        session, key = await service.sessions.create({})
        is_error(CHAT, await ask(service.gateway_url, key), 503)
        await engine.start(port)
        engine.script = after_temperature
        for answer in await asyncio.gather(*(ask(service.gateway_url, key, text=str(n)) for n in range(4))):
            assert answer.status == 200
        _, *found = await recorded(service, session.session_id, 5)
        assert {exchange.logprob_kind for exchange in found} == {"processed"}
        assert len(engine.calls) == 2 + 4  # it was asked once, by two samples
        await engine.stop()


async def test_an_engine_that_hangs_at_first_keeps_nothing_from_starting(tmp_path: Path) -> None:
    async with ByteEngine() as engine:
        engine.replay(b"", close=False)
        config = settings([engine.url], engine={"kind": "vllm", "timeout": 1})
        async with asyncio.timeout(PATIENCE), DataPlane(config, tmp_path) as service:
            _, key = await service.sessions.create({})
            engine.replay(response(whole()))
            assert (await ask(service.gateway_url, key)).status == 200


async def test_an_idle_connection_that_the_engine_closes_as_it_is_used(tmp_path: Path) -> None:
    """As servers do that close idle connections: not the call's fault, so it is made once more on a new one."""
    async with bench(tmp_path) as it:
        first = True

        async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal first
            if first:
                writer.write(response(whole()))
            else:
                it.engine.replay(response(whole()))
                writer.close()
            first = False

        it.engine.script = script
        assert (await it.ask(text="one")).status == 200
        assert (await it.ask(text="two")).status == 200
        assert [exchange.status for exchange in await it.recorded(2)] == ["complete"] * 2


@pytest.mark.parametrize(
    "models", [b"", b"[]", b"\xff", b"<html>", b'{"data":[{"id":5}]}', b'{"data":null}', b'{"x":' + b"[" * 50_000]
)
async def test_an_engine_that_lists_no_models(tmp_path: Path, models: bytes) -> None:
    """Polar starts, and says what is wrong when it is asked for something."""
    async with ByteEngine() as engine:
        engine.models = models
        async with DataPlane(settings([engine.url], engine={"kind": "vllm"}), tmp_path) as service:
            _, key = await service.sessions.create({})
            engine.replay(response(whole()))
            is_error(CHAT, await ask(service.gateway_url, key), 502)
            is_error(
                ANTHROPIC,
                await ask(service.gateway_url, key, ANTHROPIC._replace(path="/v1/messages/count_tokens")),
                502,
            )
            engine.models = ByteEngine().models
            assert (await ask(service.gateway_url, key)).status == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"count":"x"}', b'{"x":' + b"[" * 50_000, b'{"count":null}'])
async def test_a_count_that_is_none(tmp_path: Path, body: bytes) -> None:
    async with bench(tmp_path) as it:
        it.engine.replay(response(body))
        is_error(ANTHROPIC, await it.ask(ANTHROPIC._replace(path="/v1/messages/count_tokens")), 502)
        is_error(GOOGLE, await it.ask(GOOGLE._replace(path="/v1beta/models/m:countTokens")), 502)


async def test_the_legacy_route_is_no_worse(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.engine.replay(response(completion()))
        answer = await it.ask(COMPLETIONS)
        assert json.loads(answer.body)["choices"][0]["text"] == "one two"
        pieces = [
            event(
                choices=[
                    choice(text="one ", token_ids=[11], logprobs={"token_logprobs": [None]}, prompt_token_ids=PROMPT)
                ]
            ),
            event(
                choices=[
                    choice(text="two", token_ids=[12, 2], logprobs={"token_logprobs": [-1, -1]}, finish_reason="stop")
                ]
            ),
        ]
        it.engine.replay(stream(*pieces, DONE))
        answer = await it.ask(COMPLETIONS, stream=True)
        assert answer.body.endswith(DONE)
        it.engine.replay(stream(pieces[0], DONE))
        assert ends_in_error(COMPLETIONS, await it.ask(COMPLETIONS, stream=True))
        good, spoiled, cut = await it.recorded(3)
        assert good.untrainable is None
        assert spoiled.untrainable == "logprobs_nan"
        assert (cut.status, sampled(cut)) == ("partial", [11])
        np.testing.assert_array_equal(good.prompt_ids, PROMPT)
