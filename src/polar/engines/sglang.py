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

from polar.config import EngineSettings, Section
from polar.engines.base import Capabilities, Chunk, Standing, TokenPrompt
from polar.engines.vllm import MOVING, Take, VllmEngine
from polar.experts import written
from polar.types import FinishReason, Request, Usage


class Options(Section):
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
    capabilities = Capabilities(logprobs="raw", takes_ids=True)

    streams_chat = False

    def __init__(self, url: str, settings: EngineSettings) -> None:
        super().__init__(url, settings)
        self._experts = settings.options_as(Options).routed_experts

    async def _opened(self, call: Request, prompt: TokenPrompt) -> aiohttp.ClientResponse:
        asks = call.logprobs is not None
        fields = {"sampling_params": _parameters(call), "stream": call.stream, "return_logprob": asks}
        if self._experts is not None:
            fields["return_routed_experts"] = True
        body = b'%b,"input_ids":[%b]}' % (msgspec.json.encode(fields)[:-1], prompt.json)
        response = await self._http.open("/generate", body)
        if response.status == 200:
            return response
        refusal = await self._http.read(response)
        raise self._http.refused(response.status, refusal, response.headers.get("Retry-After"))

    async def standing(self) -> Standing | None:
        """There is no route that tells."""
        return None

    async def sleep(self) -> bool:
        """Needs --enable-memory-saver; the weights are kept only with --enable-weights-cpu-backup, and are to be loaded
        anew without. A server that is told twice, or to wake while it is awake, dies of it."""
        return await self._http.order("/release_memory_occupation", b"{}", timeout=MOVING)

    async def wake(self) -> None:
        await self._http.request("POST", "/resume_memory_occupation", b"{}", timeout=MOVING)

    def _taker(self, *, wants: bool) -> Take:  # noqa: ARG002 (alternatives are not asked for)
        return _Growing(self._experts).take


class _Growing:
    """Each event of a stream repeats everything from the first token on; what is new is handed on."""

    def __init__(self, experts: int | None) -> None:
        self._experts = experts
        self._ids = 0
        self._logprobs = 0

    def take(self, chunk: Chunk, data: bytes) -> None:
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
            if meta.routed_experts and self._experts is not None:
                tokens = meta.prompt_tokens + meta.completion_tokens - 1
                chunk.routed_experts = _routed(meta.routed_experts, tokens, self._experts)


def _routed(data: str, tokens: int, each: int) -> bytes | None:
    """As vLLM gives them: a file of tokens x layers x experts, in as few bytes as their numbers take. None where they
    are not of so many tokens."""
    flat = np.frombuffer(base64.b64decode(data), "<i4")
    if tokens < 1 or len(flat) == 0 or len(flat) % (tokens * each):
        return None
    if flat.min() >= 0:
        flat = flat.astype(np.min_scalar_type(flat.max()))
    return written(flat.reshape(tokens, -1, each))


def _parameters(call: Request) -> dict[str, Any]:
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
