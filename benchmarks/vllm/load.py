"""The load of `make bench-vllm`: sessions of several turns, in a process of its own.

    python -m benchmarks.vllm.load

It reads a `LoadJob` a line from standard input and prepares it, prints `true`, starts on the next line, and prints a
`LoadTally`.
All ways hold the same kind of session: a prompt that all sessions share, then in each turn a message of the session's
own and a reply. A session goes on from the reply that it got: as text where messages are sent, as token ids where ids
are sent, so an engine's cache of prefixes is of use to every way.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct, field

from benchmarks.process import print_message, run_async
from polar.config import EngineSettings
from polar.dialects.sse import EventParser
from polar.engines.base import TokenPrompt
from polar.engines.chat_wire import JSON_NULL
from polar.engines.vllm import VllmEngine
from polar.errors import PolarError
from polar.rendering.tokenizer import Tokenizer
from polar.types import Request, SamplingParams

WayName = Literal["gateway", "chat", "ids"]
_VOCABULARY = """self value return index request error for in range result handle session token stream parse import from
yield await class test assert path lines buffer state event update with open the of a is not when file line call write
read list name type data user time work change check build run code function method object order set table"""
_WORDS = _VOCABULARY.split()
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What the gateway sends, too, so that a model's own defaults don't make one way's distribution another one."""
_MARK = "reply"
_KEPT_ERRORS = 5
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)


class SessionShape(Struct, frozen=True):
    """Of every session. Words are about a token each."""

    turns: int = 10
    shared_words: int = 2_500
    message_words: int = 300
    least_tokens: int = 200  # sampled in a turn, at most: a number between these two, drawn per turn
    most_tokens: int = 256
    stream: bool = True

    def limit(self, session: int, turn: int) -> int:
        return random.Random(f"limit {session} {turn}").randint(self.least_tokens, self.most_tokens)


class LoadJob(Struct, frozen=True):
    """Some of a round's sessions, numbered from `first` on. With `keys` there is one of the gateway for each."""

    way: WayName
    url: str
    model: str
    tokenizer: str
    shape: SessionShape
    first: int
    sessions: int
    keys: list[str] = []


class LoadTally(Struct):
    """What came of a job. Tokens as the engine counts them."""

    tokens: int = 0
    prompt_tokens: int = 0
    calls: int = 0
    errors: int = 0
    first_errors: list[str] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)  # of each call; of whole replies: until it was there

    def add_error(self, error: Exception) -> None:
        self.errors += 1
        if len(self.first_errors) < _KEPT_ERRORS:
            self.first_errors.append(f"{type(error).__name__}: {error}"[:300])

    def add(self, other: "LoadTally") -> None:
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.calls += other.calls
        self.errors += other.errors
        self.first_errors = (self.first_errors + other.first_errors)[:_KEPT_ERRORS]
        self.first_token_ms += other.first_token_ms


Session = Callable[[LoadTally], Awaitable[None]]
"""Holds one session from its first turn to its last."""


