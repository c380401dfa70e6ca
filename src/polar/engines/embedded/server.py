"""The embedded engine's HTTP server: vLLM's API over a Core, and `POST /update_weights`."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import time
from types import TracebackType
from typing import Protocol

import msgspec
from aiohttp import web

from polar.dialects import sse
from polar.engines.embedded import request_reader
from polar.engines.embedded.core import EngineCore
from polar.engines.embedded.generation import Generation, GenerationRequest
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.replies import DONE, ChatWriter, CompletionWriter, GenerateWriter, ReplyWriter
from polar.engines.embedded.request_reader import RequestError, RequestReader, decode_body
from polar.engines.embedded.weights import WeightUpdate, load_model
from polar.engines.scripted import wire
from polar.errors import ConfigError, EngineError
from polar.rendering.tokenizer import Tokenizer

_MAX_BODY_BYTES = 256 * 1024 * 1024
_JSON = "application/json"

_encode = msgspec.json.Encoder().encode


class _Streamable(Protocol):
    stream: bool
    stream_options: wire.StreamOptions | None


class EmbeddedServer:
    """Serves the model of a folder. Use it as an async context manager, or call `start` and `stop`."""

    def __init__(self, folder: Path, options: EmbeddedOptions | None = None, *, name: str | None = None) -> None:
        """`name`: of the model, as clients call it [default: the folder's]."""
        self.folder = folder.resolve()
        self.model = name or self.folder.name
        self.options = options or EmbeddedOptions()
        self.url = ""
        self.core: EngineCore
        self._reader: RequestReader
        self._created = int(time())
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Raises ConfigError where it can't listen, or can't serve the model."""
        listener = _bind_listener(self.options.host, self.options.port)  # first: large models take their time to load
        try:
            await self._load()
            # A client that goes away cancels its handler: that is what aborts a generation.
            self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
            await self._runner.setup()
            with _translate_listen_errors(self.options.host, self.options.port):
                await web.SockSite(self._runner, listener, backlog=4096).start()
        except BaseException:
            listener.close()
            await self.stop()
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self.url

    async def _load(self) -> None:
        tokenizer = Tokenizer.load(self.folder)
        model = await asyncio.to_thread(load_model, self.folder, self.options)
        self.core = EngineCore(model, tokenizer, self.options)
        await self.core.restore_weights()
        vocabulary = model.get_input_embeddings().num_embeddings
        self._reader = RequestReader(tokenizer, self.model, vocabulary, self.core.context_length)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self.core.stop()

    async def __aenter__(self) -> "EmbeddedServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_refusals])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/update_weights", self._update_weights),
                web.get("/weight_version", self._weight_version),
            ]
        )
        return app

    # Generating routes: each reads its own request and chooses how the reply is written; `_respond` does the rest.

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), request_reader.GenerateRequest)
        return await self._respond(
            request, asked, partial(self._reader.read_generate, asked), lambda it: GenerateWriter(it, self.model, asked)
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), request_reader.CompletionRequest)
        return await self._respond(
            request,
            asked,
            partial(self._reader.read_completion, asked),
            lambda it: CompletionWriter(it, self.model, asked, self.core.tokenizer),
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), request_reader.ChatRequest)
        return await self._respond(
            request,
            asked,
            partial(self._reader.read_chat, asked),
            lambda it: ChatWriter(it, self.model, asked, self.core.tokenizer),
        )

    async def _respond(
        self,
        request: web.Request,
        asked: _Streamable,
        read_request: Callable[[], GenerationRequest],
        make_writer: Callable[[Generation], ReplyWriter],
    ) -> web.StreamResponse:
        generation = self.core.start_generation(await asyncio.to_thread(read_request))
        try:
            writer = make_writer(generation)
            if asked.stream:
                usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
                return await self._stream(request, generation, writer, usage)
            async with aclosing(generation.steps()) as steps:
                async for _ in steps:
                    pass
            return _json(writer.write_reply())
        finally:
            self.core.end_generation(generation)

    async def _stream(
        self, request: web.Request, generation: Generation, writer: ReplyWriter, usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        first = True
        try:
            async with aclosing(generation.steps()) as steps:
                async for tokens in steps:
                    data = writer.write_step(tokens, first=first, last=generation.done)
                    if first:  # what fails before the first token still gets a status of its own
                        await response.prepare(request)
                        data = writer.write_start() + data
                        first = False
                    await response.write(data)
            await response.write((writer.write_usage() if usage else b"") + DONE)
        except EngineError as error:
            if first:
                raise
            await response.write(sse.encode_event(_to_request_error(error).body) + DONE)
        await response.write_eof()
        return response

    # Routes that generate nothing

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.TokenizeRequest)
        ids = await asyncio.to_thread(self._reader.tokenize, asked)
        return _json(_encode(wire.TokenizeReply(len(ids), self.core.context_length, ids)))

    async def _models(self, _: web.Request) -> web.Response:
        card = wire.ModelCard(self.model, self._created, str(self.folder), self.core.context_length, owned_by="polar")
        return _json(_encode(wire.ModelList([card])))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=500 if self.core.model_failed.is_set() else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        """By vLLM's name, where it has one."""
        counts = {
            "vllm:num_requests_running": ("gauge", self.core.running_count),
            "polar:computed_tokens_total": ("counter", self.core.computed_tokens),
        }
        return web.Response(text="".join(f"# TYPE {name} {kind}\n{name} {n}\n" for name, (kind, n) in counts.items()))

    # Policy

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "keep")
        if mode not in ("keep", "abort"):
            raise RequestError(f"There is no pause mode {mode!r}; known: keep, abort.", "mode")
        await self.core.pause()
        if mode == "abort":
            self.core.abort_all()
        return _json(b'{"status":"paused"}')

    async def _resume(self, _: web.Request) -> web.Response:
        await self.core.resume()
        return _json(b'{"status":"resumed"}')

    async def _is_paused(self, _: web.Request) -> web.Response:
        return _json(_encode({"is_paused": self.core.paused}))

    async def _update_weights(self, request: web.Request) -> web.Response:
        update = decode_body(await request.read(), WeightUpdate)
        try:
            # To its end, also where the client goes away: half an update would be no weights at all.
            await asyncio.shield(self.core.update_weights(update))
        except ConfigError as error:
            raise RequestError(str(error), "path") from error
        return await self._weight_version(request)

    async def _weight_version(self, _: web.Request) -> web.Response:
        return _json(_encode({"version": self.core.version}))


def _bind_listener(host: str, port: int) -> socket.socket:
    """Nobody is answered before it listens."""
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


@web.middleware
async def _answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as refusal:
        return _error_response(refusal)
    except EngineError as error:
        return _error_response(_to_request_error(error))
    except ConnectionError:
        return web.Response()  # the client went away while we wrote: nothing to say, and nobody to say it to


def _error_response(refusal: RequestError) -> web.Response:
    return web.Response(body=refusal.body, status=refusal.status, content_type=_JSON)


def _to_request_error(error: EngineError) -> RequestError:
    return RequestError(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=_JSON)
