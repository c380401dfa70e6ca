"""What the attacks share: every dialect's calls and error shape, HTTP by the byte, and an engine that replays bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from polar.gateway.data_plane import DataPlane
from polar.gateway.generation import Generation
from polar.records.exchange import Exchange
from polar.service import Service
from tests.attack.replies import DONE, GOOD, encode, response, stream
from tests.conditions import wait_until
from tests.integration.stack import settings

PATIENCE = 120
"""Seconds after which a test takes a connection for hung. Nothing here should come near it."""


class Dialect(NamedTuple):
    name: str
    path: str
    stream_path: str
    body: dict[str, Any]
    text_field: str
    """The request's field that holds what is said, for spoiling it."""

    def call(self, *, stream: bool = False, text: str = "hi") -> tuple[str, dict[str, Any]]:
        said = json.loads(json.dumps(self.body).replace('"hi"', json.dumps(text)))
        if self.name == "google":
            return (self.stream_path if stream else self.path), said
        return self.path, said | {"stream": stream}

    def check_error(self, body: bytes, status: int) -> str:
        """That this is the provider's error, and nothing but that; its message."""
        error = json.loads(body)
        if self.name == "anthropic":
            assert error["type"] == "error"
            assert isinstance(error["error"]["type"], str)
        elif self.name == "google":
            assert error["error"]["code"] == status
            assert error["error"]["status"].isupper()
        else:
            assert error["error"].keys() == {"message", "type", "param", "code"}
        message: str = error["error"]["message"]
        assert message
        assert "Traceback" not in message
        return message


_MESSAGES = [{"role": "user", "content": "hi"}]
_CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]

DIALECTS = (
    Dialect(
        "openai_chat",
        "/v1/chat/completions",
        "/v1/chat/completions",
        {"model": "m", "messages": _MESSAGES},
        "messages",
    ),
    Dialect("openai_completions", "/v1/completions", "/v1/completions", {"model": "m", "prompt": "hi"}, "prompt"),
    Dialect("openai_responses", "/v1/responses", "/v1/responses", {"model": "m", "input": "hi"}, "input"),
    Dialect(
        "anthropic",
        "/v1/messages",
        "/v1/messages",
        {"model": "m", "max_tokens": 500, "messages": _MESSAGES},
        "messages",
    ),
    Dialect(
        "google",
        "/v1beta/models/m:generateContent",
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        {"contents": _CONTENTS},
        "contents",
    ),
)
CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, GOOGLE = DIALECTS


# HTTP by the byte


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True
    """Whether the body came to its proper end."""


class Wire:
    """One connection to a gateway, for sending what no client library would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self.reader = reader
        self.writer = writer
        self.host = host

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator["Wire"]:
        place = urlsplit(url)
        assert place.hostname
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**26)
        try:
            yield cls(reader, writer, place.netloc)
        finally:
            writer.close()

    def head(self, method: str, path: str, headers: dict[str, str] | None = None, length: int | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n"

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await asyncio.wait_for(self.writer.drain(), PATIENCE)
        except ConnectionError:
            pass  # the gateway may have answered and hung up already: what it said can still be read

    async def request(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = b""
    ) -> Answer:
        await self.send(self.head(method, path, headers, None if body is None else len(body)) + (body or b""))
        return await self.answer(has_body=method != "HEAD")

    async def answer(self, *, has_body: bool = True) -> Answer:
        return await asyncio.wait_for(self._answer(has_body), PATIENCE)

    async def _answer(self, has_body: bool) -> Answer:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if not has_body or status in (100, 204, 304):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            pieces = []
            try:
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    pieces.append(await self.reader.readexactly(size))
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
            except asyncio.IncompleteReadError:
                return Answer(status, headers, b"".join(pieces), whole=False)
            return Answer(status, headers, b"".join(pieces))
        return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))


async def ask(
    url: str, key: str, dialect: Dialect = CHAT, *, stream: bool = False, text: str = "hi", **changes: Any
) -> Answer:
    """One good call on a connection of its own; `changes` are fields of its body."""
    path, body = dialect.call(stream=stream, text=text)
    async with Wire.open(url) as wire:
        return await wire.request("POST", path, {"Authorization": f"Bearer {key}"}, encode(body | changes))


# What came of it


def is_error(dialect: Dialect, answer: Answer, *statuses: int) -> str:
    own = {502: 500, 503: 529} if dialect is ANTHROPIC else {}  # statuses of its own
    assert answer.status in [own.get(status, status) for status in statuses or (502, 503, 504)], answer
    return dialect.check_error(answer.body, answer.status)


def ends_in_error(dialect: Dialect, answer: Answer) -> bool:
    """Whether a stream that had begun ended the way the provider's do when they break."""
    assert answer.status == 200
    assert answer.whole
    last = answer.body.strip().rsplit(b"\n\n", 1)[-1]
    data = json.loads(last.rsplit(b"data: ", 1)[-1]) if b"[DONE]" not in last else {}
    return "error" in data or data.get("type") in ("error", "response.failed")


