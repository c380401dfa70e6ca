"""Callers: harnesses that go through sessions call by call, against one server."""

import asyncio
import itertools
import time
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from benchmarks.calls import TURNS, CallSize, Template, make_nonce, make_template
from benchmarks.client import BenchmarkError, Connection, HttpAnswer, encode_post
from benchmarks.process import ServerProcess

ASK_FOR_IDS = '"logprobs":true,"return_token_ids":true'
"""What Polar adds by itself; through the other servers the caller asks for it."""

CALLERS = 8

# The servers that are compared, each a process of its own.
POLAR = "Polar"
OTHER = "Polar, other checkout"
FASTAPI = "FastAPI + httpx"
LITELLM = "LiteLLM"  # with the provider that any OpenAI-compatible server is named by
LITELLM_VLLM = "LiteLLM, hosted_vllm"  # with its provider for vLLM, which is lighter
RELAY = "aiohttp pass-through"


class Cost(Struct):
    """What a number of calls cost a server."""

    calls: int = 0
    cpu: float = 0.0  # seconds
    wall: float = 0.0

    @property
    def cpu_ms(self) -> float:
        return self.cpu / self.calls * 1e3

    @property
    def per_second(self) -> float:
        return self.calls / self.wall

    def add(self, other: "Cost") -> None:
        self.calls += other.calls
        self.cpu += other.cpu
        self.wall += other.wall


class _Created(Struct):
    session_id: str
    api_key: str


class Target:
    """A server as its callers see it. With a `control_port` it is Polar, whose sessions need a key each."""

    def __init__(
        self, name: str, port: int, server: ServerProcess | None, *, key: str = "none", control_port: int | None = None
    ) -> None:
        self.name = name
        self.port = port
        self.server = server
        self.sessions: list[str] = []
        self.control_port = control_port
        self._extra = "" if control_port else ASK_FOR_IDS
        self._key = key
        self._nonces = itertools.count(1)

    def make_template(
        self, size: CallSize, turn: int, dialect: str = "openai_chat", *, stream: bool = False
    ) -> Template:
        return make_template(size, turn, dialect, stream=stream, extra=self._extra)

    async def create_keys(self, count: int) -> Iterator[str]:
        """Keys of so many new sessions."""
        if self.control_port is None:
            return itertools.repeat(self._key, count)
        port, made = self.control_port, []

        async def create(numbers: Iterator[int]) -> None:
            connection = await Connection.open(port)
            for _ in numbers:
                answer = await connection.call(encode_post("/sessions", b"{}"))
                made.append(msgspec.json.decode(answer.body, type=_Created))
            connection.close()

        numbers = iter(range(count))
        await asyncio.gather(*(create(numbers) for _ in range(min(CALLERS, count))))
        self.sessions = [session.session_id for session in made]
        return iter([session.api_key for session in made])

    def open_session(self, key: str) -> "HarnessSession":
        return HarnessSession(self, key, make_nonce(next(self._nonces)))


class HarnessSession:
    """One harness run. Requests are ready-made bytes; each extends the one before."""

    def __init__(self, target: Target, key: str, nonce: bytes) -> None:
        self._target = target
        self._key = key
        self._nonce = nonce

    def make_request(self, size: CallSize, turn: int, dialect: str = "openai_chat", *, stream: bool = False) -> bytes:
        made = self._target.make_template(size, turn, dialect, stream=stream)
        return encode_post(made.path, made.body(self._nonce), self._key)


async def measure(target: Target, size: CallSize, calls_each: int, dialect: str = "openai_chat") -> Cost:
    """The cost of `calls_each` calls of each of the callers, who begin at different turns of their sessions, so that
    few calls have the same mean size as many."""
    sessions_each = -(-calls_each // TURNS) + 1
    keys = await target.create_keys(CALLERS * sessions_each)
    connections = [await Connection.open(target.port) for _ in range(CALLERS)]

    async def caller(number: int) -> None:
        turn = number * TURNS // CALLERS
        session = target.open_session(next(keys))
        for _ in range(calls_each):
            if turn == TURNS:
                turn, session = 0, target.open_session(next(keys))
            check_answer(await connections[number].call(session.make_request(size, turn, dialect)))
            turn += 1

    assert target.server is not None
    cpu, started_at = target.server.read_cpu_seconds(), time.monotonic()
    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    cost = Cost(CALLERS * calls_each, target.server.read_cpu_seconds() - cpu, time.monotonic() - started_at)
    for connection in connections:
        connection.close()
    return cost


def check_answer(answer: HttpAnswer) -> None:
    """A reply has the tool call that the engine wrote, in whatever dialect."""
    if b"bash" not in answer.body:
        raise BenchmarkError(
            f"A server answered without the model's turn: {answer.body[:300].decode(errors='replace')}"
        )
