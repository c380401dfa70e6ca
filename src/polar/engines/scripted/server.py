"""The scripted engine: a real HTTP server with vLLM's API, a real tokenizer, and a play instead of a model.

    request -> prompt ids -> scene -> turn of the play -> script -> generation, step by step -> reply

The prompt is rendered and encoded in a thread; everything else is a few microseconds a token on the event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from importlib.metadata import version as package_version
from pathlib import Path
from time import time
from types import TracebackType
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from polar.dialects import sse
from polar.engines.scripted import wire
from polar.engines.scripted.generation import FaultError, Generation, PrefixCache, Script, ScriptedPolicy
from polar.engines.scripted.play import Fault, Play, PlaySet
from polar.engines.scripted.replies import DONE, ChatWriter, CompletionWriter, GenerateWriter, ReplyWriter
from polar.engines.scripted.request_reader import RequestError, RequestReader, decode_body
from polar.engines.scripted.sampler import Sampler
from polar.rendering.tokenizer import load_tokenizer

TOKENIZER_FOLDER = Path(__file__).parent / "tokenizer"
"""The folder of the tokenizer that comes with the package."""

_UNSTREAMED_STEP_TOKENS = 64  # tokens at a time where nobody looks in between
_MAX_BODY_BYTES = 256 * 1024 * 1024
_JSON = "application/json"
_SLEEP_TAGS = ("weights", "kv_cache")  # what sleeps, and can be woken by itself
_GARBAGE = b'data: {"id": "chatcmpl-garb\xff\x00age", "choices": [{\n\n'

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class _Streamable(Protocol):
    stream: bool | None
    stream_options: wire.StreamOptions | None


class ScriptedServer:
    """Serves a play on a loopback port. Use it as an async context manager, or call `start` and `stop`."""

    def __init__(
        self,
        play: Play | PlaySet | None = None,
        *,
        model: str = "scripted",
        tokenizer: str | Path = TOKENIZER_FOLDER,
        max_model_len: int = 131072,
        rate: float = 0.0,
        tokens_per_chunk: int = 1,
        drift: float = 0.1,
        seed: int = 0,
        version: int = 0,
        experts: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`rate` is in tokens a second for each stream, 0 for as fast as it goes; `port` 0 takes a free one.
        With `experts`, replies to token ids say which of so many each token was routed to."""
        self.model = model
        self.max_model_len = max_model_len
        self.tokenizer = load_tokenizer(Path(tokenizer))
        self.url = ""
        self.version = version  # that it began with
        plays = play if isinstance(play, PlaySet) else PlaySet(play)
        self._interval = 1 / rate if rate else 0.0
        self._tokens_per_chunk = tokens_per_chunk
        self._experts = experts
        self._reader = RequestReader(self.tokenizer, plays, Sampler(self.tokenizer, drift, seed), model, max_model_len)
        self._policy = ScriptedPolicy(version)
        self._asleep: set[str] = set()
        self._cache = PrefixCache()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[tuple[str | None, int]] = Counter()
        self._created = int(time())
        self._process_start = time()
        self._address = (host, port)
        self._runner: web.AppRunner | None = None
        self._threads: ThreadPoolExecutor | None = None

    async def start(self) -> str:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="scripted")
        # A client that goes away cancels its handler: that is what aborts a generation.
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._threads is not None:
            self._threads.shutdown()

    async def __aenter__(self) -> "ScriptedServer":
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
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/inference/v1/generate", self._generate),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.get("/is_sleeping", self._is_sleeping),
                web.post("/update_weight_version", self._update_weight_version),
                web.get("/weight_info", self._weight_info),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/scripted/log", self._log),
            ]
        )
        return app

    # Generating routes: each reads its own request and chooses how the reply is written; `_respond` does the rest.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), wire.ChatRequest)

        def writer(generation: Generation) -> ReplyWriter:
            return ChatWriter(generation, self.tokenizer, self.model, asked)

        return await self._respond(request, partial(self._reader.read_chat, asked), writer, asked)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), wire.CompletionRequest)

        def writer(generation: Generation) -> ReplyWriter:
            return CompletionWriter(generation, self.tokenizer, self.model, asked)

        return await self._respond(request, partial(self._reader.read_completion, asked), writer, asked)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = decode_body(await request.read(), wire.GenerateRequest)

        def writer(generation: Generation) -> ReplyWriter:
            return GenerateWriter(generation, self.tokenizer, self.model, asked, experts=self._experts)

        return await self._respond(request, partial(self._reader.read_generate, asked), writer, asked)

    async def _respond(
        self,
        request: web.Request,
        prepare: Callable[[], Script],
        make_writer: Callable[[Generation], ReplyWriter],
        asked: _Streamable,
    ) -> web.StreamResponse:
        self._counts["requests"] += 1
        self._counts["running"] += 1
        outcome = "failed"
        response = (
            web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"}) if asked.stream else None
        )
        try:
            script = await self._run_in_thread(prepare)
            generation = self._make_generation(script)
            writer = make_writer(generation)
            cached = self._cache.count_cached_tokens(script)
            self._cache.add(script, 0)
            if response is None:
                answer: web.StreamResponse = await self._reply_at_once(generation, writer, cached)
            else:
                usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
                answer = await self._stream(request, response, generation, writer, cached if usage else None)
            self._cache.add(script, generation.sampled)
            outcome = "aborted" if generation.aborted else "completed"
            return answer
        except FaultError as error:
            return await self._inject_fault(request, response, error.fault)
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "aborted"
            raise
        finally:
            self._counts["running"] -= 1
            self._counts[outcome] += 1

    async def _reply_at_once(self, generation: Generation, writer: ReplyWriter, cached: int) -> web.Response:
        async with aclosing(generation.steps(1 if generation.interval else _UNSTREAMED_STEP_TOKENS)) as steps:
            async for step in steps:
                writer.write_step(step)
        return _json(writer.write_reply(cached))

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        generation: Generation,
        writer: ReplyWriter,
        cached: int | None,
    ) -> web.StreamResponse:
        """`cached` where usage is to be reported."""
        async with aclosing(generation.steps(self._tokens_per_chunk)) as steps:
            first = await anext(steps)  # what fails before the first token still gets a status of its own
            await response.prepare(request)
            await response.write(writer.write_start() + writer.write_step(first))
            async for step in steps:
                await response.write(writer.write_step(step))
        await response.write((b"" if cached is None else writer.write_usage(cached)) + DONE)
        await response.write_eof()
        return response

    async def _inject_fault(
        self, request: web.Request, response: web.StreamResponse | None, fault: Fault
    ) -> web.StreamResponse:
        """Goes wrong as the play wants it, in the stream if one has begun."""
        begun = response if response is not None and response.prepared else None
        if fault == "close" and request.transport is not None:
            request.transport.close()
        elif fault == "midstream":
            refusal = RequestError("The play breaks off here.", status=HTTPStatus.INTERNAL_SERVER_ERROR)
            if begun is None:
                raise refusal
            await begun.write(sse.encode_event(refusal.body) + DONE)
        elif fault == "garbage" and begun is not None:
            await begun.write(_GARBAGE)
        return begun or web.Response(body=_GARBAGE, content_type=_JSON)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _make_generation(self, script: Script) -> Generation:
        fault, turn = self._next_fault(script), script.turn
        if isinstance(fault, int):
            raise RequestError("The play refuses this turn.", status=HTTPStatus(fault))
        interval = self._interval if turn.token_delay is None else turn.token_delay
        return Generation(script, self._policy, interval, fault)

    def _next_fault(self, script: Script) -> int | Fault | None:
        turn, key = script.turn, (script.context.play, script.context.turn_index)
        if turn.fail is None or (turn.fail_times is not None and self._faults[key] >= turn.fail_times):
            return None
        self._faults[key] += 1
        return turn.fail

    # Routes that generate nothing

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.TokenizeRequest)
        ids: list[int] = (await self._run_in_thread(partial(self._reader.tokenize, asked))).tolist()
        reply = wire.TokenizeReply(len(ids), self.max_model_len, ids)
        if asked.return_token_strs:
            reply.token_strs = [self.tokenizer.id_to_token(id) or "" for id in ids]
        return _json(_encode(reply))

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.DetokenizeRequest)
        return _json(_encode(wire.DetokenizeReply(self.tokenizer.decode(asked.tokens))))

    async def _models(self, _: web.Request) -> web.Response:
        card = wire.ModelCard(self.model, self._created, self.model, self.max_model_len)
        return _json(_encode(wire.ModelList([card])))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self._process_start!r}\n")

    async def _version(self, _: web.Request) -> web.Response:
        return _json(_encode({"version": f"scripted-{package_version('polar')}"}))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "keep")
        if mode not in ("keep", "wait", "abort"):
            raise RequestError(f"There is no pause mode {mode!r}; known: keep, wait, abort.", "mode")
        await self._policy.pause(mode)
        return _json(b'{"status":"paused"}')

    async def _resume(self, _: web.Request) -> web.Response:
        self._policy.resume()
        return _json(b'{"status":"resumed"}')

    async def _is_paused(self, _: web.Request) -> web.Response:
        return _json(_encode({"is_paused": self._policy.paused}))

    async def _sleep(self, _: web.Request) -> web.Response:
        """Breaks off what runs and forgets the cache, as vLLM does; new generations wait until all is awake."""
        await self._policy.pause("abort")
        self._cache.clear()
        self._asleep = set(_SLEEP_TAGS)
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", list(_SLEEP_TAGS))
        if unknown := set(tags) - set(_SLEEP_TAGS):
            raise RequestError(
                f"There is no {', '.join(sorted(unknown))} to wake; known: {', '.join(_SLEEP_TAGS)}.", "tags"
            )
        self._asleep -= set(tags)
        if not self._asleep:
            self._policy.resume()
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return _json(_encode({"is_sleeping": bool(self._asleep)}))

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.VersionRequest)
        new = asked.new_version if asked.new_version is not None else asked.version
        try:
            self._policy.version = int(new if new is not None else "")
        except ValueError as error:
            raise RequestError(f"new_version must be a whole number, got {new!r}.", "new_version") from error
        return _json(_encode({"success": True, "new_version": str(self._policy.version)}))

    async def _weight_info(self, _: web.Request) -> web.Response:
        return _json(_encode({"weight_version": str(self._policy.version)}))

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self._cache.clear()
        return web.Response()

    async def _log(self, _: web.Request) -> web.Response:
        """How many generating requests there were, and what became of them."""
        names = ("requests", "running", "completed", "aborted", "failed")
        return _json(_encode({name: self._counts[name] for name in names}))


@web.middleware
async def _answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as refusal:
        return web.Response(body=refusal.body, status=refusal.status, content_type=_JSON)
    except ConnectionError:
        return web.Response()  # the client went away while we wrote: nothing to say, and nobody to say it to


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=_JSON)
