"""HTTP calls to a control plane that survive lost connections and restarts of the server.

A call whose answer was lost is repeated for as long as the caller has patience; calls that must not be repeated say so
(`once`). The token is sent in one header to one address and appears nowhere else: redirects are not followed, and no
error chains one of the HTTP client's, which carry the request's headers.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, NotRequired, TypedDict, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import msgspec
from msgspec import Struct
from yarl import URL

from polar import backoff, validation_errors
from polar.errors import PolarError

T = TypeVar("T")
Query = Mapping[str, str | int | float | None]

_READ_TIMEOUT_SECONDS = (
    120.0  # seconds without a byte, besides those that the server was asked to wait, that end a connection
)
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 10.0  # between two attempts
_MAX_CRASHES = 3  # answers with status 500 before a call is given up
_NO_HEADERS: Mapping[str, str] = {}
BUSY = 429
"""The HTTP status of a refusal because the queue is full."""


class ClientError(PolarError):
    """The control plane can't be reached, or refused a call. `status` is the HTTP status of its answer, if any."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ServerEvent(Struct, frozen=True):
    """An event of the server."""

    kind: str
    id: str | None
    fields: dict[str, Any]


_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


class _Failure(Struct):
    message: str
    is_retryable: bool  # a later attempt may succeed
    status: int | None = None
    retry_after: float | None = None
    never_reached: bool = False  # the server certainly did nothing


class _Problem(TypedDict):
    loc: list[str | int]
    msg: str
    type: NotRequired[str]


class _Refusal(Struct):
    detail: str | list[_Problem]


