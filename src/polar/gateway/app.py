"""The data plane: one listener that speaks every dialect.

    request -> key -> session -> route -> dialect.decode -> Generation -> dialect.encode -> response

A reply is streamed while it is sampled, or sent whole at its end. The last byte goes out only after the exchange is
durable, which is when a generation says that it is finished. Whatever goes wrong, the harness gets its provider's own
error shape; a bug of ours is logged and reported as one.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from aiohttp import web

from polar.config import Settings
from polar.dialects.base import Dialect, RouteOperation
from polar.dialects.raw_fields import replace_lone_surrogates
from polar.engines.fleet import EngineFleet
from polar.errors import ApiError, ConfigError, EngineError, StoreError
from polar.gateway import auth
from polar.gateway.call import HarnessCall
from polar.gateway.call_journal import CallJournal
from polar.gateway.generation import Generation, GenerationContext, GenerationRegistry
from polar.gateway.http import create_server, format_url, read_body
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.gateway.prompt_renderer import PromptRenderer
from polar.gateway.session_registry import OpenSession, SessionRegistry
from polar.plugins import load_all
from polar.store.base import Store
from polar.types import Media, Request, Text, ToolResult

log = logging.getLogger(__name__)

_THREADED_DECODE_BYTES = 1024 * 1024
"""Bodies of this size and more are decoded in a thread."""

_INLINE_DECODE_BYTES = 64 * 1024
"""Bodies up to this size are decoded on the event loop, whatever they contain."""

_MAX_INLINE_OBJECTS = 4096
"""A smaller body with more JSON objects than this is decoded in a thread, too."""

_WRITE_GAP_SECONDS = 0.05
"""Seconds between two writes that must arrive separately."""

_SHOWN_URL_CHARACTERS = 100


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
        self._prompt_ids = PromptIdParser()
        self.generations = GenerationRegistry(
            GenerationContext(
                pools,
                store,
                journal,
                metrics,
                self._prompt_ids,
                self.prompt_renderer,
                settings.engine.logprobs,
                settings.gateway.grace,
            )
        )
        sessions.add_end_listener(self._end_session)
        self._dialects: list[Dialect] = [dialect() for dialect in load_all("dialects").values()]
        self._runner: web.ServerRunner | None = None
        self._stopping = False

    async def start(self) -> str:
        """Starts to listen, and returns the base URL for harnesses."""
        await self.prompt_renderer.load_model(self._pools.default)  # before the first harness has to wait for it
        self._runner = web.ServerRunner(create_server(self.handle, self._encode_http_error), shutdown_timeout=2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=4096, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            address = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"Can't listen on {address}: {error.strerror}. Set [gateway] port.") from error
        return format_url(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Gives up running generations and records them. Closing the connections orphans the last generations, which
        are then given up as well."""
        self._stopping = True
        await self.generations.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.generations.close()
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
            return _make_error_response(
                match.dialect, ApiError("internal", "Polar's gateway failed on this request; its log says why.")
            )

    async def _answer(self, match: RouteMatch, path_key: str | None, request: web.BaseRequest) -> web.StreamResponse:
        key = path_key or auth.find_key(request.headers, request.query)
        session = await self._sessions.find_by_key(key) if key else None
        if session is None:
            raise _make_unknown_key_error()
        if match.operation in ("list_models", "get_model"):
            return self._encode_models(match, session)
        limit = self._settings.max_body or self.prompt_renderer.compute_body_limit(self._pools.get_pool(session.run))
        call = await self._read_call(match, session, request, await read_body(request, limit))
        if match.operation == "count_tokens":
            tokens = await self.prompt_renderer.count_tokens(session, call)
            if tokens is None:
                pool = self._pools.get_pool(session.run)
                tokens = await pool.count_tokens(call.request, session.group, session.replica)
            return _make_json_response(match.dialect.encode_count(tokens))
        return await self._generate(request, session, call)

    @property
    def memory_bytes(self) -> int:
        """Memory held for the next prompts of open sessions."""
        return self.prompt_renderer.memory_bytes + self._prompt_ids.memory_bytes

    async def _end_session(self, session: OpenSession) -> None:
        """Ends a session's calls, and frees the memory that was held for its next prompts."""
        await self.generations.end_all(session)
        self.prompt_renderer.forget(session)
        self._prompt_ids.forget(session.session_id)

    def _guess_dialect(self, path: str, headers: Mapping[str, str]) -> Dialect:
        """Returns the dialect that the client most likely speaks, for errors before a route is found."""
        for dialect in self._dialects:
            if dialect.recognizes(path, headers):
                return dialect
        return self._dialects[-1]

    def _encode_http_error(self, path: str, error: ApiError) -> web.Response:
        """Encodes an error of a request that could not be parsed, of which only the path is known."""
        return _make_error_response(self._guess_dialect(auth.split_path(path)[1], {}), error)

    def _route(self, method: str, path: str, request: web.BaseRequest) -> RouteMatch:
        matches = []
        path_exists = False
        for dialect in self._dialects:
            for route in dialect.routes:
                path_match = route.path.fullmatch(path)
                if path_match is None:
                    continue
                path_exists = True
                if route.method == method:
                    matches.append(RouteMatch(dialect, route.operation, path_match.groupdict()))
        if len(matches) > 1:
            matches.sort(key=lambda match: not match.dialect.recognizes(path, request.headers))
        if matches:
            return matches[0]
        if path_exists and request.headers.get("Upgrade", "").lower() == "websocket":
            # On 426, codex falls back to HTTP.
            raise ApiError("upgrade", "WebSockets are not served here: use plain HTTP.")
        if path_exists:
            raise ApiError("method", f"{auth.redact_keys(path)} does not take {method}.")
        raise ApiError("not_found", f"There is no {method} {auth.redact_keys(path)} here.")

    async def _read_call(
        self, match: RouteMatch, session: OpenSession, request: web.BaseRequest, body: bytes
    ) -> HarnessCall:
        """Decodes a body, in a thread if that would delay other calls. A body that fails is decoded again with lone
        surrogates replaced."""
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
        raw_request = match.dialect.split(repaired_body)
        decoded = match.dialect.decode_request(raw_request, params)
        if self._refuses_media_urls:
            _refuse_media_urls(decoded)
        self._sampling.apply(decoded.sampling)
        if session.sampling is not None:
            session.sampling.apply(decoded.sampling)
        session.add_model(decoded.model)
        return HarnessCall(match.dialect, params, auth.collect_hints(request.headers), body, raw_request, decoded)

    def _encode_models(self, match: RouteMatch, session: OpenSession) -> web.Response:
        replicas = self._pools.get_pool(session.run).replicas
        served = {name for replica in replicas for name in replica.engine.capabilities.models}
        names = [*session.models, *sorted(served - set(session.models))]
        return _make_json_response(match.dialect.encode_models(names, match.params.get("model")))

    async def _generate(self, request: web.BaseRequest, session: OpenSession, call: HarnessCall) -> web.StreamResponse:
        if self._stopping:
            raise ApiError("overloaded", "Polar is being stopped.")
        if session.ended:  # while the request was being read
            raise _make_unknown_key_error()
        generation = self.generations.attach_retry(session, call)
        if generation is None:
            sampling = call.request.sampling
            sampling.max_tokens = session.meter.begin_call(sampling.max_tokens)
            generation = self.generations.start(session, call)
        try:
            if call.request.stream:
                return await _send_stream(request, generation, self._settings.keep_alive)
            return await _send_reply(request, generation)
        finally:
            generation.detach()


