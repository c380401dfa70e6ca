"""The OpenAPI document: what routes answer besides what was asked for, and the Structs that nodes speak in."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from polar.rollout.routes.bodies import ErrorResponse

Responses = dict[int | str, dict[str, Any]]

_STATUS_DESCRIPTIONS = {
    400: "The body is no JSON.",
    401: "The token is missing, or is another one.",
    403: "Without a token, only this machine may call, under its own name.",
    404: "There is no such thing.",
    406: "It can not be told in that form here.",
    409: "It is there already, and is another one.",
    410: "The server does not know this node (any more): it is to join again.",
    413: "The body is too large.",
    422: "Something in the request is wrong; `detail` says what.",
    429: "The run has as much waiting as it may; try again after `Retry-After` seconds.",
    502: "An engine failed.",
    503: "The store failed; try again.",
    504: "It was not done in time.",
}


_COMPONENTS = "#/components/schemas/"
_ERROR_SCHEMA = {"$ref": f"{_COMPONENTS}Problem"}
"""By reference: FastAPI would make a model of its own for each status of each route, most of what a start takes."""


def error_responses(*codes: int) -> Responses:
    """Besides those that any route may answer."""
    return {
        code: {"description": _STATUS_DESCRIPTIONS[code], "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
        for code in sorted({401, 403, 422, 503, *codes})
    }


def streamed_response(description: str, schema: dict[str, Any], media: str = "application/json") -> Responses:
    """An answer that is written piece by piece, and so is told of here."""
    return {200: {"description": description, "content": {media: {"schema": schema}}}}


class StructSchemas:
    """msgspec's Structs among the document's components."""

    def __init__(self) -> None:
        self._components: dict[str, Any] = {}

    def request_body(self, kind: Any) -> dict[str, Any]:
        """A route's `openapi_extra`."""
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": self.schema(kind)}}}}

    def response(self, kind: Any, description: str) -> Responses:
        return streamed_response(description, self.schema(kind))

    def schema(self, kind: Any) -> dict[str, Any]:
        (found,), components = msgspec.json.schema_components([kind], ref_template=_COMPONENTS + "{name}")
        self._components |= components
        return found

    def install(self, app: FastAPI) -> None:
        def document() -> dict[str, Any]:
            if app.openapi_schema is None:
                made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
                problem = ErrorResponse.model_json_schema(ref_template=_COMPONENTS + "{model}")
                made["components"]["schemas"] |= problem.pop("$defs") | {"Problem": problem} | self._components
                app.openapi_schema = made
            return app.openapi_schema

        app.openapi = document  # type: ignore[method-assign]
