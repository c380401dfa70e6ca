"""Request bodies, and what the OpenAPI document says of requests and answers.

Bodies are bounded, and JSON as the standard has it. What Python's own parser takes besides (NaN, half of a surrogate
pair) could be stored, but not be sent again.
"""

import re
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_SESSION_COPY_BYTES = 1024 * 1024 * 1024
"""Bytes of a session that a node sends a copy of."""
_SESSION_COPY_PATH = re.compile(r"/nodes/[^/]+/sessions$")

INT64_LIMIT = 2**63
"""Whole numbers that a database holds are smaller."""


def _check_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("it has characters that can't be printed")
    return name


def _check_no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("it has a NUL character, which not every store can keep")
    return text


StoredText = Annotated[str, AfterValidator(_check_no_nul)]
Name = Annotated[str, AfterValidator(_check_printable), Field(min_length=1, max_length=200)]
RunName = Annotated[Name, Field(description="the experiment that it belongs to")]


class Body(BaseModel):
    """What is sent to us: a field that nobody knows is most likely a known one, misspelt."""

    model_config = ConfigDict(extra="forbid")


class ErrorResponse(BaseModel):
    """What is wrong, in one sentence; or where in the request, for each thing that is."""

    detail: str | list["FieldError"]


class FieldError(BaseModel):
    type: str
    loc: list[str | int]
    msg: str


class BodyLimitMiddleware:
    """Refuses a body as soon as it is known to be too large, before any of it is kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = MAX_SESSION_COPY_BYTES if _SESSION_COPY_PATH.match(scope["path"]) else MAX_BODY_BYTES
        size = 0

        async def receive_bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise _make_too_large_error(limit)
            return message

        if _read_declared_length(scope) > limit:
            response = Response(
                msgspec.json.encode({"detail": _make_too_large_error(limit).detail}), 413, _CLOSE, _JSON
            )
            await response(scope, receive, send)
            return
        await self._app(scope, receive_bounded, send)


_JSON = "application/json"
_CLOSE = {"Connection": "close"}  # the body that was announced is not read


def _read_declared_length(scope: MutableMapping[str, Any]) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _make_too_large_error(limit: int) -> HTTPException:
    return HTTPException(413, f"The body is larger than {limit} bytes.", _CLOSE)


class StrictRequest(Request):
    async def json(self) -> Any:
        return decode_body(await self.body(), object)


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def decode_body(body: bytes, kind: type[T]) -> T:
    """Raises HTTPException where it is no JSON, or not of that kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise HTTPException(400, "The body is nested too deeply.") from error
    except msgspec.ValidationError as error:
        raise HTTPException(422, f"The body can't be used: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"The body is no JSON: {error}.") from error


def is_deeper_than(levels: int, value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(is_deeper_than(levels - 1, item) for item in inner)


def check_storable(value: T) -> T:
    """What nodes send, as it is kept. Raises HTTPException for numbers and names that no database can hold, or that
    nobody can be shown."""
    plain = msgspec.to_builtins(value)
    if is_deeper_than(_MAX_DEPTH, plain):
        raise make_body_error("it is nested too deeply")
    _check_value(plain, "")
    return value


def make_body_error(why: str) -> HTTPException:
    return HTTPException(422, f"The body can't be used: {why}.")


_NAME_FIELDS = frozenset(("node_id", "name", "store", "session_id", "backends", "replaces", "stopped", "reason"))
_MAX_NAME_CHARS = 1000
"""Characters of a name: it comes to stand in lists, logs and metrics."""
_UNCHECKED_FIELDS = frozenset(("outcome", "detail"))
"""Kept as they are, whatever is in them."""
_MAX_DEPTH = 100


def _check_value(value: Any, field: str) -> None:
    if field in _UNCHECKED_FIELDS:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_name(name, "a field")
            _check_value(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, field)
    elif isinstance(value, int) and not -INT64_LIMIT <= value < INT64_LIMIT:
        raise make_body_error(f"{field} is a number of more than 63 bits")
    elif isinstance(value, str) and field in _NAME_FIELDS:
        _check_name(value, field)


def _check_name(name: str, field: str) -> None:
    if not name.isprintable():
        raise make_body_error(f"{field} has characters that can't be printed")
    if len(name) > _MAX_NAME_CHARS:
        raise make_body_error(f"{field} is longer than {_MAX_NAME_CHARS} characters")


Responses = dict[int | str, dict[str, Any]]

_STATUS_DESCRIPTIONS = {
    400: "The body is no JSON.",
    401: "The token is missing, or is another one.",
    403: "Without a token, only this machine may call, under its own name.",
    404: "Not found.",
    406: "Unsupported media type; this route returns JSON or Arrow.",
    409: "A different one with this id already exists.",
    410: "The server does not know this node (any more): join again.",
    413: "The body is too large.",
    422: "Something in the request is wrong; `detail` says what.",
    429: "The run's queue is full; try again after `Retry-After` seconds.",
    502: "An engine failed.",
    503: "The store failed; try again.",
    504: "Not done in time.",
}


_COMPONENTS = "#/components/schemas/"
_ERROR_SCHEMA = {"$ref": f"{_COMPONENTS}Problem"}
"""By reference: FastAPI would make a model of its own for each status of each route, most of what a start takes."""


def describe_errors(*codes: int) -> Responses:
    """Besides those that any route may answer."""
    return {
        code: {"description": _STATUS_DESCRIPTIONS[code], "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
        for code in sorted({401, 403, 422, 503, *codes})
    }


def describe_stream(description: str, schema: dict[str, Any], media: str = "application/json") -> Responses:
    """Describes an answer that is written piece by piece."""
    return {200: {"description": description, "content": {media: {"schema": schema}}}}


class StructSchemas:
    """msgspec's Structs among the document's components."""

    def __init__(self) -> None:
        self._components: dict[str, Any] = {}

    def describe_request_body(self, kind: Any) -> dict[str, Any]:
        """A route's `openapi_extra`."""
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": self.get_schema(kind)}}}}

    def describe_response(self, kind: Any, description: str) -> Responses:
        return describe_stream(description, self.get_schema(kind))

    def get_schema(self, kind: Any) -> dict[str, Any]:
        (schema,), components = msgspec.json.schema_components([kind], ref_template=_COMPONENTS + "{name}")
        self._components |= components
        return schema

    def install(self, app: FastAPI) -> None:
        def build_document() -> dict[str, Any]:
            if app.openapi_schema is None:
                openapi = get_openapi(
                    title=app.title, version=app.version, description=app.description, routes=app.routes
                )
                problem = ErrorResponse.model_json_schema(ref_template=_COMPONENTS + "{model}")
                openapi["components"]["schemas"] |= problem.pop("$defs") | {"Problem": problem} | self._components
                app.openapi_schema = openapi
            return app.openapi_schema

        app.openapi = build_document  # type: ignore[method-assign]