def _is_slow_to_decode(body: bytes) -> bool:
    """Whether decoding the body on the event loop would delay other calls."""
    if len(body) <= _INLINE_DECODE_BYTES or len(body) >= _THREADED_DECODE_BYTES:
        return len(body) >= _THREADED_DECODE_BYTES
    # numpy counts eight times as fast as bytes.count, which would take 2 % of a long call.
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord("{"))) > _MAX_INLINE_OBJECTS


def _refuse_media_urls(request: Request) -> None:
    """Raises ApiError if a message names media by a URL other than `data:`.

    The gateway fetches nothing. It would pass the URL on, and the engine would fetch it from inside its own network or
    from its disk (`file://`). Agents, and whoever writes what agents read, must not have that access unless the
    operator allows it (`[engine] image_urls = "pass"`)."""
    for message in request.messages:
        for part in message.parts:
            if type(part) is Text:
                continue
            if isinstance(part, Media):
                _refuse_remote_url(part)
            elif isinstance(part, ToolResult):
                for piece in part.parts:
                    if isinstance(piece, Media):
                        _refuse_remote_url(piece)


def _refuse_remote_url(media: Media) -> None:
    address = media.url
    if address is None and media.data is not None and "://" in media.data[:64]:
        address = media.data  # where clients may write either
    if address is None or address[:5].lower() == "data:":
        return
    raise ApiError(
        "invalid_request",
        f"The {media.kind} {address[:_SHOWN_URL_CHARACTERS]!r} is refused: the engine would fetch it from its own "
        "network. "
        'Send the content as a data: URL, or set [engine] image_urls = "pass".',
    )