def sampled(exchange: Exchange) -> list[int]:
    return [] if exchange.sampled_ids is None else exchange.sampled_ids.tolist()


# An engine that replays bytes

Script = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class ByteEngine:
    """An inference server of whose answers a test writes every byte. The model list is always fine unless replaced."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.models = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}'
        self.fixed: dict[str, bytes] = {}  # whole answers by path, for routes beside sampling
        self.calls: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def replay(self, data: bytes, *, close: bool = True) -> None:
        """From now on every call gets these bytes; then the connection is closed, or left hanging."""

        async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            writer.write(data)
            await writer.drain()
            if close:
                writer.close()

        self.script = script

    async def start(self, port: int = 0) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.url

    async def hang_up(self) -> None:
        """Closes every connection, also those that are kept for the next call."""
        for writer in list(self._writers):
            writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self.hang_up()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                self.paths.append(path)
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
                )
                body = await reader.readexactly(int(length.partition(b":")[2]))
                if path == "/v1/models":
                    writer.write(response(self.models))
                elif path in self.fixed:
                    writer.write(self.fixed[path])
                elif self.script is not None and method == "POST":
                    self.calls.append(json.loads(body))
                    await self.script(self.calls[-1], writer)
                else:
                    writer.write(response(b'{"error":{"message":"not here"}}', "404 Not Found"))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway hung up
        finally:
            self._writers.discard(writer)
            writer.close()

    async def __aenter__(self) -> "ByteEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Bench:
    """A gateway in front of byte engines, with one open session."""

    def __init__(self, service: Service | DataPlane, engine: ByteEngine, session_id: str, key: str) -> None:
        self.service = service
        self.engine = engine
        self.session_id = session_id
        self.key = key
        self.url = service.gateway_url

    async def new_session(self) -> None:
        session, self.key = await self.service.sessions.create({})
        self.session_id = session.session_id

    def orphans(self) -> list[Generation]:
        """Those of all sessions."""
        plane = self.service.data_plane if isinstance(self.service, Service) else self.service
        generations, sessions = plane.gateway.generations, plane.sessions._sessions_by_key_hash.values()
        return [orphan for session in sessions for orphan in generations.list_orphans(session)]

    async def exchanges(self) -> list[Exchange]:
        return [exchange async for exchange in self.service.store.read_exchanges(self.session_id)]

    async def ask(self, dialect: Dialect = CHAT, *, stream: bool = False, text: str = "hi", **changes: Any) -> Answer:
        return await ask(self.url, self.key, dialect, stream=stream, text=text, **changes)

    async def recorded(self, count: int) -> list[Exchange]:
        """Waits until so many exchanges are recorded and nothing runs any more."""
        return await recorded(self.service, self.session_id, count)


async def comes_true(condition: Callable[[], bool]) -> None:
    """Waits for what must come to be soon."""
    await wait_until(condition)


async def recorded(service: Service | DataPlane, session_id: str, count: int) -> list[Exchange]:
    found: list[Exchange] = []

    async def are_there() -> bool:
        found[:] = [exchange async for exchange in service.store.read_exchanges(session_id)]
        return len(found) >= count and not any(replica.running for replica in service.pool.replicas)

    try:
        await wait_until(are_there)
    except TimeoutError:
        raise AssertionError(f"{len(found)} exchanges were recorded instead of {count}") from None
    return found


@asynccontextmanager
async def bench(data: Path, *, control: bool = False, **changes: Any) -> AsyncIterator[Bench]:
    """`control`: with the control plane; `changes`: settings, section by section."""
    async with ByteEngine() as engine:
        sections = {"engine": {"kind": "vllm", "timeout": 120} | changes.pop("engine", {})} | changes
        chosen = settings([engine.url], **sections)
        async with Service(chosen, data) if control else DataPlane(chosen, data) as service:
            session, key = await service.sessions.create({})
            yield Bench(service, engine, session.session_id, key)


async def still_works(bench: Bench) -> None:
    bench.engine.replay(stream(*GOOD))
    answer = await bench.ask(stream=True)
    assert answer.status == 200
    assert answer.body.endswith(DONE)
