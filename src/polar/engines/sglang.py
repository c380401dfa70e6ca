"""SGLang: token ids in and out through `/generate`; what only the server can render goes through its chat API.

Its chat API gives token ids (`return_prompt_token_ids`, `return_meta_info`) with whole replies only. Exact data comes
before early tokens, so a streaming harness gets keep-alives and then the reply in one piece.
"""

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct, field

from polar.dialects.sse import Parser
from polar.engines.base import Capabilities, Chunk, TokenPrompt
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError
from polar.types import FinishReason, Request, Usage


class _Finish(Struct):
    type: str = "stop"
    matched: str | int | None = None


class _Meta(Struct):
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    finish_reason: _Finish | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class _Output(Struct):
    output_ids: list[int] = field(default_factory=list)
    meta_info: _Meta = field(default_factory=_Meta)


_output = msgspec.json.Decoder(_Output)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangEngine(VllmEngine):
    extra_fields = b'"return_prompt_token_ids":true,"return_meta_info":true'
    capabilities = Capabilities(logprobs="raw", takes_ids=True)

    async def generate(
        self, request: Request, *, stream: bool, prompt: TokenPrompt | None = None
    ) -> AsyncGenerator[Chunk, None]:
        chunks = super().generate(request, stream=stream and prompt is not None, prompt=prompt)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    async def _sample(self, request: Request, prompt: TokenPrompt, stream: bool) -> AsyncGenerator[Chunk, None]:
        if self.model is None:
            await self.start()
        call = self.prepare(request, stream)
        room = self._room(prompt)
        if room is not None:
            call.sampling.max_tokens = min(call.sampling.max_tokens or room, room)
        fields = {"sampling_params": _parameters(call), "stream": stream, "return_logprob": call.logprobs is not None}
        body = b'%b,"input_ids":[%b]}' % (msgspec.json.encode(fields)[:-1], prompt.json)
        response = await self._http.open("/generate", body)
        try:
            if response.status != 200:
                refusal = await self._http.read(response)
                raise self._http.refused(response.status, refusal, response.headers.get("Retry-After"))
            reading = _Growing()
            if stream:
                async for chunk in self._growing(response, reading):
                    yield chunk
            else:
                whole = await self._http.read(response)
                try:
                    yield reading.more(_output.decode(whole))
                except ValueError as error:
                    raise self._http.broken(error) from error
        finally:
            response.close()

    async def _growing(self, response: aiohttp.ClientResponse, reading: "_Growing") -> AsyncGenerator[Chunk, None]:
        parser = Parser()
        finished = False
        try:
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data != b"[DONE]":
                        chunk = reading.more(_output.decode(data))
                        finished = finished or chunk.finish_reason is not None
                        yield chunk
        except ValueError as error:
            raise self._http.broken(error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if not finished:
                raise self._http.broken(error) from error
        if not finished:
            raise EngineError(f"{self.url} ended its stream without a finish reason.")


class _Growing:
    """Each event of a stream repeats everything from the first token on; what is new is handed on."""

    def __init__(self) -> None:
        self._ids = 0
        self._logprobs = 0

    def more(self, output: _Output) -> Chunk:
        meta = output.meta_info
        chunk = Chunk(ids=output.output_ids[self._ids :])
        self._ids = len(output.output_ids)
        if meta.output_token_logprobs is not None:
            chunk.logprobs = [token[0] for token in meta.output_token_logprobs[self._logprobs :]]
            self._logprobs = len(meta.output_token_logprobs)
        if meta.finish_reason is not None:
            chunk.finish_reason = _FINISH.get(meta.finish_reason.type, "stop")
            matched = meta.finish_reason.matched
            chunk.stop_sequence = matched if isinstance(matched, str) else None
            chunk.usage = Usage(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)
        return chunk


def _parameters(call: Request) -> dict[str, Any]:
    sampling = call.sampling
    named: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "stop": sampling.stop or None,
        "skip_special_tokens": False,
    }
    return {name: value for name, value in named.items() if value is not None}
