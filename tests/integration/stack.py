"""A whole Polar on loopback, as the integration tests use it: scripted engine, gateway, control plane."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polar.config import Settings
from polar.engines.scripted import Play, PlaySet, ScriptedServer
from polar.records.exchange import Exchange
from polar.service import Service
from tests.conditions import wait_until


class Stack:
    def __init__(self, service: Service, engine: ScriptedServer, session_id: str, key: str) -> None:
        self.service = service
        self.engine = engine
        self.session_id = session_id
        self.key = key
        self.url = service.gateway_url

    async def exchanges(self, session_id: str | None = None) -> list[Exchange]:
        return [exchange async for exchange in self.service.store.read_exchanges(session_id or self.session_id)]


def settings(engine_urls: list[str], **changes: dict[str, Any]) -> Settings:
    """Free ports, a short grace; `changes` go on top, section by section."""
    sections: dict[str, dict[str, Any]] = {
        "engine": {"kind": "scripted", "urls": engine_urls, "timeout": 120},
        "gateway": {"port": 0, "grace": 0.5},
        "server": {"port": 0},
    }
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Settings.model_validate(sections)


async def wait_until_settled(service: Service) -> None:
    """The service puts engines into the state that it wants, asks them what they can do, and only then leaves them
    alone: who pauses an engine itself must come after that."""
    await service.pool.gate.wait_until_open()
    await wait_until(lambda: not service.pool._probe_tasks)


@asynccontextmanager
async def running(
    data: Path, plays: Play | PlaySet | None = None, *, engine: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[Stack]:
    """`engine`: options of the scripted server; `changes`: settings, section by section."""
    async with (
        ScriptedServer(plays, **(engine or {})) as server,
        Service(settings([server.url], **changes), data) as service,
    ):
        await wait_until_settled(service)
        session, key = await service.sessions.create({"test": True})
        yield Stack(service, server, session.session_id, key)
