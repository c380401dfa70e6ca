"""vLLM. The scripted engine speaks the same.

Prompts that the gateway rendered go in as token ids and come back as token ids (`/inference/v1/generate`, which also
says which weights sampled which tokens; where the server has no such route, `/v1/completions`). What only the server
can render goes through its chat API with `return_token_ids`.
"""

import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from polar.dialects.sse import EventParser
from polar.engines import chat_wire as w
from polar.engines.base import Capabilities, Chunk, EngineState, TokenPrompt
from polar.engines.openai import OpenAIEngine
from polar.engines.tools import flatten_request
from polar.errors import EngineError
from polar.rendering.tokenizer import Tokenizer, load_tokenizer
from polar.types import Request, SamplingParams


class _Count(Struct):
    count: int


class _TokenList(Struct):
    tokens: list[int] | None = None


class _StateReply(Struct):
    is_sleeping: bool = False
    is_paused: bool = False


_count = msgspec.json.Decoder(_Count)
_token_list = msgspec.json.Decoder(_TokenList)
_state_decoder = msgspec.json.Decoder(_StateReply)
_GENERATE_PATH = "/inference/v1/generate"
_PROCESS_START_METRIC = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)
_RUNNING_METRIC = re.compile(r"^vllm:num_requests_running(?:\{.*\})? ([0-9.]+)$", re.MULTILINE)
_AWAKE_METRIC = re.compile(r'^vllm:engine_sleep_state\{.*sleep_state="awake".*\} 1(?:\.0)?$', re.MULTILINE)

SLEEP_TIMEOUT_SECONDS = 300.0
"""Seconds that an engine may take to move its weights out of the accelerator's memory, or back."""

ReadIntoChunk = Callable[[Chunk, bytes], None]
"""Adds what a reply of ids, or an event of its stream, says. Raises ValueError where it is none."""


