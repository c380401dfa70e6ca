"""The control plane: for operators, trainers and nodes, never for harnesses."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.rollout.engine_controller import NotAppliedYet
from polar.rollout.protocol import UnknownNode
from polar.rollout.routes import nodes, policy, results, runs, service, sessions, tasks
from polar.rollout.routes.access import Access
from polar.rollout.routes.bodies import BodyLimitMiddleware, StrictRoute
from polar.rollout.routes.openapi import StructSchemas
from polar.rollout.routes.service_parts import ServiceParts
from polar.store.session_copy import CopyRefusedError


def create_app(parts: ServiceParts) -> FastAPI:
    access = Access(parts.settings.token, parts.settings.node_token)
    app = FastAPI(
        title="Polar",
        description="Rollouts of unmodified agent harnesses, token by token.",
        openapi_url="/openapi.json" if access.is_open else None,  # and with it the pages at /docs, which carry no token
    )
    structs = StructSchemas()
    structs.install(app)
    app.add_middleware(BodyLimitMiddleware)
    for handled, status in _ERROR_STATUSES.items():
        app.add_exception_handler(handled, _error_handler(status))
    app.add_exception_handler(RequestValidationError, _handle_invalid_request)  # type: ignore[arg-type]

    anybody = APIRouter(route_class=StrictRoute)
    admin = APIRouter(route_class=access.admin_route_class)
    node = APIRouter(route_class=access.node_route_class)
    service.add_open_routes(anybody, parts)
    service.add_routes(admin, parts)
    tasks.add_routes(admin, parts)
    results.add_routes(admin, parts)
    runs.add_routes(admin, parts)
    policy.add_routes(admin, parts)
    sessions.add_routes(admin, parts)
    nodes.add_routes(admin, parts)
    nodes.add_node_routes(node, parts, structs)
    if not access.is_open:
        admin.add_api_route("/openapi.json", lambda: app.openapi(), include_in_schema=False)
    for router in (anybody, admin, node):
        app.router.routes += router.routes  # include_router would make each of them a second time
    return app


_ERROR_STATUSES: dict[type[Exception], int] = {
    ConfigError: 422,  # a session's metadata, say, that give roles which don't exist
    ApiError: 422,  # a session's calls that its dialect can't read
    UnknownNode: 410,
    CopyRefusedError: 422,
    EngineError: 502,
    StoreError: 503,
    NotAppliedYet: 504,
}


def _error_handler(status: int) -> Any:
    async def handle_error(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status)

    return handle_error


async def _handle_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong where; not the value, which need not be anything that JSON can hold."""
    detail = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 422)