async def run_sessions(sessions: list[Session]) -> LoadTally:
    """All at once. A call that fails is counted, and ends its session."""
    tally = LoadTally()

    async def hold(session: Session) -> None:
        try:
            await session(tally)
        except (PolarError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            tally.add_error(error)

    await asyncio.gather(*(hold(session) for session in sessions))
    return tally


def make_system_prompt(shape: SessionShape) -> str:
    """The same in every session."""
    return _make_text("system", shape.shared_words)


def make_message(session: int, turn: int, shape: SessionShape) -> str:
    """Unlike any other from its first word on."""
    return f"{session}.{turn} {_make_text(f'{session} {turn}', shape.message_words)}"


def _make_text(seed: str, words: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


# Messages


class _Turn(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Turn = field(default_factory=_Turn)
    message: _Turn = field(default_factory=_Turn)


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(Struct):
    """A whole one, or an event of a stream."""

    choices: list[_Choice] = field(default_factory=list)
    usage: _Usage | None = None
    error: msgspec.Raw = JSON_NULL


_reply = msgspec.json.Decoder(_Reply).decode


class ChatClient:
    """Sends a chat API the whole conversation with every turn."""

    def __init__(self, http: aiohttp.ClientSession, job: LoadJob) -> None:
        self._http = http
        self._url = f"{job.url}/v1/chat/completions"
        self._job = job
        fields: dict[str, Any] = {"model": job.model, "temperature": 1.0, "stream": job.shape.stream}
        if job.shape.stream:
            fields["stream_options"] = {"include_usage": True}
        if job.way == "chat":  # a gateway asks for log-probabilities by itself
            fields |= {"logprobs": True, "top_logprobs": 0, **_NEUTRAL}
        self._fields = fields

    def sessions(self) -> list[Session]:
        return [self._session(number) for number in range(self._job.sessions)]

    def _session(self, number: int) -> Session:
        shape, session = self._job.shape, self._job.first + number
        headers = {"Content-Type": "application/json"}
        if self._job.keys:
            headers["Authorization"] = f"Bearer {self._job.keys[number]}"
        asked = [make_message(session, turn, shape) for turn in range(shape.turns)]

        async def hold(tally: LoadTally) -> None:
            messages = [{"role": "system", "content": make_system_prompt(shape)}]
            for turn, text in enumerate(asked):
                messages.append({"role": "user", "content": text})
                body = self._fields | {"messages": messages, "max_tokens": shape.limit(session, turn)}
                said = await self._ask(msgspec.json.encode(body), headers, tally)
                messages.append({"role": "assistant", "content": said})

        return hold

    async def _ask(self, body: bytes, headers: dict[str, str], tally: LoadTally) -> str:
        started_at = time.perf_counter()
        first: float | None = None
        said: list[str] = []
        usage = _Usage()
        async with self._http.post(self._url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
            async for reply in _replies(answer, stream=self._job.shape.stream):
                if reply.error != JSON_NULL:
                    raise ValueError(bytes(reply.error).decode(errors="replace"))
                for choice in reply.choices:
                    text = choice.delta.content or choice.message.content
                    if text:
                        first = first or time.perf_counter()
                        said.append(text)
                usage = reply.usage or usage
        if not usage.completion_tokens:
            raise ValueError("The reply counts no tokens.")
        _count_call(tally, started_at, first, usage.completion_tokens, usage.prompt_tokens)
        return "".join(said)


async def _replies(answer: aiohttp.ClientResponse, *, stream: bool) -> AsyncIterator[_Reply]:
    if not stream:
        yield _reply(await answer.read())
        return
    parser = EventParser()
    async for piece in answer.content.iter_any():
        for data in parser.feed(piece):
            if data != b"[DONE]":
                yield _reply(data)


def _count_call(tally: LoadTally, began: float, first: float | None, tokens: int, prompt_tokens: int) -> None:
    ended = time.perf_counter()
    tally.calls += 1
    tally.tokens += tokens
    tally.prompt_tokens += prompt_tokens
    tally.first_token_ms.append(round(1e3 * ((first or ended) - began), 1))


# Token ids


class IdClient:
    """Sends the engine token ids as the gateway does, with nothing in between."""

    def __init__(self, engine: VllmEngine, tokenizer: Tokenizer, job: LoadJob) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._job = job

    def sessions(self) -> list[Session]:
        """Renders what can be rendered before the first reply."""
        return [self._session(self._job.first + number) for number in range(self._job.sessions)]

    def _session(self, session: int) -> Session:
        shape = self._job.shape
        asked = [make_message(session, turn, shape) for turn in range(shape.turns)]
        opening = [{"role": "system", "content": make_system_prompt(shape)}, {"role": "user", "content": asked[0]}]
        added = [self._tokenizer.encode_turns(self._tokenizer.template.render(opening)).tolist()]
        added += [self._encode_turn(text) for text in asked[1:]]

        async def hold(tally: LoadTally) -> None:
            ids: list[int] = []
            for turn, new in enumerate(added):
                ids += new[1:] if ids and ids[-1] == new[0] else new  # a turn's end token may have been sampled
                ids += await self._ask(ids, shape.limit(session, turn), tally)

        return hold

    def _encode_turn(self, text: str) -> list[int]:
        """From the end of a reply, with its end token, to where the next reply begins."""
        turns = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": text},
        ]
        _, _, behind = self._tokenizer.template.render(turns).partition(_MARK)
        return self._tokenizer.encode(behind)

    async def _ask(self, ids: list[int], limit: int, tally: LoadTally) -> list[int]:
        prompt = TokenPrompt(np.array(ids, np.int32), ",".join(map(str, ids)).encode())
        request = Request("", [], sampling=SamplingParams(temperature=1.0, max_tokens=limit))
        started_at = time.perf_counter()
        first: float | None = None
        sampled: list[int] = []
        counted: int | None = None
        async for chunk in self._engine.generate(request, stream=self._job.shape.stream, prompt=prompt):
            if chunk.ids:
                first = first or time.perf_counter()
                sampled += chunk.ids
            if chunk.usage is not None:
                counted = chunk.usage.completion
        _count_call(tally, started_at, first, counted or len(sampled), len(ids))
        return sampled


# The process


async def _serve() -> None:
    load_tokenizer = lru_cache(Tokenizer.load)
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = msgspec.json.decode(line, type=LoadJob)
        async with contextlib.AsyncExitStack() as stack:
            if job.way == "ids":
                engine = VllmEngine(job.url, EngineSettings(kind="vllm", model=job.model))
                stack.push_async_callback(engine.close)
                await engine.start()
                sessions = IdClient(engine, load_tokenizer(job.tokenizer), job).sessions()
            else:
                connector = aiohttp.TCPConnector(limit=0)
                http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT))
                sessions = ChatClient(http, job).sessions()
            print_message(True)
            await asyncio.to_thread(sys.stdin.readline)
            print_message(await run_sessions(sessions))


if __name__ == "__main__":
    run_async(_serve())
