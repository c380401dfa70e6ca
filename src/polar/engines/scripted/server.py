"""The scripted engine: an API server with a real tokenizer, and a play instead of a model.

GenerationRequest -> context -> turn of the play -> script -> generation, step by step
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from time import time
from types import TracebackType

from aiohttp import web

from polar.distribution import installed_version
from polar.engines.api_server import wire
from polar.engines.api_server.backend import GenerationRequest, RequestError
from polar.engines.api_server.replies import encode_json
from polar.engines.api_server.request_reader import decode_body, refuse_unsupported
from polar.engines.api_server.server import ApiServer, bind_listener, json_response
from polar.engines.scripted.generation import PrefixCache, ScriptedGeneration, ScriptedPolicy
from polar.engines.scripted.play import Fault, Play, PlaySet
from polar.engines.scripted.sampler import DriftingEncoder
from polar.engines.scripted.script import Script, ScriptWriter
from polar.rendering.tokenizer import load_tokenizer

TOKENIZER_FOLDER = Path(__file__).parent / "tokenizer"
"""The folder of the tokenizer that comes with the package."""

_SLEEP_TAGS = ("weights", "kv_cache")  # what sleeps, and can be woken by itself


class ScriptedBackend:
    """A `SamplingBackend`."""

    name = "scripted"
    ignores_media = True
    labels_every_chunk = False
    pause_modes: Sequence[str] = ("keep", "wait", "abort")
    failed = False
    counters: Mapping[str, int] = {}

    def __init__(
        self,
        plays: PlaySet,
        tokenizer: Path,
        *,
        context_length: int,
        rate: float,
        tokens_per_chunk: int,
        drift: float,
        seed: int,
        version: int,
        experts: int,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.vocabulary_size = self.tokenizer.vocabulary_size
        self.context_length = context_length
        self.policy = ScriptedPolicy(version)
        self.cache = PrefixCache()
        self.running: set[ScriptedGeneration] = set()
        self._interval = 1 / rate if rate else 0.0
        self._tokens_per_chunk = tokens_per_chunk
        self._experts = experts
        self._writer = ScriptWriter(self.tokenizer, plays, DriftingEncoder(self.tokenizer, drift, seed))
        self._faults: Counter[tuple[str | None, int]] = Counter()

    @property
    def paused(self) -> bool:
        return self.policy.paused

    def check(self, asked: wire.SamplingFields) -> None:
        """Sampling parameters are ignored: what is said is written."""
        refuse_unsupported(asked, {"n": (None, 1)}, self.name)

    def make_generation(self, request: GenerationRequest) -> ScriptedGeneration:
        script = self._writer.write(request)
        delay = script.turn.token_delay
        return ScriptedGeneration(
            request,
            script,
            self.policy,
            interval=self._interval if delay is None else delay,
            tokens_per_chunk=self._tokens_per_chunk,
            vocabulary_size=self.vocabulary_size,
            experts=self._experts,
        )

    def start_generation(self, generation: ScriptedGeneration) -> None:
        fault = self._next_fault(generation.script)
        if isinstance(fault, int):
            raise RequestError("The play refuses this turn.", status=HTTPStatus(fault))
        generation.fault = fault
        prompt_tokens = len(generation.request.prompt)
        generation.cached_tokens = self.cache.count_cached_tokens(generation.script, prompt_tokens)
        self.cache.add(generation.script, prompt_tokens, 0)
        self.running.add(generation)

    def end_generation(self, generation: ScriptedGeneration) -> None:
        self.running.discard(generation)
        if generation.finish_reason is not None:
            self.cache.add(generation.script, len(generation.request.prompt), len(generation.tokens))

    def _next_fault(self, script: Script) -> int | Fault | None:
        turn, key = script.turn, (script.context.play, script.context.turn_index)
        if turn.fail is None or (turn.fail_times is not None and self._faults[key] >= turn.fail_times):
            return None
        self._faults[key] += 1
        return turn.fail

    async def pause(self, mode: str) -> None:
        await self.policy.pause(mode)

    async def resume(self) -> None:
        self.policy.resume()


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
        self.url = ""
        self.model = model
        self.version = version  # that it began with
        self.backend = ScriptedBackend(
            play if isinstance(play, PlaySet) else PlaySet(play),
            Path(tokenizer),
            context_length=max_model_len,
            rate=rate,
            tokens_per_chunk=tokens_per_chunk,
            drift=drift,
            seed=seed,
            version=version,
            experts=experts,
        )
        self.tokenizer = self.backend.tokenizer
        self._asleep: set[str] = set()
        self._address = (host, port)
        self.server = ApiServer(
            self.backend,
            wire.ModelCard(model, int(time()), model, max_model_len),
            f"scripted-{installed_version()}",
            [
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.get("/is_sleeping", self._is_sleeping),
                web.post("/update_weight_version", self._update_weight_version),
                web.get("/weight_info", self._weight_info),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/scripted/log", self._log),
            ],
        )

    async def start(self) -> str:
        self.url = await self.server.start(bind_listener(*self._address))
        return self.url

    async def stop(self) -> None:
        await self.server.stop()

    async def __aenter__(self) -> "ScriptedServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # Routes of its own

    async def _sleep(self, _: web.Request) -> web.Response:
        """Breaks off what runs and forgets the cache, as vLLM does; new generations wait until all is awake."""
        await self.backend.pause("abort")
        self.backend.cache.clear()
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
            await self.backend.resume()
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return json_response(encode_json({"is_sleeping": bool(self._asleep)}))

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        asked = decode_body(await request.read(), wire.VersionRequest)
        new = asked.new_version if asked.new_version is not None else asked.version
        try:
            self.backend.policy.version = int(new if new is not None else "")
        except ValueError as error:
            raise RequestError(f"new_version must be a whole number, got {new!r}.", "new_version") from error
        return json_response(encode_json({"success": True, "new_version": str(self.backend.policy.version)}))

    async def _weight_info(self, _: web.Request) -> web.Response:
        return json_response(encode_json({"weight_version": str(self.backend.policy.version)}))

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.backend.cache.clear()
        return web.Response()

    async def _log(self, _: web.Request) -> web.Response:
        """How many generating requests there were, and what became of them."""
        return json_response(encode_json(self.server.count_requests()))
