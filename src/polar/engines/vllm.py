"""vLLM, through its chat API with `return_token_ids`. The scripted engine speaks the same."""

import re

import msgspec
from msgspec import Struct

from polar.engines.base import Capabilities
from polar.engines.chat import ChatEngine
from polar.engines.tools import flatten
from polar.errors import EngineError
from polar.types import Request, Sampling


class _Count(Struct):
    count: int


_count = msgspec.json.Decoder(_Count)


class VllmEngine(ChatEngine):
    extra_fields = b'"return_token_ids":true'
    capabilities = Capabilities(logprobs="raw")

    def defaults(self, sampling: Sampling) -> Sampling:
        """A model's generation_config.json would otherwise set these behind our back."""
        sampling = super().defaults(sampling)
        if sampling.top_k is None:
            sampling.top_k = -1
        if sampling.min_p is None:
            sampling.min_p = 0.0
        if sampling.repetition_penalty is None:
            sampling.repetition_penalty = 1.0
        return sampling

    async def count_tokens(self, request: Request) -> int:
        if self.model is None:
            await self.start()
        call = self.prepare(flatten(request), stream=False)
        body = await self._http.request("POST", "/tokenize", self._dialect.encode_request(call))
        try:
            return _count.decode(body).count
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}/tokenize did not answer with a count: {error}.") from error

    async def version_spans(self) -> bool:
        """Only the token-in, token-out route reports them (vLLM: --enable-scale-out)."""
        body = b'{"model":%b,"token_ids":[1,2,3],"sampling_params":{"max_tokens":1}}' % msgspec.json.encode(self.model)
        try:
            return b"weight_versions" in await self._http.request("POST", "/inference/v1/generate", body)
        except EngineError:
            return False

    async def running(self) -> int | None:
        try:
            metrics = (await self._http.request("GET", "/metrics", timeout=5)).decode()
        except EngineError:
            return None
        counts = re.findall(r"^vllm:num_requests_running(?:\{.*\})? ([0-9.]+)$", metrics, re.MULTILINE)
        return sum(int(float(count)) for count in counts) if counts else None

    async def freeze(self) -> bool:
        """Needs vLLM's development routes (VLLM_SERVER_DEV_MODE=1)."""
        try:
            await self._http.request("POST", "/pause?mode=keep")
        except EngineError:
            return False
        return True

    async def thaw(self) -> None:
        await self._http.request("POST", "/resume")
