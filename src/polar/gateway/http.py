"""HTTP's own side of the data plane: the server, and a request's body, bounded before and after it is unpacked."""

import asyncio
import ipaddress
import logging
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from polar.errors import ApiError
from polar.gateway.connection import ErrorEncoder, Handler, HttpServer

IDLE_TIMEOUT_SECONDS = 60.0
"""Seconds without a byte after which a request body is given up; and seconds in which a request's headers have to come,
counted from the connection's beginning or the request before."""

MIN_UPLOAD_BYTES_PER_SECOND = 1024
"""Bytes a second that a body has to come with, after the first minute."""


class _RequestBytesFilter(logging.Filter):
    """What is no HTTP is logged in one line, without the bytes themselves: a key may be among them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None and issubclass(record.exc_info[0], HttpProcessingError):
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", ()
            record.exc_info = None
        return True


_log = logging.getLogger(__name__)
_log.addFilter(_RequestBytesFilter())


def create_server(handler: Handler, encode_error: ErrorEncoder) -> web.Server:
    """A handler is cancelled when its client goes away. Bodies come as they were sent (`read_body` unpacks them).
    `encode_error` shapes errors of requests that never reach the handler."""
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
    """All of it; refused as soon as it turns out to be larger than `limit`."""
    if (request.content_length or 0) > max_bytes:
        raise _too_large_error(max_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # this was no part of the answer yet
    now = asyncio.get_running_loop().time
    begun = now()
    pieces = []
    size = 0
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_SECONDS) as idle_timeout:
            async for piece in request.content.iter_any():
                size += len(piece)
                idle_timeout.reschedule(min(now(), begun + size / MIN_UPLOAD_BYTES_PER_SECOND) + IDLE_TIMEOUT_SECONDS)
                if size > max_bytes:
                    raise _too_large_error(max_bytes)
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
        raise _too_large_error(max_bytes)
    if not unpacker.eof:
        raise ApiError("invalid_request", f"The body's {encoding} data is cut short.")
    return unpacked


def _too_large_error(max_bytes: int) -> ApiError:
    return ApiError(
        "too_large", f"The request body is larger than {max_bytes} bytes, the limit here ([gateway] max_body)."
    )
