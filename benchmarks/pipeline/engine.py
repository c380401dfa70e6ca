"""The engine of `make bench-pipeline`: vLLM's chat API with a fixed batch limit, and time instead of a model.

    python -m benchmarks.pipeline.engine SLOTS

Prints its address, and serves until its input ends. A call holds one of the slots for a fixed time per token that it
asks for; calls beyond the slots wait, first come, first served. When a slot is free and who gets it next follows from
the times of calls alone: that this process, or the caller, was late makes no slot look busy. `GET /calls` gives, and
forgets, what there was.
"""

import asyncio
import heapq
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Raw, Struct
from numpy.typing import NDArray

from benchmarks.process import print_message, run_async, wait_for_input_end

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
                web.get("/v1/models", self._list_models),
                web.post("/v1/chat/completions", self._answer_chat),
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

    async def _list_models(self, _: web.Request) -> web.Response:
        return _make_response(_MODELS)

    async def _answer_chat(self, request: web.Request) -> web.Response:
        arrived = time.monotonic()
        asked = msgspec.json.decode(await request.read(), type=_Asked)
        call = self._slots.take(arrived, asked.tokens * TOKEN_SECONDS)
        self._calls.append(call)
        await asyncio.sleep(call.ended - time.monotonic())
        return _make_response(_encode_reply(len(asked.messages) * _PROMPT, asked.tokens))

    async def _take_calls(self, _: web.Request) -> web.Response:
        calls, self._calls = self._calls, []
        return _make_response(msgspec.json.encode(calls))


def _encode_reply(prompt: int, tokens: int) -> bytes:
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


def _make_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


# How busy it was

Times = NDArray[np.float64]


class Window(Struct, frozen=True):
    """Seconds of the monotonic clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Utilization(Struct, frozen=True):
    """Shares of a window, 0 to 1."""

    seconds: float
    slots: float  # of all slots in use, on average: what the engine did of what it could
    full: float  # of the time with every slot in use
    waiting: float  # calls that waited for a slot, on average


def compute_utilization(calls: Sequence[EngineCall], slots: int, window: Window) -> Utilization:
    started_at, ended = _list_starts(calls), np.array([call.ended for call in calls])
    arrived = np.array([call.arrived for call in calls])
    held = _compute_overlap(started_at, ended, window)
    return Utilization(
        seconds=window.seconds,
        slots=float(held.sum()) / (slots * window.seconds),
        full=_compute_full_seconds(started_at, ended, slots, window) / window.seconds,
        waiting=float(_compute_overlap(arrived, started_at, window).sum()) / window.seconds,
    )


def compute_slot_series(calls: Sequence[EngineCall], window: Window, step: float) -> list[float]:
    """Slots in use, on average over each `step` seconds of the window."""
    edges = window.begin + step * np.arange(int(window.seconds / step) + 1)
    seconds = np.array([call.seconds for call in calls])
    used: Times = np.clip(edges[:, None] - _list_starts(calls), 0, seconds).sum(axis=1)  # slot-seconds up to each edge
    means: list[float] = (np.diff(used) / step).tolist()
    return means


def _list_starts(calls: Sequence[EngineCall]) -> Times:
    return np.array([call.began for call in calls])


def _compute_overlap(begin: Times, end: Times, window: Window) -> Times:
    within: Times = np.minimum(end, window.end) - np.maximum(begin, window.begin)
    return np.maximum(within, 0.0)


def _compute_full_seconds(began: Times, ended: Times, slots: int, window: Window) -> float:
    """Seconds of the window with every slot in use. One that passes from call to call at a moment is never free."""
    times = np.concatenate([began, ended])
    changes = np.repeat([1, -1], len(began))
    order = np.lexsort((changes, times))
    in_use = np.cumsum(changes[order])[:-1]
    times = times[order]
    spans = _compute_overlap(times[:-1], times[1:], window)
    return float(spans[in_use >= slots].sum())


# The process


async def serve(slots: int) -> None:
    async with SimulatedEngine(slots) as engine:
        print_message(engine.url)
        await wait_for_input_end()


if __name__ == "__main__":
    run_async(serve(int(sys.argv[1])))
