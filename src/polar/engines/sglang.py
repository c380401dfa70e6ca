"""SGLang: token ids in and out through `/generate`; what only the server can render goes through its chat API.

Its chat API gives token ids (`return_prompt_token_ids`, `return_meta_info`) with whole replies only. Exact data comes
before early tokens, so a streaming harness gets keep-alives and then the reply in one piece.
"""

import base64
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct, field
from pydantic import Field

from polar.config import EngineSettings, SettingsSection
from polar.engines.base import Capabilities, Chunk, EngineState, TokenPrompt
from polar.engines.vllm import SLEEP_TIMEOUT_SECONDS, ReadIntoChunk, VllmEngine
from polar.records.experts import encode_experts
from polar.types import FinishReason, Request, Usage


class SglangOptions(SettingsSection):
    routed_experts: int | None = Field(
        None, gt=0, strict=True, description="of a token in a layer of a mixture: which ones is asked for"
    )


class _Finish(Struct):
    type: str = "stop"
    matched: str | int | None = None


class _Meta(Struct):
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    finish_reason: _Finish | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    routed_experts: str | None = None  # base64 of int32, tokens x (layers x experts)


class _Output(Struct):
    output_ids: list[int] = field(default_factory=list)
    meta_info: _Meta = field(default_factory=_Meta)


_output = msgspec.json.Decoder(_Output)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangEngine(VllmEngine):
    extra_fields = b'"return_prompt_token_ids":true,"return_meta_info":true'
    capabilities = Capabilities(logprobs="raw", accepts_token_ids=True)

    chat_streams_token_ids = False

    def __init__(self, url: str, settings: EngineSettings) -> None:
        super().__init__(url, settings)
        self._experts_per_token = settings.parse_options(SglangOptions).routed_experts

    async def _open_generation(self, call: Request, prompt: TokenPrompt) -> aiohttp.ClientResponse:
        wants_logprobs = call.logprobs is not None
        fields = {
            "sampling_params": _build_sampling_parameters(call),
            "stream": call.stream,
            "return_logprob": wants_logprobs,
        }
        if self._experts_per_token is not None:
            fields["return_routed_experts"] = True
        body = b'%b,"input_ids":[%b]}' % (msgspec.json.encode(fields)[:-1], prompt.json)
        response = await self._http.post("/generate", body)
        if response.status == 200:
            return response
        refusal = await self._http.read(response)
        raise self._http.error_from_response(response.status, refusal, response.headers.get("Retry-After"))

    async def get_state(self) -> EngineState | None:
        """There is no route that tells."""
        return None

    async def sleep(self) -> bool:
        """Needs --enable-memory-saver; the weights are kept only with --enable-weights-cpu-backup, and are to be loaded
        anew without. A server that is told twice, or to wake while it is awake, dies of it."""
        return await self._http.post_if_supported("/release_memory_occupation", b"{}", timeout=SLEEP_TIMEOUT_SECONDS)

    async def wake(self) -> None:
        await self._http.request("POST", "/resume_memory_occupation", b"{}", timeout=SLEEP_TIMEOUT_SECONDS)

    def _make_chunk_reader(self, *, wants_logprobs: bool) -> ReadIntoChunk:  # noqa: ARG002 (alternatives are not asked for)
        return _CumulativeReader(self._experts_per_token).read_into_chunk


class _CumulativeReader:
    """Each event of a stream repeats everything from the first token on; what is new is handed on."""

    def __init__(self, experts_per_token: int | None) -> None:
        self._experts_per_token = experts_per_token
        self._ids = 0
        self._logprobs = 0

    def read_into_chunk(self, chunk: Chunk, data: bytes) -> None:
        output = _output.decode(data)
        meta = output.meta_info
        chunk.ids = chunk.ids + output.output_ids[self._ids :]
        self._ids = len(output.output_ids)
        if meta.output_token_logprobs is not None:
            new = [token[0] for token in meta.output_token_logprobs[self._logprobs :]]
            chunk.logprobs = (chunk.logprobs or []) + new
            self._logprobs = len(meta.output_token_logprobs)
        if meta.finish_reason is not None:
            chunk.finish_reason = _FINISH.get(meta.finish_reason.type, "stop")
            matched = meta.finish_reason.matched
            chunk.stop_sequence = matched if isinstance(matched, str) else None
            chunk.usage = Usage(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)
            if meta.routed_experts and self._experts_per_token is not None:
                tokens = meta.prompt_tokens + meta.completion_tokens - 1
                chunk.routed_experts = _encode_routed_experts(meta.routed_experts, tokens, self._experts_per_token)


def _encode_routed_experts(data: str, tokens: int, experts_per_token: int) -> bytes | None:
    """As vLLM gives them: a file of tokens x layers x experts, in as few bytes as their numbers take. None where they
    are not of so many tokens."""
    flat = np.frombuffer(base64.b64decode(data), "<i4")
    if tokens < 1 or len(flat) == 0 or len(flat) % (tokens * experts_per_token):
        return None
    if flat.min() >= 0:
        flat = flat.astype(np.min_scalar_type(flat.max()))
    return encode_experts(flat.reshape(tokens, -1, experts_per_token))


def _build_sampling_parameters(call: Request) -> dict[str, Any]:
    sampling = call.sampling
    named: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k == 0 else sampling.top_k,  # all of them
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "sampling_seed": sampling.seed,
        "logit_bias": sampling.logit_bias,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "stop": sampling.stop or None,
        "skip_special_tokens": False,
    }
    return {name: value for name, value in named.items() if value is not None}
