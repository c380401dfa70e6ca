"""The data plane: one listener that speaks every dialect.

    request -> key -> session -> route -> dialect.decode -> Generation -> dialect.encode -> response

Whatever goes wrong, the harness gets its provider's own error shape; a bug of ours is logged and told as one.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from aiohttp import web

from polar.config import Settings
from polar.dialects.base import Dialect, Operation
from polar.dialects.wire import mend
from polar.engines.pools import Pools
from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.gateway import auth
from polar.gateway.call_journal import CallJournal
from polar.gateway.capture import Call
from polar.gateway.generation import Context, Generation
from polar.gateway.http import create_server, read_body, url_of
from polar.gateway.media import refuse_addresses
from polar.gateway.metrics import Metrics
from polar.gateway.prompt_ids import PromptIds
from polar.gateway.prompting import Prompting
from polar.gateway.relay import send_stream, send_whole
from polar.gateway.sessions import OpenSession, Sessions
from polar.plugins import load, names
from polar.store.base import Store

log = logging.getLogger(__name__)

_LARGE = 1024 * 1024
"""Bytes of a body from which on it is decoded in a thread."""

_SMALL = 64 * 1024
"""Bytes of a body up to which nothing in it takes long."""

_MANY_OBJECTS = 4096
"""JSON objects that take a thread to decode in a smaller body."""


class Match(NamedTuple):
    dialect: Dialect
    operation: Operation
    params: dict[str, str]


class Gateway:
    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        journal: CallJournal,
        pools: Pools,
        sessions: Sessions,
        metrics: Metrics,
    ) -> None:
        self._settings = settings.gateway
        self._sampling = settings.engine.sampling
        self._refuses_addresses = settings.engine.image_urls == "refuse"
        self._pools = pools
        self._sessions = sessions
        self.prompting = Prompting(settings.engine, pools, store)
        self._context = Context(
            pools,
            store,
            journal,
            metrics,
            PromptIds(),
            self.prompting,
            settings.engine.logprobs,
            settings.gateway.grace,
        )
        sessions.add_end_listener(self._forget)
        self._dialects: list[Dialect] = [load("dialects", name)() for name in names("dialects")]
        self._runner: web.ServerRunner | None = None
        self._stopping = False

    async def start(self) -> str:
        """Listens; the address that harnesses are pointed at."""
        await self.prompting.model(self._pools.default)  # before the first harness has to wait for it
        self._runner = web.ServerRunner(create_server(self.handle, self._encode_http_error), shutdown_timeout=2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=4096, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"Can't listen on {where}: {error.strerror}. Set [gateway] port.") from error
        return url_of(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Cuts what runs, and records it. When the last harness is gone, so is all that was left to be corrected."""
        self._stopping = True
        await self._sessions.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._sessions.close()
        await self.prompting.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path_key, path = auth.split_path(request.path)
        shown = f"{request.method} {auth.shown(path)!r}"
        try:
            match = self._route(request.method, path, request)
        except ApiError as error:
            return _tell(self._spoken(path, request.headers), error, shown)
        try:
            return await self._answer(match, path_key, request)
        except ApiError as error:
            return _tell(match.dialect, error, shown)
        except EngineError as error:
            return _tell(match.dialect, error.told(), shown)
        except StoreError as error:
            return _tell(match.dialect, ApiError("overloaded", f"The store does not answer: {error}"), shown)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("%s failed", shown)
            if request.writer.output_size:
                raise  # the answer has begun: nothing fits behind it, and the connection is cut
            return _error(
                match.dialect, ApiError("internal", "Polar's gateway failed on this request; its log says why.")
            )

    async def _answer(self, match: Match, path_key: str | None, request: web.BaseRequest) -> web.StreamResponse:
        key = path_key or auth.find_key(request.headers, request.query)
        session = await self._sessions.by_key(key) if key else None
        if session is None:
            raise _unknown_key()
        if match.operation in ("list_models", "get_model"):
            return self._models(match, session)
        limit = self._settings.max_body or self.prompting.body_limit(self._pools.of(session.run))
        call = await self._read_call(match, session, request, await read_body(request, limit))
        if match.operation == "count_tokens":
            tokens = await self.prompting.count(call)
            if tokens is None:
                pool = self._pools.of(session.run)
                tokens = await pool.count_tokens(call.request, session.group, session.replica)
            return _json(match.dialect.encode_count(tokens))
        return await self._generate(request, call)

    def _forget(self, session: OpenSession) -> None:
        """A session has ended: its ids are in the store, and no prompt will begin with them."""
        self.prompting.forget(session)
        self._context.prompts.forget(session.session_id)

    def _spoken(self, path: str, headers: Mapping[str, str]) -> Dialect:
        """The dialect that a client of this request most likely speaks, for errors before a route is found."""
        for dialect in self._dialects:
            if dialect.recognises(path, headers):
                return dialect
        return self._dialects[-1]

    def _encode_http_error(self, path: str, error: ApiError) -> web.Response:
        """An error of a request that could not be parsed: its path is all that is known of it."""
        return _error(self._spoken(auth.split_path(path)[1], {}), error)

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
            raise ApiError("method", f"{auth.shown(path)} does not take {method}.")
        raise ApiError("not_found", f"There is no {method} {auth.shown(path)} here.")

    async def _read_call(self, match: Match, session: OpenSession, request: web.BaseRequest, body: bytes) -> Call:
        """Decodes a body; in a thread where that takes long enough to be noticed by others."""
        try:
            if _takes_long(body):
                return await asyncio.to_thread(self._decode_call, match, session, request, body, body)
            return self._decode_call(match, session, request, body, body)
        except ApiError as error:
            if error.kind != "invalid_request" or len(body) >= _LARGE:
                raise
            mended = mend(body) if len(body) <= _SMALL else await asyncio.to_thread(mend, body)
            if mended == body:
                raise
            return await asyncio.to_thread(self._decode_call, match, session, request, body, mended)

    def _decode_call(
        self, match: Match, session: OpenSession, request: web.BaseRequest, body: bytes, mended: bytes
    ) -> Call:
        params = match.params
        if "alt" in request.query:
            params["alt"] = request.query["alt"]
        wire = match.dialect.split(mended)
        asked = match.dialect.decode_request(wire, params)
        if self._refuses_addresses:
            refuse_addresses(asked)
        self._sampling.apply(asked.sampling)
        if session.sampling is not None:
            session.sampling.apply(asked.sampling)
        if asked.model not in session.models:
            session.models = (*session.models[-7:], asked.model)
        return Call(session, match.dialect, params, auth.hints(request.headers), body, wire, asked)

    def _models(self, match: Match, session: OpenSession) -> web.Response:
        replicas = self._pools.of(session.run).replicas
        served = {name for replica in replicas for name in replica.engine.capabilities.models}
        listed = [*session.models, *sorted(served - set(session.models))]
        return _json(match.dialect.encode_models(listed, match.params.get("model")))

    async def _generate(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        if self._stopping:
            raise ApiError("overloaded", "Polar is being stopped.")
        if call.session.ended:  # while the request was being read
            raise _unknown_key()
        generation = next((orphan for orphan in call.session.orphans if orphan.can_answer(call)), None)
        if generation is not None:
            generation.attach()
        else:
            sampling = call.request.sampling
            sampling.max_tokens = call.session.meter.begin(sampling.max_tokens)
            generation = Generation(call, self._context)
        try:
            if call.request.stream:
                return await send_stream(request, generation, self._settings.keep_alive)
            return await send_whole(request, generation)
        finally:
            generation.detach()


def _takes_long(body: bytes) -> bool:
    """Whether decoding a body would keep other calls waiting."""
    if len(body) <= _SMALL or len(body) >= _LARGE:
        return len(body) >= _LARGE
    # numpy counts eight times as fast as bytes.count, which would take 2 % of a long call.
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord("{"))) > _MANY_OBJECTS


def _unknown_key() -> ApiError:
    return ApiError("authentication", "The API key is unknown, or its session has ended.")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _tell(dialect: Dialect, error: ApiError, shown: str) -> web.Response:
    """An error, and a line in the log: harnesses tend to hide what they were told. Not for keys that are wrong, which
    anybody can send as often as they like."""
    if error.kind != "authentication":
        log.warning("%s got an error (%s): %s", shown, error.kind, error)
    return _error(dialect, error)


def _error(dialect: Dialect, error: ApiError) -> web.Response:
    shaped = dialect.encode_error(error)
    return web.Response(body=shaped.body, status=shaped.status, headers=shaped.headers)
