"""The HTTP layer of the data plane: the server, its connections, and request bodies.

    bytes -> RequestParser -> aiohttp's RequestHandler -> handler -> read_body (bounded before and after unpacking)
                  |                    |
        repeated harmless      errors before dispatch, in the
        headers are merged     provider's error shape

aiohttp refuses a request that repeats one of ten singleton headers (RFC 9110). Some clients repeat `User-Agent`, and
providers accept that. `Host`, `Content-Length` and `Transfer-Encoding` decide where a request goes and where it ends:
those must stay unique, or a proxy in front and this server could disagree about them.
"""

import asyncio
import ipaddress
import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, InvalidHeader, LineTooLong
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import StreamReader

from polar.errors import ApiError

IDLE_TIMEOUT_SECONDS = 60.0
"""A request body is given up after so many seconds without a byte. A request's headers must arrive within as many
seconds after the connection's start or the previous request."""

MIN_UPLOAD_BYTES_PER_SECOND = 1024
"""Minimum rate of a request body, after the first minute."""

MAX_HEADER_BYTES = 64 * 1024
"""Limit of one header. It is large because harnesses put JSON into headers."""

MAX_HEADERS = 128
READ_BUFFER_BYTES = 64 * 1024

_MERGED_HEADERS = frozenset(
    {b"user-agent", b"content-type", b"content-location", b"content-range", b"etag", b"max-forwards", b"server"}
)
"""Headers that aiohttp refuses when repeated, and that nothing here depends on."""

_DUPLICATE_HEADER = re.compile(r"Duplicate '([\w-]+)' header found")
_MAX_MERGES = 8
"""Merges in one request's head. Each parses the head again, and a client could repeat every header."""

_HEAD_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"\s*[^\s]{1,32} (/[^\s?#]*)")

ParserResult = tuple[Sequence[tuple[RawRequestMessage, StreamReader]], bool, bytes]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
ErrorEncoder = Callable[[str, ApiError], web.Response]
"""Encodes an error for a client that asked for this path."""


class _RequestBytesFilter(logging.Filter):
    """Logs invalid HTTP in one line, without the request's bytes: a key may be among them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None and issubclass(record.exc_info[0], HttpProcessingError):
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", ()
            record.exc_info = None
        return True


_log = logging.getLogger(__name__)
_log.addFilter(_RequestBytesFilter())


def create_server(handler: Handler, encode_error: ErrorEncoder) -> web.Server:
    """Creates a server that cancels a handler when its client disconnects. Bodies stay compressed (`read_body`
    decompresses them). `encode_error` encodes errors of requests that never reach the handler."""
    return HttpServer(
        handler,
        encode_error,
        access_log=None,
        logger=_log,
        # aiohttp closes connections without a complete request after this time.
        keepalive_timeout=IDLE_TIMEOUT_SECONDS,
    )


def format_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Reads and decompresses the body. Raises ApiError as soon as it is larger than `max_bytes`."""
    if (request.content_length or 0) > max_bytes:
        raise _make_too_large_error(max_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the interim response is no part of the answer
    read_clock = asyncio.get_running_loop().time
    started_at = read_clock()
    pieces = []
    size = 0
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_SECONDS) as idle_timeout:
            async for piece in request.content.iter_any():
                size += len(piece)
                slowest_allowed = started_at + size / MIN_UPLOAD_BYTES_PER_SECOND
                idle_timeout.reschedule(min(read_clock(), slowest_allowed) + IDLE_TIMEOUT_SECONDS)
                if size > max_bytes:
                    raise _make_too_large_error(max_bytes)
                pieces.append(piece)
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError("invalid_request", f"The request body can't be read: {error}.") from error
    except TimeoutError as error:
        message = (
            f"The request body came too slowly ({IDLE_TIMEOUT_SECONDS:g} s of silence), or is not chunked as "
            "it should be."
        )
        raise ApiError("invalid_request", message) from error
    return _decompress(b"".join(pieces), request.headers.get("Content-Encoding", "").strip().lower(), max_bytes)


