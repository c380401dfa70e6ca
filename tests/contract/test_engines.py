"""The contract of engines, kept by those of Polar. `make test-engines` and `polar doctor URL` ask real servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from polar.engines.embedded.server import EmbeddedServer
from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.plugins import load
from polar.testing import EngineContract
from tests.unit.engines.embedded import tiny

TURN = ScriptedTurn(text="Hello, and a few words more, so that there is something to break off.")


class _OnScriptedServer(EngineContract):
    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        async with ScriptedServer(Play([TURN]), rate=500, max_model_len=1000) as server:
            yield server.url


class TestScripted(_OnScriptedServer):
    plugin = load("engines", "scripted")
    is_deterministic = True


class TestVllm(_OnScriptedServer):
    plugin = load("engines", "vllm")
    is_deterministic = True


class TestOpenAI(_OnScriptedServer):
    """It knows of a server what every chat API has."""

    plugin = load("engines", "openai")
    accepts_token_ids = False
    can_freeze = False
    can_sleep = False


@pytest.mark.slow
class TestEmbedded(EngineContract):
    """A model of two layers with random weights."""

    plugin = load("engines", "embedded")
    is_deterministic = True
    can_sleep = False
    model: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        cls.model = tiny.make_model_folder(tmp_path_factory.mktemp("model") / "tiny")
        return cls.model

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        async with EmbeddedServer(self.model, tiny.OPTIONS) as server:
            yield server.url


class TestSglang(EngineContract):
    """Against a server that answers as SGLang's documentation says: its own route for ids, OpenAI's chat API."""

    plugin = load("engines", "sglang")
    is_deterministic = True
    can_freeze = False

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", _models), web.post("/generate", _generate)])
        app.add_routes([web.post("/v1/chat/completions", _chat), web.post("/tokenize", _tokenize)])
        memory = ("/release_memory_occupation", "/resume_memory_occupation")
        app.add_routes([web.post(path, _release_or_resume) for path in memory])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "max_model_len": 1000}]})


async def _stream(request: web.Request, events: list[Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\n\n")
    return response


async def _generate(request: web.Request) -> web.StreamResponse:
    """Each event repeats all tokens from the first on."""
    asked = await request.json()
    sampled = [sum(asked["input_ids"]) % 100 + index for index in range(9)]
    limit = asked["sampling_params"].get("max_new_tokens", 9)
    ids = sampled[:limit]
    reason = {"type": "length"} if len(ids) < len(sampled) else {"type": "stop"}

    def event(count: int) -> Any:
        return {
            "output_ids": ids[:count],
            "meta_info": {
                "output_token_logprobs": [[-0.5, id, None] for id in ids[:count]],
                "finish_reason": reason if count == len(ids) else None,
                "prompt_tokens": len(asked["input_ids"]),
                "completion_tokens": count,
            },
        }

    if not asked.get("stream"):
        return web.json_response(event(len(ids)))
    return await _stream(request, [event(count) for count in range(1, len(ids) + 1)])


async def _release_or_resume(_: web.Request) -> web.Response:
    return web.json_response({})


async def _tokenize(_: web.Request) -> web.Response:
    return web.json_response({"count": 4})


async def _chat(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "Hello."}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
    words = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("Hel", "lo.")]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return await _stream(request, [*words, last, {"choices": [], "usage": usage}])