async def _send_reply(request: web.BaseRequest, generation: Generation) -> web.StreamResponse:
    while not generation.finished:
        await generation.wait_for_events(len(generation.events))
    if generation.error is not None:
        generation.mark_served()
        raise generation.error
    call = generation.call
    body = call.dialect.encode_reply(call.request, generation.record.build_reply())
    response = web.Response(body=body, content_type="application/json")
    # Written here rather than on return, so that we know whether the harness was still there.
    await response.prepare(request)
    await response.write_eof()
    generation.mark_served()
    return response


async def _send_stream(
    request: web.BaseRequest, generation: Generation, keep_alive_seconds: float
) -> web.StreamResponse:
    """Streams the reply. Sends a keep-alive when nothing was written for `keep_alive_seconds`, since not every sampled
    token has text to show."""
    keep_alive = _KeepAliveTimer(keep_alive_seconds, generation.wake)
    try:
        return await _relay_events(request, generation, keep_alive)
    finally:
        keep_alive.cancel()


async def _relay_events(
    request: web.BaseRequest, generation: Generation, keep_alive: "_KeepAliveTimer"
) -> web.StreamResponse:
    call, record = generation.call, generation.record
    encoder = call.dialect.create_stream_encoder(call.request, record.exchange_id, record.created)
    response: web.StreamResponse | None = None
    sent_events = 0
    while True:
        await generation.wait_for_events(sent_events)
        new_events = generation.events[sent_events:]
        pieces = []
        last_shown_event = 0
        for index, event in enumerate(new_events, sent_events + 1):
            if index == 1:
                pieces.append(encoder.start(record.prompt_usage))
            if piece := encoder.feed(event):
                pieces.append(piece)
                last_shown_event = index
        sent_events += len(new_events)
        ended = generation.finished and sent_events == len(generation.events)
        if response is None and ended and generation.error is not None and not pieces:
            # Nothing was written yet, so the error can have its own HTTP status.
            generation.mark_served()
            raise generation.error
        if ended and generation.error is not None:
            if pieces:
                response = response or await _start_response(request, encoder.content_type)
                await response.write(b"".join(pieces))
            # Google's clients recognize an error only if it arrives in a write of its own.
            await asyncio.sleep(_WRITE_GAP_SECONDS)
            pieces = [encoder.error(generation.error)]
        elif ended:
            pieces.append(encoder.finish(record.build_reply()))
        elif not pieces and keep_alive.is_due:
            pieces.append(encoder.keep_alive())
        if pieces:
            if response is None:
                response = await _start_response(request, encoder.content_type)
            await response.write(b"".join(pieces))
            keep_alive.reset()
        if last_shown_event:
            generation.mark_delivered(last_shown_event)
        if ended:
            break
    assert response is not None
    await response.write_eof()
    generation.mark_served()
    return response


class _KeepAliveTimer:
    """Measures how long nothing was written to a stream, and calls `wake` when a keep-alive is due. There is one timer
    for the stream, not one for each token: when it fires, it looks when the last write was."""

    def __init__(self, keep_alive_seconds: float, wake: Callable[[], None]) -> None:
        self._keep_alive_seconds = keep_alive_seconds
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + keep_alive_seconds
        self._timer = self._loop.call_at(self._due, self._check)

    @property
    def is_due(self) -> bool:
        return self._loop.time() >= self._due

    def reset(self) -> None:
        self._due = self._loop.time() + self._keep_alive_seconds

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.is_due:
            self._wake()
            self._timer = self._loop.call_later(self._keep_alive_seconds, self._check)
        else:
            self._timer = self._loop.call_at(self._due, self._check)


async def _start_response(request: web.BaseRequest, content_type: str) -> web.StreamResponse:
    headers = {"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


def _make_unknown_key_error() -> ApiError:
    return ApiError("authentication", "The API key is unknown, or its session has ended.")


def _make_json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _report_error(dialect: Dialect, error: ApiError, request_line: str) -> web.Response:
    """Encodes an error and logs it, since harnesses tend to hide errors. A wrong key is not logged: anybody can send
    one, as often as they like."""
    if error.kind != "authentication":
        log.warning("%s got an error (%s): %s", request_line, error.kind, error)
    return _make_error_response(dialect, error)


def _make_error_response(dialect: Dialect, error: ApiError) -> web.Response:
    encoded = dialect.encode_error(error)
    return web.Response(body=encoded.body, status=encoded.status, headers=encoded.headers)