_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class Calls:
    """Belongs to the event loop that it is first used in."""

    def __init__(self, url: str, token: str | None, patience: float) -> None:
        """`patience`: seconds for which a call is repeated without an answer."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url!r} is no address: it begins with http:// or https://.")
        if "@" in parts.netloc:
            raise ClientError(f"The URL of {parts.hostname} contains a password: pass a token instead.")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise ClientError("The token can't be sent: it must be printable ASCII without spaces.")
        self.url = url.rstrip("/")
        self.patience = patience
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._token = token
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def call(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: bytes | None = None,
        *,
        decode: Callable[[bytes], T],
        wait: float = 0.0,
        patience: float | None = None,
        once: bool = False,
        accept: int | None = None,
    ) -> T:
        """Returns the answer, decoded by `decode`; a truncated answer counts as none. The server may take `wait`
        seconds longer than usual. `once`: do not repeat a call that the server may have received. `accept`: an HTTP
        status that is not an error. Raises ClientError."""
        retries = _RetryState(self.patience if patience is None else patience)
        while True:
            result = await self._call_once(method, path, query, body, decode, wait, accept)
            if not isinstance(result, _Failure):
                return result
            if once and not result.never_reached:
                result.is_retryable = False
            await retries.wait_or_raise(result)

    async def events(self, path: str, query: Query | None = None) -> AsyncGenerator[ServerEvent, None]:
        """Server-sent events. A lost connection is replaced by one that resumes behind the last event."""
        retries = _RetryState(self.patience)
        last: str | None = None
        while True:
            failure = _Failure(f"{self.url} ended the stream of events.", is_retryable=True)
            headers = {"Accept": "text/event-stream", **({} if last is None else {"Last-Event-ID": last})}
            try:
                async with self._request("GET", path, query, None, 0.0, headers) as response:
                    if response.status == 200:
                        fields: dict[str, str] = {}
                        async for line in response.content:
                            retries = _RetryState(self.patience)
                            name, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
                            if name:
                                fields[name] = value.removeprefix(" ")
                            elif "data" in fields:
                                last = fields.get("id", last)
                                yield ServerEvent(fields.get("event", "message"), last, _decode_fields(fields["data"]))
                                fields = {}
                    else:
                        failure = self._make_status_failure(response, await response.read())
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                failure = self._make_connection_failure(error)
            await retries.wait_or_raise(failure)

    async def _call_once(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: bytes | None,
        decode: Callable[[bytes], T],
        wait: float,
        accept: int | None,
    ) -> T | _Failure:
        try:
            async with self._request(method, path, query, body, wait) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._make_connection_failure(error)
        if response.status >= 300 and response.status != accept:
            return self._make_status_failure(response, text)
        try:
            return decode(text)
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            return _Failure(f"{self.url} does not answer like a Polar control plane: {error}.", is_retryable=False)
        except msgspec.DecodeError:
            return _Failure(f"{self.url} sent a truncated answer.", is_retryable=True)

    def _request(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: bytes | None,
        wait: float,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> "aiohttp.client._RequestContextManager":
        if self._closed:
            raise ClientError("The client is closed.")
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=self._headers, read_bufsize=2**20
            )
        parameters = {name: value for name, value in (query or {}).items() if value is not None}
        address = self.url + path + (f"?{urlencode(parameters)}" if parameters else "")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_READ_TIMEOUT_SECONDS + wait)
        return self._http.request(
            method, URL(address, encoded=True), data=body, headers=headers, timeout=timeout, allow_redirects=False
        )

    def _make_connection_failure(self, error: Exception) -> _Failure:
        if isinstance(error, aiohttp.ClientSSLError):
            return _Failure(f"{self.url} can't be trusted: {error.os_error}.", is_retryable=False)
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno or 0  # asyncio's own words for it are longer; below 0 it is a resolver's
            why = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
            message = f"No control plane answers at {self.url} ({why}): start one with `polar up`."
            return _Failure(message, is_retryable=True, never_reached=True)
        if isinstance(error, TimeoutError):
            return _Failure(f"{self.url} did not answer in time.", is_retryable=True)
        return _Failure(self._redact(f"{self.url} broke the connection off ({error or type(error).__name__})."), True)

    def _make_status_failure(self, response: aiohttp.ClientResponse, body: bytes) -> _Failure:
        """A 502 or 504 without a detail is a proxy's and retryable. A stopping server answers 500."""
        status = response.status
        detail = _read_detail(body)
        is_retryable = status in (BUSY, 500, 503) or (status in (502, 504) and detail is None)
        explanation = detail or body[:300].decode("utf-8", "replace").strip() or "nothing more"
        return _Failure(
            self._redact(f"{self.url} answered {status}: {explanation}"),
            is_retryable,
            status,
            parse_retry_after(response.headers.get("Retry-After")),
            never_reached=status == BUSY,
        )

    def _redact(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


class _RetryState:
    """The delay before the next attempt, and when to give up."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._delays = iterate_retry_delays()
        self._crashes = 0
        self._deadline: float | None = None  # counted from the first failure

    async def wait_or_raise(self, failure: _Failure) -> None:
        """Raises ClientError where the failure is not retryable or the patience is exhausted."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._patience
        self._crashes += failure.status == 500
        if not failure.is_retryable or now >= self._deadline or self._crashes > _MAX_CRASHES:
            raise ClientError(failure.message, failure.status, failure.retry_after)
        pause = max(next(self._delays), failure.retry_after or 0.0)
        await asyncio.sleep(min(pause, self._deadline - now))


def iterate_retry_delays() -> Iterator[float]:
    """Delays between attempts."""
    return backoff.backoff_delays(_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS)


def parse_retry_after(retry_after: str | None) -> float | None:
    """Parses a `Retry-After` header in seconds; dates are ignored."""
    try:
        return max(float(retry_after), 0.0) if retry_after else None
    except ValueError:
        return None


def quote_segment(name: str) -> str:
    """Quotes a name as one segment of a URL's path."""
    return quote(name, safe="")


def _read_detail(body: bytes) -> str | None:
    """The server's error message; None where the answer is not the server's."""
    try:
        detail = _decode_refusal(body).detail
    except (ValueError, RecursionError):
        return None
    if isinstance(detail, str):
        return detail
    for problem in detail:
        if problem["loc"][:1] == ["body"]:  # FastAPI's word for all of it
            del problem["loc"][0]
    return validation_errors.format_validation_errors(detail, subject="the request")
