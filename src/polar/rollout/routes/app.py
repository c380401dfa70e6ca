"""The control plane: for operators, trainers and nodes, never for harnesses."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.rollout.protocol import UnknownNode
from polar.rollout.routes import nodes, policy, results, runs, service, sessions, tasks
from polar.rollout.routes.access import Access
from polar.rollout.routes.bodies import Limited, StrictRoute
from polar.rollout.routes.documents import Structs
from polar.rollout.routes.parts import Parts
from polar.rollout.steering import NotInForce
from polar.store.copying import CopyRefused


def create_app(parts: Parts) -> FastAPI:
    access = Access(parts.settings.token, parts.settings.node_token)
    app = FastAPI(
        title="Polar",
        description="Rollouts of unmodified agent harnesses, token by token.",
        openapi_url="/openapi.json" if access.open else None,  # and with it the pages at /docs, which carry no token
    )
    structs = Structs()
    structs.install(app)
    app.add_middleware(Limited)
    for handled, status in _STATUS.items():
        app.add_exception_handler(handled, _told(status))
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]

    anybody = APIRouter(route_class=StrictRoute)
    admin = APIRouter(route_class=access.admin)
    node = APIRouter(route_class=access.node)
    service.open_routes(anybody, parts)
    service.routes(admin, parts)
    tasks.routes(admin, parts)
    results.routes(admin, parts)
    runs.routes(admin, parts)
    policy.routes(admin, parts)
    sessions.routes(admin, parts)
    nodes.routes(admin, parts)
    nodes.node_routes(node, parts, structs)
    if not access.open:
        admin.add_api_route("/openapi.json", lambda: app.openapi(), include_in_schema=False)
    for router in (anybody, admin, node):
        app.router.routes += router.routes  # include_router would make each of them a second time
    return app


_STATUS: dict[type[Exception], int] = {
    ConfigError: 422,  # a session's metadata, say, that give roles which don't exist
    ApiError: 422,  # a session's calls that its dialect can't read
    UnknownNode: 410,
    CopyRefused: 422,
    EngineError: 502,
    StoreError: 503,
    NotInForce: 504,
}


def _told(status: int) -> Any:
    async def told(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status)

    return told


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong where; not the value, which need not be anything that JSON can hold."""
    detail = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 422)
