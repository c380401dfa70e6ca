"""How the service is: its health, what goes on, and what happens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from polar.rollout.events import EventListener, ServiceEvent
from polar.rollout.routes.bodies import RunName, describe_errors, describe_stream
from polar.rollout.routes.nodes import NodeInfo, list_nodes
from polar.rollout.routes.runs import PolicyInfo, describe_policy
from polar.rollout.routes.service_parts import ServiceParts

_HEARTBEAT_SECONDS = 15.0
"""Seconds of silence before a listener hears that the connection stands."""


_CANNOT_WRITE = "The store can't write; the service's log says why."
"""Without the cause, which names a path or a database's address."""


class EngineHealth(BaseModel):
    down: bool
    running: int = Field(description="calls of this process")


class Health(BaseModel):
    status: Literal["ok", "degraded"] = Field("ok", description="degraded, with HTTP status 503: see `reason`")
    reason: str | None = Field(None, description="what is wrong, in a sentence for everybody: it needs no token")
    paused: bool
    sessions: int = Field(description="whose keys work here now")
    engines: list[EngineHealth] = Field(description="those of the default run")


class RunCounts(BaseModel):
    """Sessions of a run; and how many tasks they belong to."""

    tasks: int
    queued: int = Field(description="for a node")
    leased: int = Field(description="at a node")
    waiting: int = Field(description="for another try")
    done: int
    usable: int = Field(description="that ended with a reward")
    untaken: int | None = Field(None, description="of those, taken by no consumer yet; counted where `batch` is set")


class Status(BaseModel):
    status: Literal["ok"] = "ok"
    runs: dict[str, RunCounts]
    nodes: list[NodeInfo]
    policy: dict[str, PolicyInfo] = Field(description="of each run with engines of its own, and of default")


def _build_health(parts: ServiceParts) -> Health:
    pool = parts.pools.default
    engines = [EngineHealth(down=replica.down, running=len(replica.running)) for replica in pool.replicas]
    can_write = parts.store.write_failure is None
    return Health(
        status="ok" if can_write else "degraded",
        reason=None if can_write else _CANNOT_WRITE,
        paused=pool.gate.paused,
        sessions=len(parts.sessions),
        engines=engines,
    )


def encode_health(parts: ServiceParts) -> tuple[int, bytes]:
    """The HTTP status and body of /health. Reads memory only, so that any thread may call it."""
    health = _build_health(parts)
    return _get_http_status(health), health.model_dump_json().encode()


def _get_http_status(health: Health) -> int:
    return 200 if health.status == "ok" else 503


def add_open_routes(router: APIRouter, parts: ServiceParts) -> None:
    @router.get("/health", tags=["service"], responses={503: {"model": Health, "description": "It can't write."}})
    async def health(response: Response) -> Health:
        """Whether the service is up and can write. Needs no token."""
        health = _build_health(parts)
        response.status_code = _get_http_status(health)
        return health


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    rollout = parts.rollout

    @router.get("/rollout/status", tags=["service"], responses=describe_errors())
    async def status() -> Status:
        """Each run's sessions by state, the nodes that are alive, and each run's engines."""
        return Status(
            runs={run: RunCounts(**counts) for run, counts in rollout.count_sessions().items()},
            nodes=list_nodes(parts),
            policy={run: describe_policy(parts, run) for run in rollout.engine_controller.engines.pools},
        )

    @router.get(
        "/metrics",
        tags=["service"],
        response_class=Response,
        responses=describe_errors() | describe_stream("Prometheus", {"type": "string"}, "text/plain"),
    )
    async def metrics() -> Response:
        return Response(generate_latest(parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get(
        "/events",
        tags=["service"],
        response_class=StreamingResponse,
        responses=describe_errors() | describe_stream("Server-sent events", {"type": "string"}, "text/event-stream"),
    )
    async def events(
        run: Annotated[RunName | None, Query(description="only of this run, and of what concerns all of them")] = None,
        last_event_id: Annotated[str | None, Header(description="go on behind this one", max_length=100)] = None,
    ) -> StreamingResponse:
        """What happens, as it happens. `lagged` says that some are missing: results are never, in their own feed."""
        listener = rollout.events.subscribe(run, last_event_id)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_stream_events(listener), media_type="text/event-stream", headers=headers)


async def _stream_events(listener: EventListener) -> AsyncIterator[bytes]:
    yield b": listening\n\n"
    try:
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_SECONDS):
                    event = await listener.wait_for_event()
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if event is None:
                return
            yield _encode_event(event)
    finally:
        listener.close()


def _encode_event(event: ServiceEvent) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), event.kind.encode(), event.data)
