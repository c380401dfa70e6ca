"""What the service keeps in memory for a session's next call is gone when the session has ended."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.engines.scripted import Play, ScriptedServer
from polar.service import Service
from tests.conditions import wait_until
from tests.integration.stack import settings, wait_until_settled


def held_bytes(service: Service) -> int:
    """Bytes that are kept for the next calls of sessions."""
    plane = service.data_plane
    return plane.gateway.memory_bytes + plane.store.memory_bytes


class Harness:
    def __init__(self, service: Service, http: aiohttp.ClientSession) -> None:
        self._service = service
        self._http = http

    async def begin(self) -> tuple[str, str]:
        async with self._http.post(f"{self._service.control_url}/sessions", json={}) as response:
            made = await response.json()
            return made["session_id"], made["api_key"]

    async def end(self, session_id: str) -> None:
        async with self._http.post(f"{self._service.control_url}/sessions/{session_id}/end", json={}) as response:
            assert response.status == 200

    async def ask(self, key: str, messages: list[Any]) -> tuple[int, Any]:
        url, headers = f"{self._service.gateway_url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
        async with self._http.post(url, json={"model": "m", "messages": messages}, headers=headers) as response:
            return response.status, await response.json()

    async def converse(self, key: str, turns: int) -> None:
        messages: list[Any] = []
        for number in range(turns):
            messages.append({"role": "user", "content": f"Question {number}."})
            status, reply = await self.ask(key, messages)
            assert status == 200, reply
            messages.append(reply["choices"][0]["message"])


async def count(service: Service, session_id: str) -> int:
    return len([exchange async for exchange in service.store.read_exchanges(session_id)])


@pytest.mark.parametrize("render", ["gateway", "engine"])
async def test_ended_sessions_leave_nothing_in_memory(tmp_path: Path, render: str) -> None:
    async with (
        ScriptedServer(Play.random(1, turns=3)) as engine,
        Service(settings([engine.url], engine={"render": render}), tmp_path) as service,
        aiohttp.ClientSession() as http,
    ):
        harness = Harness(service, http)
        before = held_bytes(service)
        for _ in range(10):
            session_id, key = await harness.begin()
            await harness.converse(key, 3)
            assert held_bytes(service) > before
            await harness.end(session_id)
            assert held_bytes(service) == before
            assert await count(service, session_id) == 3


async def test_a_call_that_ends_with_its_session_leaves_nothing_in_memory(tmp_path: Path) -> None:
    async with (
        ScriptedServer(Play.random(1, turns=3)) as engine,
        Service(settings([engine.url]), tmp_path) as service,
        aiohttp.ClientSession() as http,
    ):
        await wait_until_settled(service)
        harness = Harness(service, http)
        before = held_bytes(service)
        session_id, key = await harness.begin()
        await harness.converse(key, 2)
        await service.pool.pause()
        call = asyncio.create_task(harness.ask(key, [{"role": "user", "content": "Are you there?"}]))
        await wait_until(lambda: service.pool.gate.held == 1)
        await harness.end(session_id)
        status, _ = await call
        assert status != 200
        assert await count(service, session_id) == 3
        assert held_bytes(service) == before
