"""One error type per boundary. Each says what happened and what to do, in one sentence that a user can act on."""

from typing import Literal

ApiErrorKind = Literal[
    "invalid_request",  # the request is wrong and will stay wrong
    "unsupported",  # understood, but would change the sampling in a way that we can't honour
    "context_length",
    "too_large",
    "authentication",
    "not_found",
    "method",
    "upgrade",  # another protocol was asked for
    "rate_limit",
    "overloaded",  # try again later
    "engine",  # the engine broke or answered garbage
    "timeout",
    "internal",
]

HTTP_STATUS: dict[ApiErrorKind, int] = {
    "invalid_request": 400,
    "unsupported": 400,
    "context_length": 400,
    "too_large": 413,
    "authentication": 401,
    "not_found": 404,
    "method": 405,
    "upgrade": 426,
    "rate_limit": 429,
    "overloaded": 503,
    "engine": 502,
    "timeout": 504,
    "internal": 500,
}


class PolarError(Exception):
    """Base of everything that Polar raises on purpose."""


class ApiError(PolarError):
    """What a harness is told. A dialect turns it into its provider's shape and status (`STATUS` is the usual one)."""

    def __init__(
        self, kind: ApiErrorKind, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind: ApiErrorKind = kind
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ConfigError(PolarError):
    """The configuration, or the command line, can't be used as it is."""


class EngineError(PolarError):
    """An engine can't be reached, refused a call, or answered something that is no answer.

    `kind` is what the harness should be told; `elsewhere` says that another replica may well succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: ApiErrorKind = "engine",
        retry_elsewhere: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: ApiErrorKind = kind
        self.retry_elsewhere = retry_elsewhere
        self.retry_after = retry_after

    def to_api_error(self) -> ApiError:
        """As a harness hears of it."""
        return ApiError(self.kind, str(self), retry_after=self.retry_after)


class StoreError(PolarError):
    """The store can't be opened, read or written."""
