"""Calls to an engine's HTTP server. Failures are `EngineError`s that say what to do."""

import io
import socket
from contextvars import ContextVar

import aiohttp
import msgspec
from msgspec import Struct

from polar.errors import ApiErrorKind, EngineError

_KIND_BY_STATUS: dict[int, ApiErrorKind] = {
    400: "invalid_request",
    408: "timeout",
    413: "too_large",
    422: "invalid_request",
    429: "rate_limit",
    503: "overloaded",
    504: "timeout",
}

_SINGLE_WRITE_BYTES = 256 * 1024
"""A body up to this size is written at once; a larger one is written in pieces, so that other calls go on."""

_CONTEXT_WORDS = (b"context length", b"context_length", b"context window", b"maximum input length", b"too many tokens")
_LIMIT_WORDS = (b"max_tokens", b"max_completion_tokens", b"max_model_len")


class _Attempt:
    """One request to the engine."""

    reuses_connection = True


_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)


class EngineHttpClient:
    def __init__(self, url: str, api_key: str | None, read_timeout: float) -> None:
        """`read_timeout` is how many seconds may pass without a byte before a call is given up."""
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._read_timeout = read_timeout
        self.connections_opened = 0
        """How many connections were made. A restarted server is reached only through new ones."""
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _get_session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=self._make_socket),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self._read_timeout),
                headers=self._headers,
                read_bufsize=2**20,
                auto_decompress=True,
            )
        return self._http

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Counts a new connection. (aiohttp's traces could do that, but take 1.5 % of a short call's CPU.)"""
        self.connections_opened += 1
        if (attempt := _attempt.get()) is not None:
            attempt.reuses_connection = False
        return socket.socket(*address[:3])

    async def post(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        try:
            while True:
                attempt = _Attempt()
                _attempt.set(attempt)
                try:
                    return await self._post_once(path, body)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # A server closes idle connections after some seconds, many at once, and may do so just as one is
                    # used. Each failure removes one from the pool, so a new one comes in the end: that one must work.
                    if not attempt.reuses_connection:
                        raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.error_from_exception(error) from error

    async def _post_once(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        # Redirects are refused: prompts and keys go only to configured addresses.
        data = body if len(body) <= _SINGLE_WRITE_BYTES else io.BytesIO(body)  # aiohttp writes it piece by piece
        return await self._get_session().post(self.url + path, data=data, allow_redirects=False)

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with response:
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.error_from_exception(error) from error

    async def request(self, method: str, path: str, body: bytes | None = None, timeout: float = 30) -> bytes:
        """Makes a short call and returns the answer's body. Raises EngineError for an error status."""
        status, text = await self._fetch(method, path, body, timeout)
        if status >= 300:
            raise self.error_from_response(status, text)
        return text

    async def post_if_supported(self, path: str, body: bytes | None = None, timeout: float = 30) -> bool:
        """Makes a POST call. Returns False if the engine has no such route."""
        return await self._request_if_supported("POST", path, body, timeout) is not None

    async def get_if_supported(self, path: str) -> bytes | None:
        """Makes a GET call and returns the body, or None if the engine has no such route."""
        return await self._request_if_supported("GET", path, None, timeout=5)

    async def _request_if_supported(self, method: str, path: str, body: bytes | None, timeout: float) -> bytes | None:
        status, text = await self._fetch(method, path, body, timeout)
        if status in (404, 405):
            return None
        if status >= 300:
            raise self.error_from_response(status, text)
        return text

    async def _fetch(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._get_session().request(
                method, self.url + path, data=body, timeout=limit, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.error_from_exception(error) from error

    def error_from_exception(self, error: Exception) -> EngineError:
        message = str(error) or type(error).__name__
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
            return EngineError(f"{self.url} did not answer in time.", kind="timeout", retry_elsewhere=True)
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            reason = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else None
            return EngineError(
                f"{self.url} can't be reached: {reason or message}.", kind="overloaded", retry_elsewhere=True
            )
        if isinstance(error, aiohttp.ServerTimeoutError):
            return EngineError(f"{self.url} fell silent for {self._read_timeout:g} s.", kind="timeout")
        if isinstance(error, ValueError):
            return EngineError(f"{self.url} answered something that is no chat completion: {message}.")
        return EngineError(f"Connection lost: {self.url} broke off ({message}).", retry_elsewhere=True)

    def error_from_response(self, status: int, body: bytes, retry_after: str | None = None) -> EngineError:
        kind: ApiErrorKind = _KIND_BY_STATUS.get(status, "engine")
        if status == 400 and _mentions_context_length(body):
            kind = "context_length"
        return EngineError(
            f"The engine answered {status}: {_extract_message(body)}",
            kind=kind,
            retry_elsewhere=status in (429, 500, 502, 503),
            retry_after=float(retry_after) if retry_after and retry_after.isdecimal() else None,
        )


def _mentions_context_length(body: bytes) -> bool:
    lower = body.lower()
    return any(words in lower for words in _CONTEXT_WORDS)


def mentions_token_limit(body: bytes) -> bool:
    return _mentions_context_length(body) or any(words in body for words in _LIMIT_WORDS)


class _ErrorBody(Struct, gc=False):
    message: str | None = None
    detail: str | None = None
    error: "_ErrorBody | str | None" = None


def _extract_message(body: bytes) -> str:
    """Extracts the error message from the shapes that engines use."""
    try:
        answer = msgspec.json.decode(body, type=_ErrorBody)
    except (ValueError, RecursionError):
        return excerpt(body)
    if isinstance(answer.error, _ErrorBody):
        answer = answer.error
    return answer.message or answer.detail or (answer.error if isinstance(answer.error, str) else None) or excerpt(body)


def excerpt(body: bytes) -> str:
    text = body[:300].decode("utf-8", "replace").strip()
    return text or "(nothing)"