def _decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding in ("", "identity") or not body:
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError("invalid_request", f"The body's encoding {encoding!r} is not known here: send gzip, or none.")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: gzip or zlib, as its first bytes say
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise ApiError("invalid_request", f"The body is not what its encoding {encoding!r} says: {error}.") from error
    if len(unpacked) > max_bytes:
        raise _make_too_large_error(max_bytes)
    if not unpacker.eof:
        raise ApiError("invalid_request", f"The body's {encoding} data is cut short.")
    return unpacked


def _make_too_large_error(max_bytes: int) -> ApiError:
    return ApiError(
        "too_large", f"The request body is larger than {max_bytes} bytes, the limit here ([gateway] max_body)."
    )


class HttpServer(web.Server):
    """Creates an `HttpConnection` for each client. A handler is cancelled when its client disconnects."""

    def __init__(self, handler: Handler, encode_error: ErrorEncoder, **options: Any) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._encode_error = encode_error
        self._connection_options = options

    def __call__(self) -> "HttpConnection":
        return HttpConnection(self, self._encode_error, loop=asyncio.get_running_loop(), **self._connection_options)


class HttpConnection(web.RequestHandler):
    """Encodes HTTP errors as the provider does whose path was requested."""

    def __init__(self, server: HttpServer, encode_error: ErrorEncoder, **options: Any) -> None:
        super().__init__(
            server,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,
            **options,
        )
        self._encode_error = encode_error
        # aiohttp has no public way to choose the parser, and its C parser has no setting for repeated headers.
        self._parser: Any = RequestParser(self, self._loop)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and raises if an answer has begun
        path = request.path
        if isinstance(exc, BadHttpMessage) and isinstance(self._parser, RequestParser):
            path = self._parser.failed_path
        response = self._encode_error(path, _to_api_error(status, exc))
        response.force_close()
        return response


