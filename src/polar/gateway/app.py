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
from polar.dialects.base import Dialect, RouteOperation
from polar.dialects.raw_fields import replace_lone_surrogates
from polar.engines.fleet import EngineFleet
from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.gateway import auth
from polar.gateway.call_journal import CallJournal
from polar.gateway.capture import HarnessCall
from polar.gateway.generation import Generation, GenerationContext
from polar.gateway.http import create_server, format_url, read_body
from polar.gateway.media import refuse_media_urls
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.gateway.prompt_renderer import PromptRenderer
from polar.gateway.relay import send_reply, send_stream
from polar.gateway.session_registry import OpenSession, SessionRegistry
from polar.plugins import load, names
from polar.store.base import Store

log = logging.getLogger(__name__)

_THREADED_DECODE_BYTES = 1024 * 1024
"""Bytes of a body from which on it is decoded in a thread."""

_INLINE_DECODE_BYTES = 64 * 1024
"""Bytes of a body up to which nothing in it takes long."""

_MAX_INLINE_OBJECTS = 4096
"""JSON objects that take a thread to decode in a smaller body."""


class RouteMatch(NamedTuple):
    dialect: Dialect
    operation: RouteOperation
    params: dict[str, str]


class Gateway:
    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        journal: CallJournal,
        pools: EngineFleet,
        sessions: SessionRegistry,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings.gateway
        self._sampling = settings.engine.sampling
        self._refuses_media_urls = settings.engine.image_urls == "refuse"
        self._pools = pools
        self._sessions = sessions
        self.prompt_renderer = PromptRenderer(settings.engine, pools, store)
        self._context = GenerationContext(
            pools,
            store,
            journal,
            metrics,
            PromptIdParser(),
            self.prompt_renderer,
            settings.engine.logprobs,
            settings.gateway.grace,
        )
        sessions.add_end_listener(self._forget)
        self._dialects: list[Dialect] = [load("dialects", name)() for name in names("dialects")]
        self._runner: web.ServerRunner | None = None
        self._stopping = False

    async def start(self) -> str:
        """Listens; the address that harnesses are pointed at."""
        await self.prompt_renderer.load_model(self._pools.default)  # before the first harness has to wait for it
        self._runner = web.ServerRunner(create_server(self.handle, self._encode_http_error), shutdown_timeout=2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=4096, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"Can't listen on {where}: {error.strerror}. Set [gateway] port.") from error
        return format_url(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Cuts what runs, and records it. When the last harness is gone, so is all that was left to be corrected."""
        self._stopping = True
        await self._sessions.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._sessions.close()
        await self.prompt_renderer.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path_key, path = auth.split_path(request.path)
        request_line = f"{request.method} {auth.redact_keys(path)!r}"
        try:
            match = self._route(request.method, path, request)
        except ApiError as error:
            return _report_error(self._guess_dialect(path, request.headers), error, request_line)
        try:
            return await self._answer(match, path_key, request)
        except ApiError as error:
            return _report_error(match.dialect, error, request_line)
        except EngineError as error:
            return _report_error(match.dialect, error.to_api_error(), request_line)
        except StoreError as error:
            return _report_error(
                match.dialect, ApiError("overloaded", f"The store does not answer: {error}"), request_line
            )
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("%s failed", request_line)
            if request.writer.output_size:
                raise  # the answer has begun: nothing fits behind it, and the connection is cut
            return _error_response(
                match.dialect, ApiError("internal", "Polar's gateway failed on this request; its log says why.")
            )

    async def _answer(self, match: RouteMatch, path_key: str | None, request: web.BaseRequest) -> web.StreamResponse:
        key = path_key or auth.find_key(request.headers, request.query)
        session = await self._sessions.find_by_key(key) if key else None
        if session is None:
            raise _unknown_key_error()
        if match.operation in ("list_models", "get_model"):
            return self._encode_models(match, session)
        limit = self._settings.max_body or self.prompt_renderer.body_limit(self._pools.get_pool(session.run))
        call = await self._read_call(match, session, request, await read_body(request, limit))
        if match.operation == "count_tokens":
            tokens = await self.prompt_renderer.count_tokens(call)
            if tokens is None:
                pool = self._pools.get_pool(session.run)
                tokens = await pool.count_tokens(call.request, session.group, session.replica)
            return _json_response(match.dialect.encode_count(tokens))
        return await self._generate(request, call)

    def _forget(self, session: OpenSession) -> None:
        """A session has ended: its ids are in the store, and no prompt will begin with them."""
        self.prompt_renderer.forget(session)
        self._context.prompt_ids.forget(session.session_id)

    def _guess_dialect(self, path: str, headers: Mapping[str, str]) -> Dialect:
        """The dialect that a client of this request most likely speaks, for errors before a route is found."""
        for dialect in self._dialects:
            if dialect.recognizes(path, headers):
                return dialect
        return self._dialects[-1]

    def _encode_http_error(self, path: str, error: ApiError) -> web.Response:
        """An error of a request that could not be parsed: its path is all that is known of it."""
        return _error_response(self._guess_dialect(auth.split_path(path)[1], {}), error)

    def _route(self, method: str, path: str, request: web.BaseRequest) -> RouteMatch:
        matches = []
        known = False
        for dialect in self._dialects:
            for route in dialect.routes:
                found = route.path.fullmatch(path)
                if found is None:
                    continue
                known = True
                if route.method == method:
                    matches.append(RouteMatch(dialect, route.operation, found.groupdict()))
        if len(matches) > 1:
            matches.sort(key=lambda match: not match.dialect.recognizes(path, request.headers))
        if matches:
            return matches[0]
        if known and request.headers.get("Upgrade", "").lower() == "websocket":
            # 426 is what codex takes as "never mind" before it falls back to HTTP.
            raise ApiError("upgrade", "WebSockets are not served here: use plain HTTP.")
        if known:
            raise ApiError("method", f"{auth.redact_keys(path)} does not take {method}.")
        raise ApiError("not_found", f"There is no {method} {auth.redact_keys(path)} here.")

    async def _read_call(
        self, match: RouteMatch, session: OpenSession, request: web.BaseRequest, body: bytes
    ) -> HarnessCall:
        """Decodes a body; in a thread where that takes long enough to be noticed by others."""
        try:
            if _is_slow_to_decode(body):
                return await asyncio.to_thread(self._decode_call, match, session, request, body, body)
            return self._decode_call(match, session, request, body, body)
        except ApiError as error:
            if error.kind != "invalid_request" or len(body) >= _THREADED_DECODE_BYTES:
                raise
            repaired_body = (
                replace_lone_surrogates(body)
                if len(body) <= _INLINE_DECODE_BYTES
                else await asyncio.to_thread(replace_lone_surrogates, body)
            )
            if repaired_body == body:
                raise
            return await asyncio.to_thread(self._decode_call, match, session, request, body, repaired_body)

    def _decode_call(
        self, match: RouteMatch, session: OpenSession, request: web.BaseRequest, body: bytes, repaired_body: bytes
    ) -> HarnessCall:
        params = match.params
        if "alt" in request.query:
            params["alt"] = request.query["alt"]
        wire = match.dialect.split(repaired_body)
        decoded = match.dialect.decode_request(wire, params)
        if self._refuses_media_urls:
            refuse_media_urls(decoded)
        self._sampling.apply(decoded.sampling)
        if session.sampling is not None:
            session.sampling.apply(decoded.sampling)
        if decoded.model not in session.models:
            session.models = (*session.models[-7:], decoded.model)
        return HarnessCall(session, match.dialect, params, auth.collect_hints(request.headers), body, wire, decoded)

    def _encode_models(self, match: RouteMatch, session: OpenSession) -> web.Response:
        replicas = self._pools.get_pool(session.run).replicas
        served = {name for replica in replicas for name in replica.engine.capabilities.models}
        listed = [*session.models, *sorted(served - set(session.models))]
        return _json_response(match.dialect.encode_models(listed, match.params.get("model")))

    async def _generate(self, request: web.BaseRequest, call: HarnessCall) -> web.StreamResponse:
        if self._stopping:
            raise ApiError("overloaded", "Polar is being stopped.")
        if call.session.ended:  # while the request was being read
            raise _unknown_key_error()
        generation = next((orphan for orphan in call.session.orphans if orphan.can_answer(call)), None)
        if generation is not None:
            generation.attach()
        else:
            sampling = call.request.sampling
            sampling.max_tokens = call.session.meter.begin_call(sampling.max_tokens)
            generation = Generation(call, self._context)
        try:
            if call.request.stream:
                return await send_stream(request, generation, self._settings.keep_alive)
            return await send_reply(request, generation)
        finally:
            generation.detach()


def _is_slow_to_decode(body: bytes) -> bool:
    """Whether decoding a body would keep other calls waiting."""
    if len(body) <= _INLINE_DECODE_BYTES or len(body) >= _THREADED_DECODE_BYTES:
        return len(body) >= _THREADED_DECODE_BYTES
    # numpy counts eight times as fast as bytes.count, which would take 2 % of a long call.
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord("{"))) > _MAX_INLINE_OBJECTS


def _unknown_key_error() -> ApiError:
    return ApiError("authentication", "The API key is unknown, or its session has ended.")


def _json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _report_error(dialect: Dialect, error: ApiError, request_line: str) -> web.Response:
    """An error, and a line in the log: harnesses tend to hide what they were told. Not for keys that are wrong, which
    anybody can send as often as they like."""
    if error.kind != "authentication":
        log.warning("%s got an error (%s): %s", request_line, error.kind, error)
    return _error_response(dialect, error)


def _error_response(dialect: Dialect, error: ApiError) -> web.Response:
    shaped = dialect.encode_error(error)
    return web.Response(body=shaped.body, status=shaped.status, headers=shaped.headers)