class VllmEngine(OpenAIEngine):
    extra_fields = b'"return_token_ids":true'
    capabilities = Capabilities(logprobs="raw", accepts_token_ids=True)
    _has_generate_route = True  # until the server says that it has no such route
    _tokenizer: Tokenizer | None = None
    chat_streams_token_ids = True
    """Whether its chat API gives token ids with streams, too."""

    def find_tokenizer_folder(self) -> str | None:
        """An engine on this machine says where its model lies; elsewhere the path means nothing."""
        named = super().find_tokenizer_folder()
        if named is None and self._root and (Path(self._root) / "tokenizer.json").is_file():
            return self._root
        return named

    def apply_sampling_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """A model's generation_config.json would otherwise set these behind our back."""
        sampling = super().apply_sampling_defaults(sampling)
        if sampling.top_k is None:
            sampling.top_k = -1
        if sampling.min_p is None:
            sampling.min_p = 0.0
        if sampling.repetition_penalty is None:
            sampling.repetition_penalty = 1.0
        return sampling

    # Token ids in, token ids out

    async def generate(
        self, request: Request, *, stream: bool, prompt: TokenPrompt | None = None
    ) -> AsyncGenerator[Chunk, None]:
        if prompt is None:
            chunks = super().generate(request, stream=stream and self.chat_streams_token_ids)
        else:
            chunks = self._sample(request, prompt, stream)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    async def _sample(self, request: Request, prompt: TokenPrompt, stream: bool) -> AsyncGenerator[Chunk, None]:
        if self.model is None:
            await self.start()
        call = self.prepare(request, stream)
        room = self._count_remaining_tokens(prompt)
        if room is not None:
            call.sampling.max_tokens = min(call.sampling.max_tokens or room, room)
        response = await self._open_generation(call, prompt)
        read_into_chunk = self._make_chunk_reader(wants_logprobs=request.logprobs is not None)
        try:
            if stream:
                async for chunk in self._read_id_stream(response, read_into_chunk):
                    yield chunk
            else:
                body = await self._http.read(response)
                chunk = Chunk()
                try:
                    read_into_chunk(chunk, body)
                except ValueError as error:
                    raise self._http.error_from_exception(error) from error
                if chunk.finish_reason is None:
                    chunk.finish_reason = "stop"
                yield chunk
        finally:
            response.close()

    def _count_remaining_tokens(self, prompt: TokenPrompt) -> int | None:
        length = self.capabilities.context_length
        if length is None:
            return None
        if len(prompt.ids) >= length:
            raise EngineError(
                f"This model's maximum context length is {length} tokens, and the prompt has {len(prompt.ids)}.",
                kind="context_length",
            )
        return length - len(prompt.ids)

    async def _open_generation(self, call: Request, prompt: TokenPrompt) -> aiohttp.ClientResponse:
        if self._has_generate_route:
            response = await self._http.post(_GENERATE_PATH, self._generate_body(call, prompt))
            if response.status == 200:
                return response
            refusal = await self._http.read(response)
            if response.status != 404:
                raise self._http.error_from_response(response.status, refusal, response.headers.get("Retry-After"))
        response = await self._http.post("/v1/completions", self._completion_body(call, prompt))
        if response.status == 200:
            self._has_generate_route = False  # a model that isn't there is a 404 of either route
            return response
        refusal = await self._http.read(response)
        raise self._http.error_from_response(response.status, refusal, response.headers.get("Retry-After"))

    def _generate_body(self, call: Request, prompt: TokenPrompt) -> bytes:
        stream = b',"stream":true,"stream_options":{"include_usage":true}' if call.stream else b""
        model, parameters = msgspec.json.encode(call.model), msgspec.json.encode(_build_sampling_parameters(call))
        return b'{"model":%b,"sampling_params":%b%b,"token_ids":[%b]}' % (model, parameters, stream, prompt.json)

    def _completion_body(self, call: Request, prompt: TokenPrompt) -> bytes:
        fields = _build_sampling_parameters(call) | {
            "model": call.model,
            "return_token_ids": True,
            "stream": call.stream,
        }
        if call.stream:
            fields["stream_options"] = {"include_usage": True}
        return b'%b,"prompt":[%b]}' % (msgspec.json.encode(fields)[:-1], prompt.json)

    async def _read_id_stream(
        self, response: aiohttp.ClientResponse, read_into_chunk: ReadIntoChunk
    ) -> AsyncGenerator[Chunk, None]:
        parser = EventParser()
        finished = False
        try:
            async for piece in response.content.iter_any():
                # What came in one piece is handed on as one chunk: an engine that is ahead is caught up with quickly.
                chunk = Chunk()
                failure: EngineError | ValueError | None = None
                try:
                    for data in parser.feed(piece):
                        if data != b"[DONE]":
                            read_into_chunk(chunk, data)
                except (EngineError, ValueError) as error:
                    failure = error  # what came before it was sampled all the same
                finished = finished or chunk.finish_reason is not None
                yield chunk
                if failure is not None:
                    raise failure
        except ValueError as error:
            raise self._http.error_from_exception(error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if not finished:  # else all was said before the connection broke
                raise self._http.error_from_exception(error) from error
        if not finished:
            raise EngineError(f"{self.url} ended its stream without a finish reason.")

    def _make_chunk_reader(self, *, wants_logprobs: bool) -> ReadIntoChunk:
        """`wants_logprobs`: the harness asked for log-probabilities itself."""
        return lambda whole, data: self._read_into_chunk(whole, data, wants_logprobs)

    def _read_into_chunk(self, merged: Chunk, data: bytes, wants_logprobs: bool) -> None:
        reply, _ = w.read_reply(data)
        if reply.error != w.JSON_NULL:
            raise self._http.error_from_response(500, bytes(reply.error))
        if reply.usage is not None:
            merged.usage = w.to_usage(reply.usage)
        if not reply.choices:
            return
        chunk = Chunk()
        w.fill_chunk(chunk, reply.choices[0])
        merged.ids = merged.ids + chunk.ids
        if chunk.logprobs is not None:
            merged.logprobs = (merged.logprobs or []) + chunk.logprobs
        if wants_logprobs:
            named = (
                w.read_id_alternatives(data, self._decode_token)
                if self._has_generate_route
                else w.read_text_alternatives(data)
            )
            merged.alternatives = (merged.alternatives or []) + (named or [])
        merged.versions = chunk.versions or merged.versions
        merged.routed_experts = chunk.routed_experts or merged.routed_experts
        if chunk.finish_reason is not None:
            merged.finish_reason, merged.stop_sequence = chunk.finish_reason, chunk.stop_sequence

    def _decode_token(self, id: int) -> str:
        if self._tokenizer is None:
            folder = self.find_tokenizer_folder()
            assert folder is not None  # ids come from a prompt that was rendered with it
            self._tokenizer = load_tokenizer(Path(folder))
        return self._tokenizer.decode_token(id)

    # Beside sampling

    async def count_tokens(self, request: Request) -> int:
        if self.model is None:
            await self.start()
        call = self.prepare(flatten_request(request), stream=False)
        body = await self._http.request("POST", "/tokenize", self._dialect.encode_request(call))
        try:
            return _count.decode(body).count
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}/tokenize did not answer with a count: {error}.") from error

    async def tokenize(self, text: str) -> list[int] | None:
        fields = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            return _token_list.decode(await self._http.request("POST", "/tokenize", msgspec.json.encode(fields))).tokens
        except (ValueError, RecursionError):
            return None
        except EngineError as error:
            if error.retry_elsewhere:  # it could not be asked
                raise
            return None

    async def reports_version_spans(self) -> bool:
        """Only the token-in, token-out route reports them (vLLM: --enable-scale-out)."""
        body = b'{"model":%b,"token_ids":[1,2,3],"sampling_params":{"max_tokens":1}}' % msgspec.json.encode(self.model)
        try:
            return b"weight_versions" in await self._http.request("POST", _GENERATE_PATH, body)
        except EngineError:
            return False

    async def count_running_calls(self) -> int | None:
        try:
            metrics = (await self._http.request("GET", "/metrics", timeout=5)).decode()
        except EngineError:
            return None
        counts = _RUNNING_METRIC.findall(metrics)
        return sum(int(float(count)) for count in counts) if counts else None

    async def get_process_start_time(self) -> float | None:
        found = _PROCESS_START_METRIC.search((await self._http.get_if_supported("/metrics") or b"").decode())
        return float(found[1]) if found else None

    async def get_state(self) -> EngineState | None:
        """A server without these routes can neither be frozen nor sent to sleep. vLLM 0.32 says that it sleeps when it
        is merely paused, and the other way round: its metrics tell."""
        if not (await self._query_state("/is_sleeping")).is_sleeping:
            return "frozen" if (await self._query_state("/is_paused")).is_paused else "running"
        metrics = (await self._http.get_if_supported("/metrics") or b"").decode()
        return "frozen" if _AWAKE_METRIC.search(metrics) else "asleep"

    async def _query_state(self, path: str) -> _StateReply:
        body = await self._http.get_if_supported(path)
        try:
            return _StateReply() if body is None else _state_decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{path} did not answer with yes or no: {error}.") from error

    async def freeze(self) -> bool:
        """Needs vLLM's development routes (VLLM_SERVER_DEV_MODE=1)."""
        return await self._http.post_if_supported("/pause?mode=keep")

    async def thaw(self) -> None:
        await self._http.request("POST", "/resume")

    async def sleep(self) -> bool:
        """Needs vLLM's development routes (VLLM_SERVER_DEV_MODE=1) and --enable-sleep-mode. The weights are kept in
        main memory."""
        return await self._http.post_if_supported("/sleep?level=1", timeout=SLEEP_TIMEOUT_SECONDS)

    async def wake(self) -> None:
        await self._http.request("POST", "/wake_up", timeout=SLEEP_TIMEOUT_SECONDS)


def _build_sampling_parameters(call: Request) -> dict[str, Any]:
    """Sampling as vLLM names it; special tokens are wanted, since they are what was sampled."""
    sampling = call.sampling
    named: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": sampling.stop or None,
        "logit_bias": sampling.logit_bias,
        "logprobs": call.logprobs,
        "skip_special_tokens": False,
    }
    return {name: value for name, value in named.items() if value is not None}
