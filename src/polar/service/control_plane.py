"""The control plane's listener: a thread with an event loop of its own.

    connection ─► uvicorn ─► /health                              answered here, whatever the service's loop is doing
     (thread)         └────► everything else ─► application       on the service's loop, where its state lives

The service's loop answers everybody's calls and may be busy for a moment. A supervisor must not take that for its
end. Connections are read and written in the thread alone, where those that never finish a request are
closed in time.
"""

import asyncio
import contextlib
import logging
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from socket import socket
from types import TracebackType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar.gateway.http import IDLE_TIMEOUT_SECONDS

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 2
HealthCheck = Callable[[], tuple[int, bytes]]
_HEALTH_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]


class ControlPlane:
    """Serves `app` on a listening socket. Use as an async context manager, on the loop that `app` belongs to.

    `health` gives the HTTP status and body of /health. It is called in the thread, so it must not change anything."""

    def __init__(self, app: ASGIApp, health: HealthCheck, listener: socket) -> None:
        self._app = app
        self._health = health
        self._listener = listener
        self._server: _ThreadedServer
        self._thread: threading.Thread
        self._loop: AbstractEventLoop
        self._ended = asyncio.Event()

    async def __aenter__(self) -> "ControlPlane":
        self._loop = asyncio.get_running_loop()
        bridged = _CrossLoopApp(self._app, self._health, self._loop)
        config = uvicorn.Config(
            bridged,
            http=_ReadTimeoutProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        self._server = _ThreadedServer(config)
        self._thread = threading.Thread(target=self._serve, name="control-plane", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join)

    async def wait_until_ended(self) -> None:
        """The thread ends by itself only where it fails."""
        await self._ended.wait()

    def _serve(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except Exception:
            log.exception("The control plane's listener failed")
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)


class _ThreadedServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield  # signals are the main thread's


class _ReadTimeoutProtocol(HttpToolsProtocol):
    """Closes a connection whose request does not come: headers have to be whole in time, bodies have to go on."""

    _deadline: asyncio.TimerHandle | None = None
    _in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_body:
            self._cancel_deadline()
            self._start_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._start_deadline()

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._cancel_deadline()
        super().on_message_complete()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(IDLE_TIMEOUT_SECONDS, self._close_if_silent)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_silent(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # it is we who don't read
            self._start_deadline()
        else:
            self.transport.close()


class _CrossLoopApp:
    """An ASGI application that has another one answer on another event loop."""

    def __init__(self, app: ASGIApp, health: HealthCheck, loop: AbstractEventLoop) -> None:
        self._app = app
        self._health = health
        self._loop = loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/health"):
            status, body = self._health()
            await send({"type": "http.response.start", "status": status, "headers": _HEALTH_HEADERS})
            await send({"type": "http.response.body", "body": body})
            return
        here = asyncio.get_running_loop()
        first = None if _has_body(scope) else await receive()
        head: list[Message] = []

        async def receive_there() -> Message:
            nonlocal first
            if first is not None:
                message, first = first, None
                return message
            received: Message = await _run_on(here, receive())
            return received

        async def send_there(message: Message) -> None:
            if message["type"] == "http.response.start":  # goes with what follows: one way instead of two
                head.append(message)
                return
            await _run_on(here, _send_all(send, [*head, message]))
            head.clear()

        await _run_on(self._loop, self._app(scope, receive_there, send_there))


async def _send_all(send: Send, messages: list[Message]) -> None:
    for message in messages:
        await send(message)


async def _run_on(loop: AbstractEventLoop, work: Any) -> Any:
    """Awaits a coroutine on another thread's loop; cancelled with it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope.get("headers", ()))
