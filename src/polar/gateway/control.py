"""The control plane: sessions, what they captured, and the policy. For operators and trainers, never for harnesses."""

import asyncio
import hmac
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from polar.engines.pool import Pool
from polar.errors import ConfigError, EngineError, StoreError
from polar.gateway import view
from polar.gateway.metrics import Metrics
from polar.gateway.sessions import Sessions
from polar.plugins import names
from polar.store.base import Session, Store, Verdict
from polar.trajectory.session import built, roles_of


class Body(BaseModel):
    """What is sent to us: a field that nobody knows is most likely a known one, misspelt."""

    model_config = ConfigDict(extra="forbid")


class NewSession(Body):
    metadata: dict[str, Any] = {}
    run: str = "default"

    @field_validator("metadata", "run")
    @classmethod
    def can_be_kept(cls, value: Any) -> Any:
        """What is written must be read again: Python's parser takes what is no JSON, and numbers without end."""
        try:
            msgspec.json.decode(msgspec.json.encode(value))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        return value


class SessionCreated(BaseModel):
    session_id: str
    api_key: str
    base_urls: dict[str, str] = Field(description="where each provider's clients are pointed")


class SessionEnd(Body):
    reward: float | None = None
    reason: str | None = Field(None, description="why there is no reward")
    turn_rewards: dict[str, float] = Field({}, description="rewards of single turns, by exchange id")

    @model_validator(mode="after")
    def one_verdict(self) -> "SessionEnd":
        if self.reward is not None and self.reason is not None:
            raise ValueError("an outcome is a reward or a reason, never both")
        if not all(math.isfinite(reward) for reward in (self.reward or 0.0, *self.turn_rewards.values())):
            raise ValueError("a reward is a finite number")
        return self


class NewPolicy(Body):
    version: int = Field(ge=0, lt=2**31)
    replica: str | None = Field(None, description="the URL of one replica; default: all")


class Pause(Body):
    mode: Literal["freeze", "hold", "drain"] = Field(
        "freeze",
        description="freeze: running calls stand still, where the engine can; hold: they run on; drain: wait for them",
    )
    timeout: float = Field(600, gt=0, description="seconds to wait for running calls (drain)")


def base_urls(gateway_url: str) -> dict[str, str]:
    """What each provider's clients take as their base URL."""
    return {"openai": f"{gateway_url}/v1", "anthropic": gateway_url, "google": gateway_url}


def create_app(
    *, store: Store, sessions: Sessions, pool: Pool, metrics: Metrics, gateway_url: str, token: str | None
) -> FastAPI:
    async def admin(request: Request) -> None:
        if not token:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise HTTPException(401, "This needs the admin token: Authorization: Bearer ...")

    app = FastAPI(
        title="Polar",
        description="Rollouts of unmodified agent harnesses, token by token.",
        openapi_url=None if token else "/openapi.json",  # and with it the pages at /docs, which can't carry a token
    )
    guarded = [Depends(admin)]

    @app.exception_handler(StoreError)
    async def store_failed(_: Request, error: StoreError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503)

    @app.exception_handler(ConfigError)
    async def misconfigured(_: Request, error: ConfigError) -> JSONResponse:
        """A session's metadata, say, that give roles which don't exist."""
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(EngineError)
    async def engine_failed(_: Request, error: EngineError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 502)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        """What is wrong where; not the value, which need not be anything that JSON can hold."""
        detail = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
        return JSONResponse({"detail": detail}, 422)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        engines = [{"down": replica.down, "running": len(replica.running)} for replica in pool.replicas]
        return {"status": "ok", "paused": pool.gate.paused, "sessions": len(sessions), "engines": engines}

    @app.get("/metrics", dependencies=guarded)
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/sessions", dependencies=guarded)
    async def new_session(body: NewSession) -> SessionCreated:
        session, key = await sessions.create(body.metadata, body.run)
        return SessionCreated(session_id=session.session_id, api_key=key, base_urls=base_urls(gateway_url))

    @app.get("/sessions", dependencies=guarded)
    async def list_sessions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100, before: str | None = None
    ) -> list[dict[str, Any]]:
        if before is not None:
            await existing(before)
        return [view.session(session) for session in await store.sessions(limit=limit, before=before)]

    @app.get("/sessions/{session_id}", dependencies=guarded)
    async def one_session(session_id: str) -> dict[str, Any]:
        return view.session(await existing(session_id))

    @app.post("/sessions/{session_id}/end", dependencies=guarded)
    async def end_session(session_id: str, body: SessionEnd | None = None) -> dict[str, Any]:
        told = body or SessionEnd()
        session = await sessions.end(session_id, Verdict(told.reward, told.reason, told.turn_rewards))
        if session is None:
            raise HTTPException(404, f"There is no session {session_id}.")
        if told.reward is not None and session.reward != told.reward:
            raise HTTPException(409, f"Session {session_id} has the reward {session.reward:g} already.")
        return view.session(session)

    @app.get("/sessions/{session_id}/exchanges", dependencies=guarded)
    async def exchanges(session_id: str, request: Request) -> Response:
        await existing(session_id)
        if ARROW in request.headers.get("accept", ""):
            return await _arrow(store, session_id)
        return StreamingResponse(_json_list(store, session_id), media_type="application/json")

    @app.get("/sessions/{session_id}/trajectory", dependencies=guarded)
    async def trajectory(session_id: str, builder: str = "prefix_merging") -> Response:
        """What a builder makes of the session so far; `prefix_tree` gives the whole token tree."""
        await existing(session_id)
        if builder not in names("builders"):
            raise HTTPException(422, f"There is no builder {builder}; known: {', '.join(names('builders'))}.")
        return Response(await built(store, session_id, builder), media_type="application/json")

    async def existing(session_id: str) -> Session:
        session = await store.session(session_id)
        if session is None:
            raise HTTPException(404, f"There is no session {session_id}.")
        return session

    @app.get("/policy", dependencies=guarded)
    async def policy() -> dict[str, Any]:
        return {
            "paused": pool.gate.paused,
            "frozen": pool.gate.frozen,
            "held": pool.gate.held,
            "replicas": [
                {"url": replica.url, "version": replica.version, "running": len(replica.running), "down": replica.down}
                for replica in pool.replicas
            ],
        }

    @app.post("/policy", dependencies=guarded)
    async def new_policy(body: NewPolicy) -> dict[str, Any]:
        changed = pool.set_version(body.version, body.replica)
        if not changed:
            known = ", ".join(replica.url for replica in pool.replicas)
            raise HTTPException(404, f"There is no replica {body.replica}; known: {known}.")
        await store.set_policy({replica.url: body.version for replica in changed})
        return await policy()

    @app.post("/policy/pause", dependencies=guarded)
    async def pause(body: Pause | None = None) -> dict[str, Any]:
        wanted = body or Pause()
        await pool.pause(freeze=wanted.mode == "freeze")
        deadline = time.monotonic() + wanted.timeout
        while wanted.mode == "drain" and any(replica.running for replica in pool.replicas):
            if time.monotonic() > deadline:
                raise HTTPException(504, "Calls are still running; new ones stay held until POST /policy/resume.")
            await asyncio.sleep(0.05)
        return await policy()

    @app.post("/policy/resume", dependencies=guarded)
    async def resume() -> dict[str, Any]:
        await pool.resume()
        return await policy()

    return app


ARROW = "application/vnd.apache.arrow.stream"


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
