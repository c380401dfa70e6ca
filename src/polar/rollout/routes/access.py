"""Who may call what: the admin token opens every route, the node token those of nodes, a session's key none."""

import hmac
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Response
from starlette.requests import Request

from polar.gateway.http import is_loopback
from polar.rollout.routes.bodies import StrictRoute


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
        return _guarded_route_class(self._check_admin)

    @property
    def node_route_class(self) -> type[StrictRoute]:
        return _guarded_route_class(self._check_node)

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


def _guarded_route_class(check: Callable[[Request], None]) -> type[StrictRoute]:
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


def _has_token(request: Request, token: str, other: str | None = None) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    sent = [given.strip()] if scheme.lower() == "bearer" else []
    sent += request.headers.getlist(_CONTROL_TOKEN_HEADER)
    accepted = [wanted for wanted in (token, other) if wanted is not None]
    # Each is compared, whatever the others gave: how long it takes tells nothing.
    found = [hmac.compare_digest(one.encode(), wanted.encode()) for one in sent for wanted in accepted]
    return any(found)
