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

from polar.config import Settings
from polar.service import Service
from polar.store.base import Exchange
from tests.attack.parts import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    DIALECTS,
    DONE,
    GOOGLE,
    PATIENCE,
    RESPONSES,
    STREAM_HEAD,
    Answer,
    Bench,
    ByteEngine,
    Dialect,
    ask,
    bench,
    chunked,
    event,
    recorded,
    response,
    stream,
)
from tests.integration.stack import settings

PROMPT = [5, 6, 7]
NAN, INFINITY = math.nan, math.inf  # json.dumps writes them as NaN and Infinity, as careless servers do


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {}, **fields}


def begin(prompt: Any = PROMPT) -> bytes:
    return event(choices=[choice(delta={"role": "assistant", "content": ""})], prompt_token_ids=prompt)


def token(text: str, id: Any, logprob: Any = -0.5) -> bytes:
    logprobs = {"content": [{"token": text, "logprob": logprob}]}
    return event(choices=[choice(delta={"content": text}, token_ids=[id], logprobs=logprobs)])


def finish(reason: str = "stop") -> bytes:
    return event(choices=[choice(finish_reason=reason, token_ids=[2], logprobs={"content": [{"logprob": -0.1}]})])


def usage(prompt: Any = 3, completion: Any = 3) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


GOOD = [begin(), token("one ", 11), token("two", 12), finish(), usage(), DONE]


def whole(**fields: Any) -> bytes:
    """A whole chat completion; `fields` replace those of its choice, and a few of its top."""
    top = {name: fields.pop(name) for name in ("usage", "prompt_token_ids", "choices") if name in fields}
    message = {
        "index": 0,
        "message": {"role": "assistant", "content": "one two"},
        "token_ids": [11, 12, 2],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.5}, {"logprob": -0.1}]},
        "finish_reason": "stop",
    }
    reply = {
        "choices": [message | fields],
        "prompt_token_ids": PROMPT,
        "usage": {"prompt_tokens": 3, "completion_tokens": 3},
    }
    return json.dumps(reply | top).encode()


def completion(text: str = "one two") -> bytes:
    """The same from the legacy route."""
    fields = {"text": text, "logprobs": {"token_logprobs": [-0.5, -0.5, -0.1]}}
    return whole(**fields)


def is_error(dialect: Dialect, answer: Answer, *statuses: int) -> str:
    assert answer.status in (statuses or (502, 503, 504, 529)), answer
    return dialect.check_error(answer.body, answer.status)


def ends_in_error(dialect: Dialect, answer: Answer) -> bool:
    """Whether a stream that had begun ended the way the provider's do when they break."""
    assert answer.status == 200
    assert answer.whole
    last = answer.body.strip().rsplit(b"\n\n", 1)[-1]
    data = json.loads(last.rsplit(b"data: ", 1)[-1]) if b"[DONE]" not in last else {}
    return "error" in data or data.get("type") in ("error", "response.failed")


async def still_works(bench: Bench) -> None:
    bench.engine.replay(stream(*GOOD))
    answer = await bench.ask(stream=True)
    assert answer.status == 200
    assert answer.body.endswith(DONE)


def sampled(exchange: Exchange) -> list[int]:
    return [] if exchange.sampled_ids is None else exchange.sampled_ids.tolist()


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
    return [exchange async for exchange in bench.service.store.exchanges(session_id)]
