"""A gateway whose engine remembers what it was asked, and whose records are checked to the token."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from polar.engines.scripted import Play, PlaySet, ScriptedServer
from polar.engines.scripted.sampler import expected_logprobs
from polar.gateway.data_plane import DataPlane
from polar.records.exchange import Exchange
from tests.integration.clients import Answer
from tests.integration.stack import settings


class Listening(ScriptedServer):
    """A scripted engine that remembers what it was asked to sample."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heard: list[dict[str, Any]] = []
        self.server.app.middlewares.append(self._hear)

    @property
    def _hear(self) -> Any:
        @web.middleware
        async def hear(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path.endswith("completions"):
                self.heard.append(await request.json())
            return await handler(request)

        return hear


class Gateway:
    """A running one, with a session."""

    def __init__(self, service: DataPlane, engine: Listening, session_id: str, key: str) -> None:
        self.service = service
        self.engine = engine
        self.session_id = session_id
        self.key = key
        self.url = service.gateway_url

    async def exchanges(self) -> list[Exchange]:
        return [exchange async for exchange in self.service.store.read_exchanges(self.session_id)]

    async def recorded(self, *answers: Answer) -> list[Exchange]:
        """The session's exchanges, which are those of these answers, each whole and exact."""
        exchanges = await self.exchanges()
        assert len(exchanges) == len(answers)
        for exchange, answer in zip(exchanges, answers, strict=True):
            prompt, sampled = exact(exchange)
            assert (answer.prompt, answer.completion) == (prompt, sampled)
            assert exchange.usage.cached == answer.cached
            assert exchange.finish_reason == answer.finish
            assert all(exchange.exchange_id in issued for issued in answer.issued)
        return exchanges

    def prompt_text(self, exchange: Exchange) -> str:
        """What the model saw."""
        assert exchange.prompt_ids is not None
        return self.engine.tokenizer.decode(exchange.prompt_ids.tolist())


def exact(exchange: Exchange) -> tuple[int, int]:
    """Checks that an exchange is whole, delivered and faithful; the numbers of its prompt's and sampled tokens."""
    prompt, sampled, logprobs = exchange.prompt_ids, exchange.sampled_ids, exchange.logprobs
    assert exchange.status == "complete"
    assert exchange.error is None
    assert prompt is not None
    assert sampled is not None
    assert logprobs is not None
    assert exchange.delivered == len(sampled)
    np.testing.assert_array_equal(logprobs, expected_logprobs(0, prompt, sampled))
    assert [(span.version, span.start, span.stop) for span in exchange.versions] == [(0, 0, len(sampled))]
    return len(prompt), len(sampled)


@asynccontextmanager
async def gateway(
    data: Path,
    plays: PlaySet | Play | None = None,
    *,
    render: str = "engine",
    image_urls: str = "refuse",
    **engine: Any,
) -> AsyncIterator[Gateway]:
    """`engine`: options of the scripted server. What it is asked can be looked at where it renders."""
    async with (
        Listening(plays, **engine) as server,
        DataPlane(settings([server.url], engine={"render": render, "image_urls": image_urls}), data) as service,
    ):
        session, key = await service.sessions.create({})
        assert isinstance(server, Listening)
        yield Gateway(service, server, session.session_id, key)


@asynccontextmanager
async def raw_http(running: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """For what no official client sends."""
    async with httpx.AsyncClient(base_url=running.url, headers={"x-api-key": running.key}) as http:
        yield http
