"""The control plane: for operators, trainers and nodes, never for harnesses.

The admin token opens every route, the node token those of nodes, a session's key none.
"""

import hmac
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.gateway.http import is_loopback
from polar.rollout.engine_controller import NotAppliedYet
from polar.rollout.protocol import UnknownNode
from polar.rollout.routes import nodes, runs, service, sessions, tasks
from polar.rollout.routes.bodies import BodyLimitMiddleware, StrictRoute, StructSchemas
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
        app.add_exception_handler(handled, _make_error_handler(status))
    app.add_exception_handler(RequestValidationError, _handle_invalid_request)  # type: ignore[arg-type]

    anybody = APIRouter(route_class=StrictRoute)
    admin = APIRouter(route_class=access.admin_route_class)
    node = APIRouter(route_class=access.node_route_class)
    service.add_open_routes(anybody, parts)
    service.add_routes(admin, parts)
    tasks.add_routes(admin, parts)
    runs.add_routes(admin, parts)
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


def _make_error_handler(status: int) -> Any:
    async def handle_error(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status)

    return handle_error


async def _handle_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong where; not the value, which need not be anything that JSON can hold."""
    detail = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 422)


class Access:
    """Without an admin token everybody on this machine is let in: the service then listens on loopback alone. A page in
    a browser here would get in, too, under a name of its own that leads to loopback: so names are looked at."""

    def __init__(self, token: str | None, node_token: str | None = None) -> None:
        self._token = token or None
        self._node_token = node_token or None

    @property
    def is_open(self) -> bool:
        return self._token is None

    @property
    def admin_route_class(self) -> type[StrictRoute]:
        return _make_guarded_route_class(self._check_admin)

    @property
    def node_route_class(self) -> type[StrictRoute]:
        return _make_guarded_route_class(self._check_node)

    def _check_admin(self, request: Request) -> None:
        if self._token is None:
            _check_local(request)
        elif not _has_token(request, self._token):
            raise HTTPException(401, f"This needs the admin token: {_AUTH_HINT}", _AUTH_CHALLENGE)

    def _check_node(self, request: Request) -> None:
        if self._token is None:
            _check_local(request)
        elif not _has_token(request, self._token, self._node_token):
            raise HTTPException(401, f"This needs the node token: {_AUTH_HINT}", _AUTH_CHALLENGE)


_AUTH_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_AUTH_HINT = "Authorization: Bearer ..."
_CONTROL_TOKEN_HEADER = "x-polar-control-token"
"""The header in which clients of NVIDIA's Polar send a token."""


def _make_guarded_route_class(check: Callable[[Request], None]) -> type[StrictRoute]:
    """Routes that look who calls before they read what is sent: a stranger's megabytes are not waited for, nor kept."""

    class Guarded(StrictRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                check(request)
                return await handler(request)

            return guarded

    return Guarded


def _check_local(request: Request) -> None:
    origin = request.headers.get("Origin")
    for address in (f"//{request.headers.get('Host', '')}", *(() if origin is None else (origin,))):
        if not _is_local_address(address):
            raise HTTPException(403, "Without a token, call this as 127.0.0.1 or localhost; or set [server] token.")


def _is_local_address(address: str) -> bool:
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:
        return False


def _has_token(request: Request, token: str, other_token: str | None = None) -> bool:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    sent = [credentials.strip()] if scheme.lower() == "bearer" else []
    sent += request.headers.getlist(_CONTROL_TOKEN_HEADER)
    accepted = [accepted_token for accepted_token in (token, other_token) if accepted_token is not None]
    # Each is compared, whatever the others gave: how long it takes tells nothing.
    matches = [
        hmac.compare_digest(sent_token.encode(), accepted_token.encode())
        for sent_token in sent
        for accepted_token in accepted
    ]
    return any(matches)
