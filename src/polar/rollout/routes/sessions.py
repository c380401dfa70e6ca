"""Sessions, and what they captured: those of tasks, and those that somebody runs by hand."""

import math
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field, field_validator, model_validator

from polar.distribution import install_hint
from polar.gateway import view
from polar.harnesses import build_base_urls
from polar.plugins import list_names
from polar.records.result import EvidenceResult
from polar.records.session import Session, Verdict
from polar.rollout.routes.bodies import Body, RunName, StoredText, describe_errors, describe_stream, is_deeper_than
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.routes.tasks import stream_response
from polar.store.base import Store
from polar.trajectory.session import encode_trajectory, load_roles

_MAX_METADATA_DEPTH = 100
ARROW_MEDIA_TYPE = "application/vnd.apache.arrow.stream"


class NewSession(Body):
    metadata: dict[str, Any] = Field({}, description="kept with the session")
    run: RunName = "default"

    @field_validator("metadata")
    @classmethod
    def check_metadata(cls, value: Any) -> Any:
        """What is written must be read again."""
        if is_deeper_than(_MAX_METADATA_DEPTH, value):
            raise ValueError("it is nested too deeply")
        return value


class SessionCreated(BaseModel):
    session_id: str
    api_key: str
    base_urls: dict[str, str] = Field(description="where each provider's clients are pointed")


class SessionInfo(BaseModel):
    session_id: str
    run: str
    status: Literal["open", "ended"]
    metadata: dict[str, Any]
    created_at: float = Field(description="seconds since 1970")
    ended_at: float | None
    reward: float | None
    reason: str | None = Field(description="why there is no reward, where somebody said so")
    turn_rewards: dict[str, float] = Field(description="by exchange id")
    evidence: list[EvidenceResult] = Field(description="of tampering with its grading")
    suspicious: bool = Field(description="some of the evidence is proven")


class SessionEnd(Body):
    reward: float | None = None
    reason: StoredText | None = Field(None, description="why there is no reward")
    turn_rewards: dict[StoredText, float] = Field({}, description="rewards of single turns, by exchange id")

    @model_validator(mode="after")
    def check_verdict(self) -> "SessionEnd":
        if self.reward is not None and self.reason is not None:
            raise ValueError("an outcome is a reward or a reason, never both")
        if not all(math.isfinite(reward) for reward in (self.reward or 0.0, *self.turn_rewards.values())):
            raise ValueError("a reward is a finite number")
        return self


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    store, sessions = parts.store, parts.sessions

    @router.post("/sessions", tags=["sessions"], responses=describe_errors(400, 413))
    async def new_session(body: NewSession) -> SessionCreated:
        """A session for a harness that is run by hand. Its key is told here, and nowhere else."""
        session, key = await sessions.create(body.metadata, body.run)
        return SessionCreated(session_id=session.session_id, api_key=key, base_urls=build_base_urls(parts.gateway_url))

    @router.get("/sessions", tags=["sessions"], response_model=list[SessionInfo], responses=describe_errors(404))
    async def list_sessions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[str | None, Query(description="the last one of the page before")] = None,
    ) -> Response:
        """The newest first."""
        if before is not None:
            await find_session(before)
        return _json_response(
            [view.session_to_dict(session) for session in await store.list_sessions(limit=limit, before=before)]
        )

    @router.get("/sessions/{session_id}", tags=["sessions"], response_model=SessionInfo, responses=describe_errors(404))
    async def one_session(session_id: str) -> Response:
        return _json_response(view.session_to_dict(await find_session(session_id)))

    @router.post(
        "/sessions/{session_id}/end",
        tags=["sessions"],
        response_model=SessionInfo,
        responses=describe_errors(400, 404, 409, 413),
    )
    async def end_session(session_id: str, body: SessionEnd | None = None) -> Response:
        """Its key stops working, and what still runs is given up. A reward may be added later, but not changed."""
        await find_session(session_id)
        told = body or SessionEnd()
        session = await sessions.end(session_id, Verdict(told.reward, told.reason, told.turn_rewards))
        if session is None:
            raise HTTPException(404, f"There is no session {session_id}.")
        if told.reward is not None and session.reward != told.reward:
            raise HTTPException(409, f"Session {session_id} has the reward {session.reward:g} already.")
        return _json_response(view.session_to_dict(session))

    @router.get(
        "/sessions/{session_id}/exchanges",
        tags=["sessions"],
        responses=describe_errors(404, 406)
        | describe_stream("Every captured call", {"type": "array", "items": {"type": "object"}}),
    )
    async def exchanges(session_id: str, request: Request) -> Response:
        """Every captured call; with `Accept: application/vnd.apache.arrow.stream`, token arrays in binary."""
        await find_session(session_id)
        if ARROW_MEDIA_TYPE in request.headers.get("accept", ""):
            return await _arrow_response(store, session_id)
        return await stream_response(_stream_exchanges(store, session_id))

    @router.get("/sessions/{session_id}/trajectory", tags=["sessions"], responses=describe_errors(404))
    async def trajectory(session_id: str, builder: str = "prefix_merging") -> Response:
        """What a builder makes of the session so far; `prefix_tree` gives the whole token tree."""
        await find_session(session_id)
        if builder not in list_names("builders"):
            raise HTTPException(422, f"There is no builder {builder}; known: {', '.join(list_names('builders'))}.")
        document = await encode_trajectory(store, session_id, builder, parts.pages.checker)
        return Response(document, media_type="application/json")

    async def find_session(session_id: str) -> Session:
        session = await store.find_session(session_id)
        if session is None:
            raise HTTPException(404, f"There is no session {session_id}.")
        return session


def _json_response(value: Any) -> Response:
    """However deep its metadata go, which may come from elsewhere: what can be kept can be told."""
    return Response(view.encode_json(value), media_type="application/json")


async def _stream_exchanges(store: Store, session_id: str) -> AsyncIterator[bytes]:
    separator = b"["
    labels = await load_roles(store, session_id)
    async for exchange in store.read_exchanges(session_id):
        yield separator + view.encode_json(view.exchange_to_dict(exchange, labels[exchange.exchange_id]))
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


async def _arrow_response(store: Store, session_id: str) -> Response:
    try:
        from polar.gateway.arrow import stream_exchanges
    except ImportError as error:
        raise HTTPException(406, f"Arrow needs pyarrow: {install_hint('arrow')}.") from error
    return StreamingResponse(stream_exchanges(store, session_id), media_type=ARROW_MEDIA_TYPE)
