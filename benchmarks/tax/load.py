"""Conversations with an engine: through the gateway, as harnesses have them, or straight with the engine, in token ids.

Both ways prompts begin with the same kind of words, each conversation with its own, and go on from exactly what was
sampled: so an engine's cache of prefixes is of the same use to both.
"""

import asyncio
import random
import time
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct, field

from benchmarks.client import BenchmarkError
from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.dialects.sse import EventParser
from polar.engines.base import TokenPrompt
from polar.engines.vllm import VllmEngine
from polar.types import Request, SamplingParams

_WORDS = ("river", "stone", "lamp", "seven", "green", "walks", "under", "paper", "quiet", "north", "salt", "never")
_THEN = "Go on, and tell me what happened after that."


class TaxPlan(Struct, frozen=True):
    conversations: int = 16  # at the same time
    turns: int = 3
    words: int = 60  # that a conversation begins with
    tokens: int = 32  # sampled in a turn, at most
    rounds: int = 3  # of each way, taking turns


QUICK = TaxPlan(conversations=8, turns=2, tokens=16, rounds=2)


class RoundTotals(Struct):
    """Of all rounds of one way."""

    tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # tokens a second, of each round
    gateway_cpu: float = 0.0  # seconds that the gateway's process took

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.rates.append(tokens / seconds)


class ConversationClient(Protocol):
    """How conversations are had."""

    async def prepare(self, openings: list[str]) -> None:
        """What takes no part in the measurement: one conversation will begin with each of these."""
        ...

    async def talk(self, number: int, plan: TaxPlan) -> int:
        """One conversation: how many tokens were sampled."""
        ...


async def measure(way: ConversationClient, plan: TaxPlan, first: int, into: RoundTotals) -> None:
    """One round; its conversations are numbered from `first` on."""
    await way.prepare([_make_opening(first + number, plan.words) for number in range(plan.conversations)])
    started_at = time.monotonic()
    tokens = await asyncio.gather(*(way.talk(number, plan) for number in range(plan.conversations)))
    into.add(sum(tokens), time.monotonic() - started_at)


def _make_opening(number: int, words: int) -> str:
    """The number comes first: nobody else's prompt goes on as this one does."""
    chosen = random.Random(number).choices(_WORDS, k=words)
    return f"{number}: continue this tale in your own words. {' '.join(chosen)}"


# Straight to the engine


class _Tokens(Struct):
    tokens: list[int]


class DirectClient:
    """Token ids in and out. `between` stands between what was sampled and the next turn."""

    def __init__(self, url: str, between: list[int], *, logprobs: bool) -> None:
        self._url = url
        self._between = between
        self._engine = VllmEngine(url, EngineSettings(kind="vllm", logprobs=logprobs))
        self.prompts: list[list[int]] = []  # of the round, as conversations begin

    async def prepare(self, openings: list[str]) -> None:
        await self._engine.start()
        async with aiohttp.ClientSession() as http:
            self.prompts = [await self._tokenize(http, opening) for opening in openings]

    async def _tokenize(self, http: aiohttp.ClientSession, opening: str) -> list[int]:
        body = {"model": self._engine.model, "messages": _make_messages(opening), "add_generation_prompt": True}
        async with http.post(f"{self._url}/tokenize", json=body) as answer:
            if answer.status != 200:
                raise BenchmarkError(f"{self._url}/tokenize answered {answer.status}: {(await answer.text())[:300]}")
            return msgspec.json.decode(await answer.read(), type=_Tokens).tokens

    async def talk(self, number: int, plan: TaxPlan) -> int:
        ids, count = self.prompts[number], 0
        request = Request("", [], sampling=SamplingParams(temperature=1.0, max_tokens=plan.tokens))
        for _ in range(plan.turns):
            prompt = TokenPrompt(np.array(ids, np.int32), ",".join(map(str, ids)).encode())
            sampled: list[int] = []
            async for chunk in self._engine.generate(request, stream=True, prompt=prompt):
                sampled += chunk.ids
            count += len(sampled)
            ids = [*ids, *sampled, *self._between]
        return count

    async def close(self) -> None:
        await self._engine.close()


# Through the gateway


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = field(default_factory=_Delta)


class _Usage(Struct):
    completion_tokens: int = 0


class _Chunk(Struct):
    choices: list[_Choice] = field(default_factory=list)
    usage: _Usage | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode


class StoredExchange(Struct):
    """A call as it was stored."""

    prompt_ids: list[int] | None
    sampled_ids: list[int] | None
    logprobs: list[float] | None
    untrainable: str | None
    continuation: str | None

    @property
    def is_whole(self) -> bool:
        """It can be trained on."""
        return len(self.sampled_ids or ()) == len(self.logprobs or ()) > 0 and not self.untrainable


async def read_exchanges(http: aiohttp.ClientSession, control_url: str, session_id: str) -> list[StoredExchange]:
    """A session's calls, as they were stored."""
    async with http.get(f"{control_url}/sessions/{session_id}/exchanges") as answer:
        return msgspec.json.decode(await answer.read(), type=list[StoredExchange])


class CapturedClient:
    """OpenAI's chat API at the gateway; a session a conversation."""

    def __init__(self, gateway_url: str, client: AsyncClient, http: aiohttp.ClientSession) -> None:
        """`http` is for both planes."""
        self._url = f"{gateway_url}/v1/chat/completions"
        self._client = client
        self._http = http
        self._openings: list[str] = []
        self.sessions: list[dict[str, Any]] = []

    async def prepare(self, openings: list[str]) -> None:
        self._openings = openings
        self.sessions = [await self._client.new_session() for _ in openings]

    async def talk(self, number: int, plan: TaxPlan) -> int:
        messages, count = _make_messages(self._openings[number]), 0
        headers = {"Authorization": f"Bearer {self.sessions[number]['api_key']}"}
        wish = {"model": "any", "temperature": 1.0, "max_tokens": plan.tokens, "stream": True}
        wish["stream_options"] = {"include_usage": True}
        for _ in range(plan.turns):
            async with self._http.post(self._url, json=wish | {"messages": messages}, headers=headers) as answer:
                if answer.status != 200:
                    raise BenchmarkError(f"The gateway answered {answer.status}: {(await answer.text())[:300]}")
                text, sampled = await _read_reply(answer)
            count += sampled
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": _THEN}]
        return count

    async def stored(self, control_url: str) -> list[list[StoredExchange]]:
        """Of the last round, by session."""
        return [await read_exchanges(self._http, control_url, session["session_id"]) for session in self.sessions]


async def _read_reply(answer: aiohttp.ClientResponse) -> tuple[str, int]:
    """What was said, and how many tokens that took."""
    parser, text, count = EventParser(), "", 0
    async for piece in answer.content.iter_any():
        for data in parser.feed(piece):
            if data != b"[DONE]":
                chunk = _chunk(data)
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                count = chunk.usage.completion_tokens if chunk.usage is not None else count
    return text, count


def _make_messages(opening: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": opening}]