class RequestParser:
    """aiohttp's request parser. Merges repeated harmless headers, and reports a broken body to whoever reads it.

    The bytes of a head are kept until the head is complete. When the parser refuses a repeated header, a new parser
    gets the same head with that header merged, and stays strict about everything else. This needs all bytes of the
    head from its first: where pipelined requests hide that, repeated headers are refused."""

    def __init__(self, connection: HttpConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._parser = self._create_parser()
        self._head: list[bytes] = []
        self._is_head_aligned = True  # `_head` begins with a request's first byte
        self._merges = 0
        self._payload: StreamReader | None = None
        self._body_bytes_left: int | None = 0  # bytes of the body that are still to come; None where it is chunked
        self.failed_path = "/"
        """The path of the last request that could not be parsed, as far as it could be read."""

    def feed_data(self, data: bytes) -> ParserResult:
        payload = self._payload
        in_body = payload is not None and not payload.is_eof()
        if data and not in_body:
            self._head.append(data)
        try:
            parsed: ParserResult = self._parser.feed_data(data)
        except BadHttpMessage as error:
            if in_body and payload is not None and not payload.is_eof():
                return self._fail_body(payload, error)
            parsed = self._merge_and_parse(error)
        if parsed[0]:
            self._start_body(parsed, aligned=self._is_head_aligned and not in_body)
        elif in_body:
            self._count_body_bytes(data, len(data))
        return parsed

    def message_consumed(self) -> None:
        self._parser.message_consumed()

    def pause_reading(self) -> None:
        self._parser.pause_reading()

    def set_upgraded(self, upgraded: bool) -> None:
        self._parser.set_upgraded(upgraded)

    def _create_parser(self) -> Any:
        return HttpRequestParser(
            self._connection,
            self._loop,
            READ_BUFFER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
        )

    def _start_body(self, parsed: ParserResult, *, aligned: bool) -> None:
        messages, upgraded, _ = parsed
        message, self._payload = messages[-1]
        self._is_head_aligned = aligned and len(messages) == 1 and not upgraded
        if self._is_head_aligned:
            received = b"".join(self._head)
            self._body_bytes_left = None if message.chunked else int(message.headers.get("Content-Length", 0))
            self._count_body_bytes(received, len(received) - received.find(_HEAD_END) - len(_HEAD_END))
        self._head.clear()
        self._merges = 0

    def _count_body_bytes(self, data: bytes, size: int) -> None:
        """Notes that `data`, whose last `size` bytes are of the body, was parsed."""
        if self._body_bytes_left is not None:
            self._body_bytes_left -= size
            self._is_head_aligned &= self._body_bytes_left >= 0
        elif self._payload is not None and self._payload.is_eof():
            # The start of another head could follow, but would not end so: it would be complete, and another message.
            self._is_head_aligned &= data.endswith(_HEAD_END)

    def _fail_body(self, payload: StreamReader, error: BadHttpMessage) -> ParserResult:
        """Passes the error to the reader of the body, which answers the request, and closes the connection."""
        payload.set_exception(web.RequestPayloadError(_summarize(error)))
        payload.feed_eof()
        self._connection.close()
        return (), False, b""

    def _merge_and_parse(self, error: BadHttpMessage) -> ParserResult:
        head = b"".join(self._head)
        while True:
            duplicate = _DUPLICATE_HEADER.match(error.message)
            merged = None
            if duplicate is not None and self._is_head_aligned and self._merges < _MAX_MERGES:
                merged = _merge_header(head, duplicate[1].lower().encode())
            if merged is None:
                line = _REQUEST_LINE.match(head)
                self.failed_path = line[1].decode("utf-8", "replace") if line else "/"
                self._head.clear()
                raise error
            self._merges += 1
            self._head = [head := merged]
            self._parser = self._create_parser()
            try:
                parsed: ParserResult = self._parser.feed_data(head)
            except BadHttpMessage as next_error:
                error = next_error
            else:
                return parsed


def _merge_header(data: bytes, name: bytes) -> bytes | None:
    """Merges all complete header lines of this name into the first one. Returns None if that is not allowed. Changes
    nothing behind the first head."""
    if name not in _MERGED_HEADERS:
        return None
    head, end, body = data.partition(_HEAD_END)
    lines = head.split(b"\r\n")
    if len(lines) > MAX_HEADERS + 1:
        return None
    unfinished = [] if end else [lines.pop()]
    prefix = name + b":"
    repeated = [number for number, line in enumerate(lines) if line[: len(prefix)].lower() == prefix]
    if len(repeated) < 2:
        return None
    values = [lines[number][len(prefix) :].strip() for number in repeated]
    lines[repeated[0]] = lines[repeated[0]][: len(prefix)] + b" " + b", ".join(values)
    for number in reversed(repeated[1:]):
        del lines[number]
    return b"\r\n".join([*lines, *unfinished]) + end + body


def _to_api_error(status: int, error: BaseException | None) -> ApiError:
    if status >= 500:
        return ApiError("internal", "Polar's gateway failed on this request; its log says why.")
    reason = _summarize(error) if isinstance(error, BadHttpMessage) else "unknown reason"
    return ApiError("invalid_request", f"The request is not valid HTTP: {reason}.")


def _summarize(error: BadHttpMessage) -> str:
    """Says what is wrong without quoting the request's bytes: a key may be among them."""
    if isinstance(error, LineTooLong):
        return f"the request line or a header has more than {MAX_HEADER_BYTES} bytes"
    if isinstance(error, InvalidHeader):
        return "a header contains characters that are not allowed"
    first_line, _, other_lines = error.message.partition("\n")
    if first_line == "Bad status line:":
        first_line = other_lines.strip().partition("\n")[0]
    return first_line.strip(" :.") or type(error).__name__
