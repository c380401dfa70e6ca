"""The HTTP server in front of a backend: vLLM's routes.

    body -> request_reader -> GenerationRequest -> backend: Generation, step by step -> replies -> body or stream

Requests are read in a thread; everything else is a few microseconds a token on the event loop.
"""

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from http import HTTPStatus
from time import time
from typing import Generic, Protocol, TypeVar

from aiohttp import web

from polar.dialects import sse
from polar.engines.api_server import wire
from polar.engines.api_server.backend import (
    BrokenReplyError,
    GenerationRequest,
    GenerationT,
    RequestError,
    SamplingBackend,
)
from polar.engines.api_server.replies import (
    DONE,
    ChatWriter,
    CompletionWriter,
    GenerateWriter,
    ReplyFormat,
    ReplyWriter,
    encode_json,
)
from polar.engines.api_server.request_reader import RequestReader, decode_body
from polar.errors import ConfigError, EngineError

_MAX_BODY_BYTES = 256 * 1024 * 1024
_JSON = "application/json"
_OUTCOMES = ("completed", "aborted", "failed")

T = TypeVar("T")


class _Streamable(Protocol):
    stream: bool | None
    stream_options: wire.StreamOptions | None


class ApiServer(Generic[GenerationT]):
    """Serves a backend. Routes that only one engine has are given to it; the others are here."""

    def __init__(
        self,
        backend: SamplingBackend[GenerationT],
        card: wire.ModelCard,
        version: str,
        routes: Iterable[web.RouteDef] = (),
    ) -> None:
        self._backend = backend
        self._card = card
        self._version = version
        self._format = ReplyFormat(card.id, backend.tokenizer, backend.labels_every_chunk)
        self._reader = RequestReader(backend, card.id)
        self._counts: Counter[str] = Counter()
        self._process_start = time()
        self._runner: web.AppRunner | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_refusals])
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._handle_chat),
                web.post("/v1/completions", self._handle_completions),
                web.post("/inference/v1/generate", self._generate),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._handle_detokenize),
                web.get("/v1/models", self._handle_models),
                web.get("/health", self._handle_health),
                web.get("/version", self._get_version),
                web.get("/metrics", self._handle_metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                *routes,
            ]
        )

    async def start(self, listener: socket.socket) -> str:
        """Its address. The listener is closed with the server."""
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="engine")
        # A client that goes away cancels its handler: that is what aborts a generation.
        self._runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        host, port = listener.getsockname()[:2]
        with _translate_listen_errors(host, port):
            await web.SockSite(self._runner, listener, backlog=4096).start()
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._threads is not None:
            self._threads.shutdown()

    # Generating routes: each reads its own request and chooses how the reply is written; `_respond` does the rest.

    async def _handle_chat(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), wire.ChatRequest)
        return await self._respond(
            request, asked, partial(self._reader.read_chat, asked), lambda it: ChatWriter(it, asked, self._format)
        )

    async def _handle_completions(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), wire.CompletionRequest)
        return await self._respond(
            request,
            asked,
            partial(self._reader.read_completion, asked),
            lambda it: CompletionWriter(it, asked, self._format),
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), wire.GenerateRequest)
        return await self._respond(
            request,
            asked,
            partial(self._reader.read_generate, asked),
            lambda it: GenerateWriter(it, asked, self._format),
        )

    async def _respond(
        self,
        request: web.Request,
        asked: _Streamable,
        read_request: Callable[[], GenerationRequest],
        make_writer: Callable[[GenerationT], ReplyWriter],
    ) -> web.StreamResponse:
        self._counts["requests"] += 1
        self._counts["running"] += 1
        outcome = "failed"
        response = (
            web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"}) if asked.stream else None
        )
        try:
            generation = await self._run_in_thread(lambda: self._backend.make_generation(read_request()))
            self._backend.start_generation(generation)
            try:
                writer = make_writer(generation)
                if response is None:
                    answer: web.StreamResponse = await self._reply_at_once(generation, writer)
                else:
                    usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
                    answer = await self._stream(request, response, generation, writer, usage)
            finally:
                self._backend.end_generation(generation)
            outcome = "aborted" if generation.finish_reason == "abort" else "completed"
            return answer
        except (EngineError, BrokenReplyError) as failure:
            return await _break_off(request, response, failure)
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "aborted"
            raise
        finally:
            self._counts["running"] -= 1
            self._counts[outcome] += 1

    async def _reply_at_once(self, generation: GenerationT, writer: ReplyWriter) -> web.Response:
        async with aclosing(generation.sample_steps()) as steps:
            async for _ in steps:
                pass
        return json_response(writer.write_reply())

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        generation: GenerationT,
        writer: ReplyWriter,
        usage: bool,
    ) -> web.StreamResponse:
        async with aclosing(generation.sample_steps()) as steps:
            first = await anext(steps)  # what fails before the first token still gets a status of its own
            data = writer.write_step(first, first=True)
            await response.prepare(request)
            await response.write(writer.write_start() + data)
            async for tokens in steps:
                await response.write(writer.write_step(tokens, first=False))
        await response.write((writer.write_usage() if usage else b"") + DONE)
        await response.write_eof()
        return response

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # Routes that generate nothing

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.TokenizeRequest)
        ids: list[int] = (await self._run_in_thread(partial(self._reader.tokenize, asked))).tolist()
        reply = wire.TokenizeReply(len(ids), self._card.max_model_len, ids)
        if asked.return_token_strs:
            reply.token_strs = [self._backend.tokenizer.id_to_token(id) or "" for id in ids]
        return json_response(encode_json(reply))

    async def _handle_detokenize(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.DetokenizeRequest)
        return json_response(encode_json(wire.DetokenizeReply(self._backend.tokenizer.decode(asked.tokens))))

    async def _handle_models(self, _: web.Request) -> web.Response:
        return json_response(encode_json(wire.ModelList([self._card])))

    async def _handle_health(self, _: web.Request) -> web.Response:
        return web.Response(status=500 if self._backend.failed else 200)

    async def _get_version(self, _: web.Request) -> web.Response:
        return json_response(encode_json({"version": self._version}))

    async def _handle_metrics(self, _: web.Request) -> web.Response:
        """By vLLM's names, where it has them."""
        lines = [
            f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self._process_start!r}\n",
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {self._counts['running']}\n",
        ]
        for name, count in self._backend.counters.items():
            lines.append(f"# TYPE {name} counter\n{name} {count}\n")
        return web.Response(text="".join(lines))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "keep")
        if mode not in self._backend.pause_modes:
            known = ", ".join(self._backend.pause_modes)
            raise RequestError(f"There is no pause mode {mode!r}; known: {known}.", "mode")
        await self._backend.pause(mode)
        return json_response(b'{"status":"paused"}')

    async def _resume(self, _: web.Request) -> web.Response:
        await self._backend.resume()
        return json_response(b'{"status":"resumed"}')

    async def _is_paused(self, _: web.Request) -> web.Response:
        return json_response(encode_json({"is_paused": self._backend.paused}))

    def count_requests(self) -> dict[str, int]:
        """How many generating requests there were, how many run, and what became of the others."""
        return {name: self._counts[name] for name in ("requests", "running", *_OUTCOMES)}


