"""How engines are told to sleep and to wake, against servers that answer as the engines' documentation says."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from polar.config import EngineSettings
from polar.engines.chat import ChatEngine
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError

Told = list[tuple[str, str, bytes]]


@asynccontextmanager
async def server(status: int) -> AsyncIterator[tuple[str, Told]]:
    """Answers everything with one status, and keeps what it was told."""
    told: Told = []

    async def answer(request: web.BaseRequest) -> web.Response:
        told.append((request.method, request.path_qs, await request.read()))
        return web.json_response({"message": "as it is"}, status=status)

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
    kind: type[ChatEngine], told_to_sleep: tuple[str, str, bytes], told_to_wake: tuple[str, str, bytes]
) -> None:
    async with server(200) as (url, told):
        engine = kind(url, EngineSettings())
        assert await engine.sleep()
        await engine.wake()
        await engine.close()
        assert told == [told_to_sleep, told_to_wake]


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_without_the_route_can_not_sleep(kind: type[ChatEngine]) -> None:
    async with server(404) as (url, _):
        engine = kind(url, EngineSettings())
        assert not await engine.sleep()
        with pytest.raises(EngineError, match="404"):
            await engine.wake()
        await engine.close()


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_that_fails_to_sleep_is_told_of(kind: type[ChatEngine]) -> None:
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
