"""Sessions, and what they captured: those of tasks, and those that somebody runs by hand."""

import math
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field, field_validator, model_validator

from polar.gateway import view
from polar.plugins import names
from polar.rollout.models import EvidenceResult
from polar.rollout.routes.bodies import Body, Run, Text, deeper_than
from polar.rollout.routes.documents import problems, streamed
from polar.rollout.routes.parts import Parts
from polar.rollout.routes.tasks import answered
from polar.store.base import Session, Store, Verdict
from polar.trajectory.session import encode_built, roles_of

_DEEPEST = 100
ARROW = "application/vnd.apache.arrow.stream"


class NewSession(Body):
    metadata: dict[str, Any] = Field({}, description="kept with the session")
    run: Run = "default"

    @field_validator("metadata")
    @classmethod
    def can_be_kept(cls, value: Any) -> Any:
        """What is written must be read again."""
        if deeper_than(_DEEPEST, value):
            raise ValueError("it is nested too deeply")
        return value


class SessionCreated(BaseModel):
    session_id: str
    api_key: str
    base_urls: dict[str, str] = Field(description="where each provider's clients are pointed")


class ShownSession(BaseModel):
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
    reason: Text | None = Field(None, description="why there is no reward")
    turn_rewards: dict[Text, float] = Field({}, description="rewards of single turns, by exchange id")

    @model_validator(mode="after")
    def one_verdict(self) -> "SessionEnd":
        if self.reward is not None and self.reason is not None:
            raise ValueError("an outcome is a reward or a reason, never both")
        if not all(math.isfinite(reward) for reward in (self.reward or 0.0, *self.turn_rewards.values())):
            raise ValueError("a reward is a finite number")
        return self


def base_urls(gateway_url: str) -> dict[str, str]:
    """What each provider's clients take as their base URL."""
    return {"openai": f"{gateway_url}/v1", "anthropic": gateway_url, "google": gateway_url}


def routes(router: APIRouter, parts: Parts) -> None:
    store, sessions = parts.store, parts.sessions

    @router.post("/sessions", tags=["sessions"], responses=problems(400, 413))
    async def new_session(body: NewSession) -> SessionCreated:
        """A session for a harness that is run by hand. Its key is told here, and nowhere else."""
        session, key = await sessions.create(body.metadata, body.run)
        return SessionCreated(session_id=session.session_id, api_key=key, base_urls=base_urls(parts.gateway_url))

    @router.get("/sessions", tags=["sessions"], response_model=list[ShownSession], responses=problems(404))
    async def list_sessions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[str | None, Query(description="the last one of the page before")] = None,
    ) -> Response:
        """The newest first."""
        if before is not None:
            await existing(before)
        return _json([view.session(session) for session in await store.sessions(limit=limit, before=before)])

    @router.get("/sessions/{session_id}", tags=["sessions"], response_model=ShownSession, responses=problems(404))
    async def one_session(session_id: str) -> Response:
        return _json(view.session(await existing(session_id)))

    @router.post(
        "/sessions/{session_id}/end",
        tags=["sessions"],
        response_model=ShownSession,
        responses=problems(400, 404, 409, 413),
    )
    async def end_session(session_id: str, body: SessionEnd | None = None) -> Response:
        """Its key stops working, and what still runs is given up. A reward may be added later, but not changed."""
        await existing(session_id)
        told = body or SessionEnd()
        session = await sessions.end(session_id, Verdict(told.reward, told.reason, told.turn_rewards))
        if session is None:
            raise HTTPException(404, f"There is no session {session_id}.")
        if told.reward is not None and session.reward != told.reward:
            raise HTTPException(409, f"Session {session_id} has the reward {session.reward:g} already.")
        return _json(view.session(session))

    @router.get(
        "/sessions/{session_id}/exchanges",
        tags=["sessions"],
        responses=problems(404, 406) | streamed("Every captured call", {"type": "array", "items": {"type": "object"}}),
    )
    async def exchanges(session_id: str, request: Request) -> Response:
        """Every captured call; with `Accept: application/vnd.apache.arrow.stream`, token arrays in binary."""
        await existing(session_id)
        if ARROW in request.headers.get("accept", ""):
            return await _arrow(store, session_id)
        return await answered(_json_list(store, session_id))

    @router.get("/sessions/{session_id}/trajectory", tags=["sessions"], responses=problems(404))
    async def trajectory(session_id: str, builder: str = "prefix_merging") -> Response:
        """What a builder makes of the session so far; `prefix_tree` gives the whole token tree."""
        await existing(session_id)
        if builder not in names("builders"):
            raise HTTPException(422, f"There is no builder {builder}; known: {', '.join(names('builders'))}.")
        document = await encode_built(store, session_id, builder, parts.pages.checker)
        return Response(document, media_type="application/json")

    async def existing(session_id: str) -> Session:
        session = await store.session(session_id)
        if session is None:
            raise HTTPException(404, f"There is no session {session_id}.")
        return session


def _json(value: Any) -> Response:
    """However deep its metadata go, which may come from elsewhere: what can be kept can be told."""
    return Response(view.encode(value), media_type="application/json")


async def _json_list(store: Store, session_id: str) -> AsyncIterator[bytes]:
    separator = b"["
    labels = await roles_of(store, session_id)
    async for exchange in store.exchanges(session_id):
        yield separator + view.encode(view.exchange(exchange, labels[exchange.exchange_id]))
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


async def _arrow(store: Store, session_id: str) -> Response:
    try:
        from polar.gateway.arrow import to_stream
    except ImportError as error:
        raise HTTPException(406, "Arrow needs pyarrow: pip install 'polar[arrow]'.") from error
    return StreamingResponse(to_stream(store, session_id), media_type=ARROW)