async def _break_off(
    request: web.Request, response: web.StreamResponse | None, failure: EngineError | BrokenReplyError
) -> web.StreamResponse:
    """Ends a reply that failed: in the stream, if one has begun."""
    begun = response if response is not None and response.prepared else None
    if isinstance(failure, EngineError):
        if begun is None:
            raise failure
        await begun.write(sse.encode_event(_to_request_error(failure).body) + DONE)
        return begun
    if failure.data is None:
        if request.transport is not None:
            request.transport.close()
    elif begun is not None:
        await begun.write(failure.data)
    return begun or web.Response(body=failure.data, content_type=_JSON)


@web.middleware
async def _answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as refusal:
        return _make_error_response(refusal)
    except EngineError as error:
        return _make_error_response(_to_request_error(error))
    except ConnectionError:
        return web.Response()  # the client went away while we wrote: nothing to say, and nobody to say it to


def _make_error_response(refusal: RequestError) -> web.Response:
    return web.Response(body=refusal.body, status=refusal.status, content_type=_JSON)


def _to_request_error(error: EngineError) -> RequestError:
    return RequestError(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)


def json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=_JSON)


# Listening


def bind_listener(host: str, port: int) -> socket.socket:
    """Takes the address; nobody is answered before the server starts. Raises ConfigError where it is taken already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # the protocol: else Nagle may wait
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _translate_listen_errors(host, port):
            listener.bind((host, port))
    except ConfigError:
        listener.close()
        raise
    return listener


@contextmanager
def _translate_listen_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"Can't listen on {host}:{port}: {error.strerror}. Name another port.") from error


def make_stop_event() -> asyncio.Event:
    """Set when the process is told to stop."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
