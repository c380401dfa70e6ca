"""Nodes: what they say to the server (protocol.Server over HTTP), and what operators see of them."""

from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response
from msgspec import Struct
from pydantic import BaseModel, Field

from polar.rollout.lease_manager import LeaseManager as Leases
from polar.rollout.protocol import (
    FinishStatus,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseId,
    SessionOutcome,
)
from polar.rollout.routes.bodies import StructSchemas, check_storable, decode_body, describe_errors, make_body_error
from polar.rollout.routes.service_parts import ServiceParts

T = TypeVar("T")


class LeaseRequest(Struct):
    holding: list[LeaseId]
    room: int


class NodeInfo(BaseModel):
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


class NodeAck(BaseModel):
    node_id: str


def list_nodes(parts: ServiceParts) -> list[NodeInfo]:
    return [NodeInfo(**msgspec.structs.asdict(node)) for node in parts.rollout.list_nodes()]


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    @router.get("/nodes", tags=["nodes"], responses=describe_errors())
    async def nodes() -> list[NodeInfo]:
        """The nodes that are alive."""
        return list_nodes(parts)

    @router.get("/nodes/{node_id}", tags=["nodes"], responses=describe_errors(404))
    async def one_node(node_id: str) -> NodeInfo:
        for node in list_nodes(parts):
            if node.node_id == node_id:
                return node
        raise HTTPException(404, f"There is no node {node_id}.")

    @router.post("/nodes/{node_id}/drain", tags=["nodes"], responses=describe_errors(404))
    async def drain(node_id: str) -> NodeDraining:
        """It gets no more sessions, and leaves when those that it has are done."""
        if not await parts.rollout.lease_manager.drain(node_id):
            raise HTTPException(404, f"There is no node {node_id}.")
        return NodeDraining(node_id=node_id, draining=True)


def add_node_routes(router: APIRouter, parts: ServiceParts, structs: StructSchemas) -> None:
    server = parts.rollout.lease_manager
    refused = describe_errors(400, 410, 413)

    @router.post(
        "/nodes/join",
        tags=["node protocol"],
        openapi_extra=structs.describe_request_body(JoinRequest),
        responses=refused | structs.describe_response(JoinResponse, "It may lease work"),
    )
    async def join(request: Request) -> Response:
        return _json_response(await server.join(await _read_body(request, JoinRequest)))

    @router.post(
        "/nodes/{node_id}/lease",
        tags=["node protocol"],
        openapi_extra=structs.describe_request_body(LeaseRequest),
        responses=refused | structs.describe_response(list[Lease], "Work"),
    )
    async def lease(node_id: str, request: Request) -> Response:
        lease_request = await _read_body(request, LeaseRequest)
        return _json_response(await server.lease(node_id, lease_request.holding, lease_request.room))

    @router.post(
        "/nodes/{node_id}/beat",
        tags=["node protocol"],
        openapi_extra=structs.describe_request_body(Heartbeat),
        responses=refused | structs.describe_response(HeartbeatResponse, "What it is to do"),
    )
    async def beat(node_id: str, request: Request) -> Response:
        return _json_response(await server.heartbeat(node_id, await _read_body(request, Heartbeat)))

    @router.post(
        "/nodes/{node_id}/finish",
        tags=["node protocol"],
        openapi_extra=structs.describe_request_body(list[SessionOutcome]),
        responses=refused | structs.describe_response(list[FinishStatus], "What was made of each"),
    )
    async def finish(node_id: str, request: Request) -> Response:
        outcomes = await _read_body(request, list[SessionOutcome])
        _check_outcomes(outcomes)
        accepted = [outcome for outcome in outcomes if not _is_held_elsewhere(server, node_id, outcome.lease_id)]
        statuses = dict(
            zip((outcome.lease_id for outcome in accepted), await server.finish(node_id, accepted), strict=True)
        )
        return _json_response([statuses.get(outcome.lease_id, "lost") for outcome in outcomes])

    @router.post("/nodes/{node_id}/leave", tags=["node protocol"], responses=refused)
    async def leave(node_id: str) -> NodeAck:
        await server.leave(node_id)
        return NodeAck(node_id=node_id)

    @router.put(
        "/nodes/{node_id}/sessions",
        tags=["node protocol"],
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
        responses=refused,
    )
    async def send_session(node_id: str, request: Request) -> NodeAck:
        """A copy of a session, from a node with a store of its own."""
        await server.send_session(node_id, await request.body())
        return NodeAck(node_id=node_id)


def _check_outcomes(outcomes: list[SessionOutcome]) -> None:
    """Raises HTTPException for what no session can come to; what is the server's to say is not heard."""
    if len({outcome.lease_id for outcome in outcomes}) < len(outcomes):
        raise make_body_error("it has the same work twice")
    for outcome in outcomes:
        if outcome.reward is not None and outcome.reason is not None:
            raise make_body_error("an outcome is a reward or a reason, never both")
        if min(outcome.turns, outcome.tokens, outcome.oldest_version or 0, outcome.newest_version or 0) < 0:
            raise make_body_error("turns, tokens and versions are not below 0")
        outcome.lag, outcome.stale, outcome.builder, outcome.mask_traces = None, False, None, False


def _is_held_elsewhere(server: Leases, node_id: str, held: LeaseId) -> bool:
    """Numbers of work, and its fences, are easy to guess; ids of nodes are not."""
    return any(held in member.leases for member in server.members.values() if member.node_id != node_id)


async def _read_body(request: Request, kind: type[T]) -> T:
    return check_storable(decode_body(await request.body(), kind))


def _json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
