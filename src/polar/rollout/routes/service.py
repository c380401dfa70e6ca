"""How the service is: its health, what goes on, and what happens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from polar.rollout.events import Event, Listener
from polar.rollout.routes.bodies import Run
from polar.rollout.routes.documents import problems, streamed
from polar.rollout.routes.parts import Parts
from polar.rollout.routes.policy import shown

_HEARTBEAT = 15.0
"""Seconds of silence before a listener hears that the connection stands."""


def open_routes(router: APIRouter, parts: Parts) -> None:
    @router.get("/health", tags=["service"])
    async def health() -> dict[str, Any]:
        """Whether the service is up. Needs no token."""
        pool = parts.pools.default
        engines = [{"down": replica.down, "running": len(replica.running)} for replica in pool.replicas]
        return {"status": "ok", "paused": pool.gate.paused, "sessions": len(parts.sessions), "engines": engines}


def routes(router: APIRouter, parts: Parts) -> None:
    rollout = parts.rollout

    @router.get("/rollout/status", tags=["service"], responses=problems())
    async def status() -> dict[str, Any]:
        """Each run's sessions by state, the nodes that are alive, and each run's engines."""
        return {
            "status": "ok",
            "runs": rollout.status(),
            "nodes": msgspec.to_builtins(rollout.nodes()),
            "policy": {run: shown(parts, run) for run in rollout.steering.engines.pools},
        }

    @router.get(
        "/metrics", tags=["service"], responses=problems() | streamed("Prometheus", {"type": "string"}, "text/plain")
    )
    async def metrics() -> Response:
        return Response(generate_latest(parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get(
        "/events",
        tags=["service"],
        responses=problems() | streamed("Server-sent events", {"type": "string"}, "text/event-stream"),
    )
    async def events(
        run: Annotated[Run | None, Query(description="only of this run, and of what concerns all of them")] = None,
        last_event_id: Annotated[str | None, Header(description="go on behind this one", max_length=100)] = None,
    ) -> StreamingResponse:
        """What happens, as it happens. `lagged` says that some are missing: results are never, in their own feed."""
        listener = rollout.events.subscribe(run, last_event_id)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_stream(listener), media_type="text/event-stream", headers=headers)


async def _stream(listener: Listener) -> AsyncIterator[bytes]:
    yield b": listening\n\n"
    try:
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT):
                    event = await listener.next()
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if event is None:
                return
            yield _written(event)
    finally:
        listener.close()


def _written(event: Event) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), event.kind.encode(), event.data)
