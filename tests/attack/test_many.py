"""Many callers at once: nothing is lost or mixed up, and when they are gone nothing of them is left."""

import asyncio
import gc
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polar.gateway.generation import Generation
from polar.records.exchange import Exchange
from polar.service import Service
from polar.types import Text
from tests.attack.parts import DIALECTS, Answer, Dialect, Wire, ask, bench, comes_true
from tests.attack.replies import DONE, STREAM_HEAD, chunked, encode, event, response

CALLERS = 200
WORDS = 12


def asked(call: dict[str, Any]) -> str:
    text: str = call["prompt"] if "prompt" in call else call["messages"][-1]["content"]
    return text


def ids_of(text: str) -> list[int]:
    """One token per word of the reply, told by the request alone."""
    return [1000 + int(text.split()[-1]) * WORDS + word for word in range(WORDS)]


def words_of(text: str) -> list[str]:
    return [f"w{text.split()[-1]}.{word} " for word in range(WORDS)]  # "1.1 " alone is in every status line


class Parrot:
    """Answers with words that tell which request they belong to."""

    def __init__(self, pause: Callable[[], float] = lambda: 0.0) -> None:
        self.running = 0
        self._pause = pause

    async def __call__(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        text, legacy = asked(call), "prompt" in call
        self.running += 1
        try:
            if not call.get("stream"):
                await asyncio.sleep(self._pause())
                choice: dict[str, Any] = {"index": 0, "token_ids": ids_of(text), "finish_reason": "stop"}
                said = "".join(words_of(text))
                choice |= {"text": said} if legacy else {"message": {"content": said}}
                writer.write(response(encode({"choices": [choice], "prompt_token_ids": [1, 2]})))
                return
            writer.write(STREAM_HEAD)
            for number, (id, word) in enumerate(zip(ids_of(text), words_of(text), strict=True)):
                part: dict[str, Any] = {"text": word} if legacy else {"delta": {"content": word}}
                end = {"finish_reason": "stop"} if number == WORDS - 1 else {}
                top = {} if number else {"prompt_token_ids": [1, 2]}
                writer.write(chunked(event(choices=[{"index": 0, "token_ids": [id], **part, **end}], **top), end=False))
                await writer.drain()
                await asyncio.sleep(self._pause())
            writer.write(chunked(DONE))
        finally:
            self.running -= 1


def said(dialect: Dialect, answer: Answer, stream: bool) -> str:
    """The text of an answer, put together as a client does."""
    if not stream:
        body = json.loads(answer.body)
        if dialect.name == "openai_chat":
            return str(body["choices"][0]["message"]["content"])
        if dialect.name == "openai_completions":
            return str(body["choices"][0]["text"])
        if dialect.name == "openai_responses":
            return str(body["output"][0]["content"][0]["text"])
        if dialect.name == "anthropic":
            return str(body["content"][0]["text"])
        return str(body["candidates"][0]["content"]["parts"][0]["text"])
    pieces = []
    for line in answer.body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line[6:])
        if dialect.name == "openai_chat":
            pieces += [choice["delta"].get("content") or "" for choice in data["choices"]]
        elif dialect.name == "openai_completions":
            pieces += [choice["text"] for choice in data["choices"]]
        elif dialect.name == "openai_responses":
            pieces += [data["delta"]] if data["type"] == "response.output_text.delta" else []
        elif dialect.name == "anthropic":
            pieces += [data["delta"]["text"]] if data["type"] == "content_block_delta" else []
        else:
            parts = data["candidates"][0]["content"].get("parts", []) if data.get("candidates") else []
            pieces += [part.get("text", "") for part in parts]
    return "".join(pieces)


def text_of(exchange: Exchange) -> str:
    assert exchange.reply is not None
    return "".join(part.text for part in exchange.reply.parts if isinstance(part, Text))


def request_text(exchange: Exchange) -> str:
    """The number that a request carries, out of whatever shape its dialect has."""
    text = msgspec.json.encode(exchange.build_request_body()).decode()
    return text[text.index("call number ") :].split('"')[0]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def left_over() -> int:
    """Generations that are still in memory."""
    gc.collect()
    return sum(type(thing) is Generation for thing in gc.get_objects())


