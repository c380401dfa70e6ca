"""OpenAI's error shape, shared by its three dialects.

Every kind of ApiError is told apart by type and code, without reading prose. What a client does about it hangs on the
status: 429 and 5xx are tried again (after Retry-After where given), the others are final.
"""

import math
from typing import NamedTuple

from msgspec import Struct

from polar.dialects.base import EncodedError
from polar.dialects.raw_fields import encode
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind


class _ErrorCode(NamedTuple):
    type: str
    code: str | None


_ERROR_CODES: dict[ApiErrorKind, _ErrorCode] = {
    "invalid_request": _ErrorCode("invalid_request_error", None),
    "unsupported": _ErrorCode("invalid_request_error", "unsupported_parameter"),
    "context_length": _ErrorCode("invalid_request_error", "context_length_exceeded"),
    "too_large": _ErrorCode("invalid_request_error", "request_too_large"),
    "authentication": _ErrorCode("invalid_request_error", "invalid_api_key"),
    "not_found": _ErrorCode("invalid_request_error", "not_found"),
    "method": _ErrorCode("invalid_request_error", "method_not_supported"),
    "upgrade": _ErrorCode("invalid_request_error", "upgrade_required"),
    "rate_limit": _ErrorCode("requests", "rate_limit_exceeded"),
    # Not OpenAI's own `server_is_overloaded`: codex takes that one as final, and this may be tried again.
    "overloaded": _ErrorCode("server_error", "service_unavailable"),
    "engine": _ErrorCode("server_error", "bad_gateway"),
    "timeout": _ErrorCode("server_error", "timeout"),
    "internal": _ErrorCode("server_error", "server_error"),
}


class ErrorObject(Struct):
    """What stands under `error`; all four fields are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorObject


def build_error_object(error: ApiError) -> ErrorObject:
    spelling = _ERROR_CODES[error.kind]
    return ErrorObject(error.message, spelling.type, error.param, spelling.code)


def encode_error_body(error: ApiError) -> bytes:
    """The JSON of an error, as a whole answer or as the data of a stream's last event."""
    return encode(ErrorBody(build_error_object(error)))


def encode_error(error: ApiError) -> EncodedError:
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(0, math.ceil(error.retry_after)))
    return EncodedError(HTTP_STATUS[error.kind], encode_error_body(error), headers)
