"""The rollout server, as a node sees it over HTTP (protocol.RolloutServer); signs of life while the node is busy."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from polar.errors import ConfigError, PolarError
from polar.rollout.protocol import (
    FinishStatus,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseId,
    ServerUnreachable,
    SessionOutcome,
    UnknownNode,
)

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_COPY_SECONDS = 3600.0  # a copy of a session may be large, and the way to the server long
_RESPONSE_SECONDS = 60.0  # a server that is alive answers every call within some beats
_REFUSED_STATUSES = frozenset({400, 401, 403, 404, 413, 422})

HANG_SECONDS = 60.0
"""Seconds without a beat of the node's own after which its loop is taken to hang."""

_LATE_BEATS = 1.5


class RemoteServer:
    """Use as an async context manager."""

    def __init__(self, url: str, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a rollout server: it begins with http:// or https://.")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: aiohttp.ClientSession
        self._beat_seconds = _RESPONSE_SECONDS  # seconds that the answer to a beat may take

    async def __aenter__(self) -> "RemoteServer":
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def join(self, request: JoinRequest) -> JoinResponse:
        response = await self._post("/nodes/join", request, JoinResponse)
        # A connection whose other end is gone without a word must not cost us our leases.
        self._beat_seconds = min(response.beat + response.term / 2, _RESPONSE_SECONDS)
        return response

    async def lease(self, node_id: str, holding: list[LeaseId], room: int) -> list[Lease]:
        return await self._post(_build_path(node_id, "lease"), {"holding": holding, "room": room}, list[Lease])

    async def heartbeat(self, node_id: str, heartbeat: Heartbeat) -> HeartbeatResponse:
        return await self._post(_build_path(node_id, "beat"), heartbeat, HeartbeatResponse, self._beat_seconds)

    async def finish(self, node_id: str, ended: list[SessionOutcome]) -> list[FinishStatus]:
        return await self._post(_build_path(node_id, "finish"), ended, list[FinishStatus])

    async def send_session(self, node_id: str, data: bytes) -> None:
        await self._call("PUT", _build_path(node_id, "sessions"), data, _COPY_SECONDS)

    async def leave(self, node_id: str) -> None:
        await self._call("POST", _build_path(node_id, "leave"), b"")

    async def _post(self, path: str, body: Any, kind: type[T], seconds: float = _RESPONSE_SECONDS) -> T:
        answer = await self._call("POST", path, msgspec.json.encode(body), seconds)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise ServerUnreachable(f"{self._url}{path} gave no answer of a rollout server: {error}.") from error

    async def _call(self, method: str, path: str, body: bytes, seconds: float = _RESPONSE_SECONDS) -> bytes:
        headers = {"Content-Type": "application/json" if method == "POST" else "application/octet-stream"}
        try:
            timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
            async with self._http.request(
                method, self._url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnreachable(f"No rollout server answers at {self._url} ({error!r}).") from error
        if response.status == 410:
            raise UnknownNode(_read_detail(answer))
        if response.status in _REFUSED_STATUSES:
            raise ConfigError(f"{self._url} refuses this node ({response.status}): {_read_detail(answer)}")
        if response.status != 200:
            raise ServerUnreachable(f"{self._url}{path} answered {response.status}: {_read_detail(answer)}")
        return answer


def _build_path(node_id: str, what: str) -> str:
    return f"/nodes/{quote(node_id, safe='')}/{what}"


def _read_detail(answer: bytes) -> str:
    try:
        document = msgspec.json.decode(answer)
        return str(document["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


log = logging.getLogger(__name__)


class KeepAlive:
    """Signs of life of a node while its event loop is busy. Use as a context manager.

    A node sends heartbeats from the loop that also serves its sessions' calls. Should that loop be busy for longer than
    a beat, a thread repeats the last heartbeat with a connection of its own, so that the server does not take the node
    for lost. The server's answer can be ignored: it says the same to the next heartbeat of the node itself. A loop that
    is busy for a minute hangs; then nobody beats any more, and others get the node's sessions.
    """

    def __init__(self, connect: Callable[[], RemoteServer]) -> None:
        """`connect` gives a connection to the server, to be opened in the thread."""
        self._connect = connect
        self._last_beat: tuple[float, float, str, Heartbeat] | None = None  # when, how often, by whom, what
        self._started = threading.Event()
        self._stop: Callable[[], object]
        self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)

    def __enter__(self) -> "KeepAlive":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join()

    def record(self, node_id: str, beat: Heartbeat, seconds: float) -> None:
        """The node beats by itself now, and will again in so many seconds."""
        self._last_beat = (time.monotonic(), seconds, node_id, beat)

    def forget(self) -> None:
        """The node leaves."""
        self._last_beat = None

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._watch())

    async def _watch(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        self._started.set()
        async with self._connect() as server:
            while True:
                last = self._last_beat
                if last is not None and _LATE_BEATS * last[1] < time.monotonic() - last[0] < HANG_SECONDS:
                    await self._repeat(server, last)
                await asyncio.sleep(0.1 if last is None else min(last[1] / 4, 0.5))

    async def _repeat(self, server: RemoteServer, last: tuple[float, float, str, Heartbeat]) -> None:
        _, seconds, node_id, beat = last
        try:
            async with asyncio.timeout(2 * seconds):
                await server.heartbeat(node_id, beat)
        except (PolarError, TimeoutError) as error:
            log.debug("The server did not hear that this node is busy: %r", error)
