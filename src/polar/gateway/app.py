"""The data plane: one listener that speaks every dialect.

    request -> key -> session -> route -> dialect.decode -> Generation -> dialect.encode -> response

Whatever goes wrong, the harness gets its provider's own error shape; a bug of ours is logged and told as one.
"""

import asyncio
import logging
from typing import NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from polar.config import Settings
from polar.dialects.base import Dialect, Operation
from polar.engines.pool import Pool
from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.gateway import auth
from polar.gateway.capture import Call
from polar.gateway.generation import Context, Generation
from polar.gateway.metrics import Metrics
from polar.gateway.relay import send_stream, send_whole
from polar.gateway.sessions import OpenSession, Sessions
from polar.plugins import load, names
from polar.store.base import Store

log = logging.getLogger(__name__)


class Match(NamedTuple):
    dialect: Dialect
    operation: Operation
    params: dict[str, str]


class Gateway:
    def __init__(self, settings: Settings, *, store: Store, pool: Pool, sessions: Sessions, metrics: Metrics) -> None:
        self._settings = settings.gateway
        self._sampling = settings.engine.sampling
        self._pool = pool
        self._sessions = sessions
        self._context = Context(pool, store, metrics, settings.engine.logprobs, settings.gateway.grace)
        self._dialects: list[Dialect] = [load("dialects", name)() for name in names("dialects")]
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Listens; the address that harnesses are pointed at."""
        server = web.Server(self.handle, access_log=None, handler_cancellation=True, auto_decompress=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=4096, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"Can't listen on {where}: {error.strerror}. Set [gateway] port.") from error
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        await self._sessions.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path_key, path = auth.split_path(request.path)
        dialect = self._spoken(path, request)
        try:
            match = self._route(request.method, path, request)
            dialect = match.dialect
            key = path_key or auth.find_key(request.headers, request.query)
            session = await self._sessions.by_key(key) if key else None
            if session is None:
                raise ApiError("authentication", "The API key is unknown, or its session has ended.")
            if match.operation in ("list_models", "get_model"):
                return self._models(match, session)
            call = self._understand(match, session, request, await self._read(request))
            if match.operation == "count_tokens":
                tokens = await self._pool.count_tokens(call.request, session.replica)
                return _json(dialect.encode_count(tokens))
            return await self._generate(request, call)
        except (ApiError, EngineError) as error:
            told = error if isinstance(error, ApiError) else ApiError(error.kind, str(error))
            if told.kind != "authentication":  # which anybody can fail at, as often as they like
                # Harnesses tend to hide what they were told.
                log.warning("%s %r got an error (%s): %s", request.method, path, told.kind, told)
            return _error(dialect, told)
        except StoreError as error:
            log.error("%s", error)
            return _error(dialect, ApiError("overloaded", f"The store does not answer: {error}"))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, path)
            return _error(dialect, ApiError("internal", "Polar's gateway failed on this request; its log says why."))

    def _spoken(self, path: str, request: web.BaseRequest) -> Dialect:
        """The dialect that a client of this request most likely speaks, for errors before a route is found."""
        for dialect in self._dialects:
            if dialect.recognises(path, request.headers):
                return dialect
        return self._dialects[-1]

    def _route(self, method: str, path: str, request: web.BaseRequest) -> Match:
        matches = []
        known = False
        for dialect in self._dialects:
            for route in dialect.routes:
                found = route.path.fullmatch(path)
                if found is None:
                    continue
                known = True
                if route.method == method:
                    matches.append(Match(dialect, route.operation, found.groupdict()))
        if len(matches) > 1:
            matches.sort(key=lambda match: not match.dialect.recognises(path, request.headers))
        if matches:
            return matches[0]
        if known and request.headers.get("Upgrade", "").lower() == "websocket":
            # 426 is what codex takes as "never mind" before it falls back to HTTP.
            raise ApiError("upgrade", "WebSockets are not served here: use plain HTTP.")
        if known:
            raise ApiError("method", f"{path} does not take {method}.")
        raise ApiError("not_found", f"There is no {method} {path} here.")

    async def _read(self, request: web.BaseRequest) -> bytes:
        limit = self._settings.max_body
        too_large = ApiError("too_large", f"The request body is larger than {limit} bytes ([gateway] max_body).")
        if (request.content_length or 0) > limit:
            raise too_large
        try:
            body = await request.content.read(limit + 1) if request.can_read_body else b""
            pieces = [body]
            size = len(body)
            while not request.content.at_eof():
                piece = await request.content.readany()
                size += len(piece)
                if size > limit:
                    raise too_large
                pieces.append(piece)
        except HttpProcessingError as error:
            raise ApiError("invalid_request", f"The request body can't be read: {error.message}.") from error
        return b"".join(pieces)

    def _understand(self, match: Match, session: OpenSession, request: web.BaseRequest, body: bytes) -> Call:
        params = match.params
        if "alt" in request.query:
            params["alt"] = request.query["alt"]
        wire = match.dialect.split(body)
        asked = match.dialect.decode_request(wire, params)
        self._sampling.apply(asked.sampling)
        if asked.model not in session.models:
            session.models = (*session.models[-7:], asked.model)
        return Call(session, match.dialect, params, auth.hints(request.headers), body, wire, asked)

    def _models(self, match: Match, session: OpenSession) -> web.Response:
        served = {name for replica in self._pool.replicas for name in replica.engine.capabilities.models}
        listed = [*session.models, *sorted(served - set(session.models))]
        return _json(match.dialect.encode_models(listed, match.params.get("model")))

    async def _generate(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        generation = next((orphan for orphan in call.session.orphans if orphan.call.repeats(call)), None)
        if generation is not None:
            generation.attach()
        else:
            generation = Generation(call, self._context)
        try:
            if call.request.stream:
                return await send_stream(request, generation, self._settings.keep_alive)
            return await send_whole(request, generation)
        finally:
            generation.detach()


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _error(dialect: Dialect, error: ApiError) -> web.Response:
    shaped = dialect.encode_error(error)
    return web.Response(body=shaped.body, status=shaped.status, headers=shaped.headers)
