"""Nodes: what they say to the server (protocol.Server over HTTP), and what operators see of them."""

from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response
from msgspec import Struct
from pydantic import BaseModel, Field

from polar.rollout.leasing import Leasing as Leases
from polar.rollout.protocol import Answer, Beat, Ended, Held, Joined, Joining, Lease, Orders
from polar.rollout.routes.bodies import checked, decoded, unusable
from polar.rollout.routes.documents import Structs, problems
from polar.rollout.routes.parts import Parts

T = TypeVar("T")


class Leasing(Struct):
    holding: list[Held]
    room: int


class ShownNode(BaseModel):
    node_id: str = Field(description="another one with each start")
    name: str
    backends: list[str] = Field(description="runtimes that it can make")
    slots: int = Field(description="sessions that it runs at the same time")
    leases: int = Field(description="sessions that it has")
    load: dict[str, bool | int | float] = Field(description="as it told it last: sessions by stage, calls, ...")
    seen: float = Field(description="seconds ago")
    draining: bool = Field(description="it gets no more, and leaves when all is done")


class NodeDraining(BaseModel):
    node_id: str
    draining: bool


class NodeHeard(BaseModel):
    node_id: str


def shown_nodes(parts: Parts) -> list[ShownNode]:
    return [ShownNode(**msgspec.structs.asdict(node)) for node in parts.rollout.nodes()]


def routes(router: APIRouter, parts: Parts) -> None:
    @router.get("/nodes", tags=["nodes"], responses=problems())
    async def nodes() -> list[ShownNode]:
        """The nodes that are alive."""
        return shown_nodes(parts)

    @router.get("/nodes/{node_id}", tags=["nodes"], responses=problems(404))
    async def one_node(node_id: str) -> ShownNode:
        for node in shown_nodes(parts):
            if node.node_id == node_id:
                return node
        raise HTTPException(404, f"There is no node {node_id}.")

    @router.post("/nodes/{node_id}/drain", tags=["nodes"], responses=problems(404))
    async def drain(node_id: str) -> NodeDraining:
        """It gets no more sessions, and leaves when those that it has are done."""
        if not await parts.rollout.leasing.drain(node_id):
            raise HTTPException(404, f"There is no node {node_id}.")
        return NodeDraining(node_id=node_id, draining=True)


def node_routes(router: APIRouter, parts: Parts, structs: Structs) -> None:
    server = parts.rollout.leasing
    refused = problems(400, 410, 413)

    @router.post(
        "/nodes/join",
        tags=["node protocol"],
        openapi_extra=structs.takes(Joining),
        responses=refused | structs.gives(Joined, "It may lease work"),
    )
    async def join(request: Request) -> Response:
        return _json(await server.join(await _read(request, Joining)))

    @router.post(
        "/nodes/{node_id}/lease",
        tags=["node protocol"],
        openapi_extra=structs.takes(Leasing),
        responses=refused | structs.gives(list[Lease], "Work"),
    )
    async def lease(node_id: str, request: Request) -> Response:
        asked = await _read(request, Leasing)
        return _json(await server.lease(node_id, asked.holding, asked.room))

    @router.post(
        "/nodes/{node_id}/beat",
        tags=["node protocol"],
        openapi_extra=structs.takes(Beat),
        responses=refused | structs.gives(Orders, "What it is to do"),
    )
    async def beat(node_id: str, request: Request) -> Response:
        return _json(await server.beat(node_id, await _read(request, Beat)))

    @router.post(
        "/nodes/{node_id}/finish",
        tags=["node protocol"],
        openapi_extra=structs.takes(list[Ended]),
        responses=refused | structs.gives(list[Answer], "What was made of each"),
    )
    async def finish(node_id: str, request: Request) -> Response:
        ended = await _read(request, list[Ended])
        _sound(ended)
        own = [one for one in ended if not _is_anothers(server, node_id, one.held)]
        answers = dict(zip((one.held for one in own), await server.finish(node_id, own), strict=True))
        return _json([answers.get(one.held, "lost") for one in ended])

    @router.post("/nodes/{node_id}/leave", tags=["node protocol"], responses=refused)
    async def leave(node_id: str) -> NodeHeard:
        await server.leave(node_id)
        return NodeHeard(node_id=node_id)

    @router.put(
        "/nodes/{node_id}/sessions",
        tags=["node protocol"],
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
        responses=refused,
    )
    async def send_session(node_id: str, request: Request) -> NodeHeard:
        """A copy of a session, from a node with a store of its own."""
        await server.send_session(node_id, await request.body())
        return NodeHeard(node_id=node_id)


def _sound(ended: list[Ended]) -> None:
    """Raises HTTPException for what no session can come to; what is the server's to say is not heard."""
    if len({one.held for one in ended}) < len(ended):
        raise unusable("it has the same work twice")
    for one in ended:
        if one.reward is not None and one.reason is not None:
            raise unusable("an outcome is a reward or a reason, never both")
        if min(one.turns, one.tokens, one.oldest_version or 0, one.newest_version or 0) < 0:
            raise unusable("turns, tokens and versions are not below 0")
        one.lag, one.stale, one.builder, one.mask_traces = None, False, None, False


def _is_anothers(server: Leases, node_id: str, held: Held) -> bool:
    """Numbers of work, and its fences, are easy to guess; ids of nodes are not."""
    return any(held in member.leases for member in server.members.values() if member.node_id != node_id)


async def _read(request: Request, kind: type[T]) -> T:
    return checked(decoded(await request.body(), kind))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