async def quiet(service: Service, engine: Parrot) -> None:
    await comes_true(lambda: not engine.running and not any(replica.running for replica in service.pool.replicas))


@pytest.mark.parametrize("sessions", [1, CALLERS])
async def test_everyone_gets_their_own_reply(tmp_path: Path, sessions: int) -> None:
    parrot = Parrot(lambda: 0.001)
    async with bench(tmp_path) as it:
        it.engine.script = parrot
        keys = [await it.service.sessions.create({}) for _ in range(sessions)]
        await ask(it.url, it.key, text="call number 0")  # what is opened once is open now
        tasks, files = len(asyncio.all_tasks()), open_files()

        async def call(number: int) -> None:
            dialect, stream = DIALECTS[number % len(DIALECTS)], number % 2 == 0
            text = f"call number {number}"
            answer = await ask(it.url, keys[number % sessions][1], dialect, stream=stream, text=text)
            assert answer.status == 200, answer
            assert said(dialect, answer, stream) == "".join(words_of(text))

        await asyncio.gather(*(call(number) for number in range(CALLERS)))
        await quiet(it.service, parrot)
        seen = []
        for session, _ in keys:
            found = [exchange async for exchange in it.service.store.read_exchanges(session.session_id)]
            assert sorted(exchange.seq for exchange in found) == list(range(len(found)))
            for exchange in found:
                text = request_text(exchange)
                assert exchange.status == "complete"
                assert exchange.sampled_ids is not None
                assert exchange.sampled_ids.tolist() == ids_of(text)
                assert text_of(exchange) == "".join(words_of(text))
                seen.append(int(text.split()[-1]))
        assert sorted(seen) == list(range(CALLERS))
        await it.engine.hang_up()
        await comes_true(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files)
        assert left_over() == 0


async def test_a_thousand_harnesses_that_go_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "polar")  # pytest keeps what is logged, and with it what that refers to
    chance = random.Random(7)
    parrot = Parrot(lambda: chance.uniform(0, 0.004))
    async with bench(tmp_path, gateway={"grace": 0.02}) as it:
        it.engine.script = parrot
        await ask(it.url, it.key, text="call number 0")
        tasks, files = len(asyncio.all_tasks()), open_files()
        received: dict[int, bytes] = {}

        async def leave(number: int) -> None:
            """At some moment between the first byte of the request and the last one of the reply."""
            path, body = DIALECTS[number % len(DIALECTS)].call(stream=number % 4 != 0, text=f"call number {number}")
            async with Wire.open(it.url) as wire:
                data = encode(body)
                head = wire.head("POST", path, {"Authorization": f"Bearer {it.key}"}, len(data))
                moment = chance.uniform(0, 0.08)
                await wire.send((head + data)[: None if moment > 0.005 else chance.randrange(len(data))])
                try:
                    async with asyncio.timeout(moment):
                        while piece := await wire.reader.read(65536):
                            received[number] = received.get(number, b"") + piece
                except TimeoutError:
                    wire.writer.transport.abort()

        for start in range(0, 1000, 100):
            await asyncio.gather(*(leave(number) for number in range(start, start + 100)))
        await asyncio.sleep(0.1)
        await quiet(it.service, parrot)
        for exchange in await it.exchanges():
            text = request_text(exchange)
            sampled = [] if exchange.sampled_ids is None else exchange.sampled_ids.tolist()
            assert sampled == ids_of(text)[: len(sampled)]
            assert 0 <= exchange.delivered <= len(sampled)
            words = words_of(text)
            came = received.get(int(text.split()[-1]), b"")
            assert not any(word.encode() in came for word in words[len(sampled) :])
            if exchange.status == "complete":
                assert exchange.delivered == len(sampled) == WORDS
            elif sampled:
                # What the harness saw was delivered; what it did not see may still have been on its way.
                heard = [number for number, word in enumerate(words) if word.encode() in came]
                assert exchange.delivered > max(heard, default=-1)
        statuses = {exchange.status for exchange in await it.exchanges()}
        assert statuses <= {"complete", "partial", "failed"}
        assert len(statuses) > 1  # a busy machine may bring none of one kind about
        assert (await it.ask(text="call number 5")).status == 200
        await it.engine.hang_up()
        await comes_true(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files)
        assert left_over() == 0
