"""The rollout server, as a node sees it over HTTP (protocol.Server)."""

from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from polar.errors import ConfigError
from polar.rollout.protocol import Answer, Beat, Ended, Held, Joined, Joining, Lease, Orders, UnknownNode, Unreachable

T = TypeVar("T")

_CONNECTING = 5.0  # seconds
_COPYING = 3600.0  # a copy of a session may be large, and the way to the server long
_ANSWERING = 60.0  # a server that is alive answers every call within some beats
_REFUSED = frozenset({400, 401, 403, 404, 413, 422})


class RemoteServer:
    """Use as an async context manager."""

    def __init__(self, url: str, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a rollout server: it begins with http:// or https://.")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: aiohttp.ClientSession
        self._beating = _ANSWERING  # seconds that the answer to a beat may take

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

    async def join(self, joining: Joining) -> Joined:
        joined = await self._post("/nodes/join", joining, Joined)
        # A connection whose other end is gone without a word must not cost us our leases.
        self._beating = min(joined.beat + joined.term / 2, _ANSWERING)
        return joined

    async def lease(self, node_id: str, holding: list[Held], room: int) -> list[Lease]:
        return await self._post(_path(node_id, "lease"), {"holding": holding, "room": room}, list[Lease])

    async def beat(self, node_id: str, beat: Beat) -> Orders:
        return await self._post(_path(node_id, "beat"), beat, Orders, self._beating)

    async def finish(self, node_id: str, ended: list[Ended]) -> list[Answer]:
        return await self._post(_path(node_id, "finish"), ended, list[Answer])

    async def send_session(self, node_id: str, data: bytes) -> None:
        await self._call("PUT", _path(node_id, "sessions"), data, _COPYING)

    async def leave(self, node_id: str) -> None:
        await self._call("POST", _path(node_id, "leave"), b"")

    async def _post(self, path: str, body: Any, kind: type[T], seconds: float = _ANSWERING) -> T:
        answer = await self._call("POST", path, msgspec.json.encode(body), seconds)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise Unreachable(f"{self._url}{path} gave no answer of a rollout server: {error}.") from error

    async def _call(self, method: str, path: str, body: bytes, seconds: float = _ANSWERING) -> bytes:
        headers = {"Content-Type": "application/json" if method == "POST" else "application/octet-stream"}
        try:
            timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECTING)
            async with self._http.request(
                method, self._url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"No rollout server answers at {self._url} ({error!r}).") from error
        if response.status == 410:
            raise UnknownNode(_detail(answer))
        if response.status in _REFUSED:
            raise ConfigError(f"{self._url} refuses this node ({response.status}): {_detail(answer)}")
        if response.status != 200:
            raise Unreachable(f"{self._url}{path} answered {response.status}: {_detail(answer)}")
        return answer


def _path(node_id: str, what: str) -> str:
    return f"/nodes/{quote(node_id, safe='')}/{what}"


def _detail(answer: bytes) -> str:
    try:
        found = msgspec.json.decode(answer)
        return str(found["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
