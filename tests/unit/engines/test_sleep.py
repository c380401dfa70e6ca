"""How engines are told to sleep and to stand still, against servers that answer as the engines' documentation says."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polar.config import EngineSettings
from polar.engines.openai import OpenAIEngine
from polar.engines.scripted import ScriptedServer
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError

Told = list[tuple[str, str, bytes]]


@asynccontextmanager
async def server(status: int, body: Any = None) -> AsyncIterator[tuple[str, Told]]:
    """Answers everything with one status, and keeps what it was told."""
    told: Told = []

    async def answer(request: web.BaseRequest) -> web.Response:
        told.append((request.method, request.path_qs, await request.read()))
        return web.json_response(body or {"message": "as it is"}, status=status)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", told
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("kind", "told_to_sleep", "told_to_wake"),
    [
        (VllmEngine, ("POST", "/sleep?level=1", b""), ("POST", "/wake_up", b"")),
        (
            SglangEngine,
            ("POST", "/release_memory_occupation", b"{}"),
            ("POST", "/resume_memory_occupation", b"{}"),
        ),
    ],
)
async def test_each_engine_is_told_in_its_own_words(
    kind: type[OpenAIEngine], told_to_sleep: tuple[str, str, bytes], told_to_wake: tuple[str, str, bytes]
) -> None:
    async with server(200) as (url, told):
        engine = kind(url, EngineSettings())
        assert await engine.sleep()
        await engine.wake()
        await engine.close()
        assert told == [told_to_sleep, told_to_wake]


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_without_the_route_can_not_sleep(kind: type[OpenAIEngine]) -> None:
    async with server(404) as (url, _):
        engine = kind(url, EngineSettings())
        assert not await engine.sleep()
        with pytest.raises(EngineError, match="404"):
            await engine.wake()
        await engine.close()


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_that_fails_to_sleep_is_told_of(kind: type[OpenAIEngine]) -> None:
    async with server(500) as (url, _):
        engine = kind(url, EngineSettings())
        with pytest.raises(EngineError, match="500"):
            await engine.sleep()
        await engine.close()


async def test_an_endpoint_that_knows_nothing_of_sleep_is_not_asked() -> None:
    async with server(200) as (url, told):
        engine = OpenAIEngine(url, EngineSettings())
        assert not await engine.sleep()
        await engine.wake()
        await engine.close()
        assert told == []


# Standing still


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_without_the_route_can_not_be_frozen(kind: type[OpenAIEngine]) -> None:
    async with server(404) as (url, told):
        engine = kind(url, EngineSettings())
        assert not await engine.freeze()
        await engine.close()
        assert told == [("POST", "/pause?mode=keep", b"")]


async def test_a_server_that_fails_to_freeze_is_told_of() -> None:
    async with server(500) as (url, _):
        engine = VllmEngine(url, EngineSettings())
        with pytest.raises(EngineError, match="500"):
            await engine.freeze()
        await engine.close()


async def test_an_engine_says_how_it_stands() -> None:
    async with ScriptedServer() as scripted, aiohttp.ClientSession() as http:
        engine = VllmEngine(scripted.url, EngineSettings())
        assert await engine.get_state() == "running"
        for path, stands in (("/pause?mode=keep", "frozen"), ("/sleep?level=1", "asleep"), ("/wake_up", "running")):
            await http.post(scripted.url + path)
            assert await engine.get_state() == stands
        await engine.close()


async def test_a_server_that_knows_nothing_of_it_does_not_stand_still() -> None:
    async with server(404) as (url, _):
        engine = VllmEngine(url, EngineSettings())
        assert await engine.get_state() == "running"
        await engine.close()


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_that_says_nothing_is_told_of(status: int) -> None:
    """`is_sleeping` must be yes or no."""
    async with server(status, {"is_sleeping": "as it is"}) as (url, _):
        engine = VllmEngine(url, EngineSettings())
        with pytest.raises(EngineError):
            await engine.get_state()
        await engine.close()


@pytest.mark.parametrize("kind", [SglangEngine, OpenAIEngine])
async def test_who_can_not_tell_is_not_asked(kind: type[OpenAIEngine]) -> None:
    async with server(200) as (url, told):
        engine = kind(url, EngineSettings())
        assert await engine.get_state() is None
        await engine.close()
        assert told == []
