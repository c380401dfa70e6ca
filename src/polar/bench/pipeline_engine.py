"""The engine of `polar bench pipeline`: vLLM's chat API with a fixed batch limit, and time instead of a model.

    python -m polar.bench.pipeline_engine SLOTS

Prints its address, and serves until its input ends. A call holds one of the slots for a fixed time per token that it
asks for; calls beyond the slots wait, first come, first served. When a slot is free and who gets it next follows from
the times of calls alone: that this process, or the caller, was late makes no slot look busy. `GET /calls` gives, and
forgets, what there was.
"""

import asyncio
import heapq
import sys
import time

import msgspec
from aiohttp import web
from msgspec import Raw, Struct

from polar.cli.common import run_async

TOKEN_SECONDS = 0.01
_PROMPT = 200  # tokens of a message
_MODELS = b'{"object":"list","data":[{"id":"simulated","object":"model","max_model_len":131072}]}'


class EngineCall(Struct, array_like=True):
    """Seconds of the machine's monotonic clock, which all its processes share."""

    arrived: float
    began: float  # to hold a slot
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


class _Asked(Struct):
    messages: list[Raw]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 1


class Slots:
    """When each of them is free again."""

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count

    def take(self, arrived: float, seconds: float) -> EngineCall:
        call = EngineCall(arrived, max(arrived, self._free_at[0]), seconds)
        heapq.heapreplace(self._free_at, call.ended)
        return call


class SimulatedEngine:
    """Use it as an async context manager."""

    def __init__(self, slots: int) -> None:
        self.url = ""
        self._slots = Slots(slots)
        self._calls: list[EngineCall] = []
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "SimulatedEngine":
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.get("/calls", self._take_calls),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return _json(_MODELS)

    async def _chat(self, request: web.Request) -> web.Response:
        arrived = time.monotonic()
        asked = msgspec.json.decode(await request.read(), type=_Asked)
        call = self._slots.take(arrived, asked.tokens * TOKEN_SECONDS)
        self._calls.append(call)
        await asyncio.sleep(call.ended - time.monotonic())
        return _json(_reply(len(asked.messages) * _PROMPT, asked.tokens))

    async def _take_calls(self, _: web.Request) -> web.Response:
        calls, self._calls = self._calls, []
        return _json(msgspec.json.encode(calls))


def _reply(prompt: int, tokens: int) -> bytes:
    """The ids of a session are one sequence: each is its place."""
    logprob = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a" * tokens},
        "logprobs": {"content": [logprob] * tokens},
        "finish_reason": "stop",
        "token_ids": list(range(prompt, prompt + tokens)),
    }
    reply = {
        "id": "chatcmpl-simulated",
        "object": "chat.completion",
        "created": 0,
        "model": "simulated",
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
        "prompt_token_ids": list(range(prompt)),
    }
    return msgspec.json.encode(reply)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def serve(slots: int) -> None:
    async with SimulatedEngine(slots) as engine:
        sys.stdout.buffer.write(msgspec.json.encode(engine.url) + b"\n")
        sys.stdout.buffer.flush()
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()


if __name__ == "__main__":
    run_async(serve(int(sys.argv[1])))
