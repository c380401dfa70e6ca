"""An engine that lives in a Ray actor of OpenRLHF's, where Polar can reach it: the part of vLLM's HTTP API that takes
token ids and gives them back."""

from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from polar.dialects import sse
from polar.engines.api_server import wire

_JSON = "application/json"
_MAX_BODY_BYTES = 256 * 1024 * 1024
_encode = msgspec.json.Encoder().encode


class _CompletionRequest(Struct):
    """A completion, with the sampling that vLLM's SamplingParams know by the same names."""

    prompt: list[int]
    model: str = ""
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = False
    logprobs: int | None = None


_decode_request = msgspec.json.Decoder(_CompletionRequest).decode
_NON_SAMPLING_FIELDS = ("prompt", "model", "stream", "logprobs")


class EngineServer:
    """Belongs to the engine's event loop, and ends with it."""

    def __init__(self, engine: Any, context_length: int, *, host: str | None = None) -> None:
        """`engine` is OpenRLHF's: it has `generate(ids, sampling_params)`. `context` is its longest sequence. `host`:
        where to listen [default: this node's address in the Ray cluster]."""
        self._engine = engine
        self._context_length = context_length
        self._host = host
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Its address."""
        if self._host is None:
            import ray

            self._host = ray.util.get_node_ip_address()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)])
        # A client that goes away cancels its handler: that is what aborts a generation.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        card = wire.ModelCard("policy", 0, "", self._context_length)
        return web.Response(body=_encode(wire.ModelList([card])), content_type=_JSON)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        from vllm import SamplingParams

        try:
            asked = _decode_request(await request.read())
            named = {name: getattr(asked, name) for name in asked.__struct_fields__ if name not in _NON_SAMPLING_FIELDS}
            params = SamplingParams(**named, logprobs=max(asked.logprobs or 0, 1))
            output = (await self._engine.generate(asked.prompt, params)).outputs[0]
        except ValueError as error:  # what vLLM refuses
            refusal = {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
            return web.Response(status=400, body=_encode(refusal), content_type=_JSON)
        reply = wire.CompletionReply("cmpl", 0, asked.model, [_build_choice(asked, output)])
        sampled = len(output.token_ids)
        reply.usage = wire.UsageInfo(len(asked.prompt), len(asked.prompt) + sampled, sampled)
        if not asked.stream:
            return web.Response(body=_encode(reply), content_type=_JSON)
        said = sse.encode_event(_encode(reply)) + sse.encode_event(b"[DONE]")
        return web.Response(body=said, content_type="text/event-stream")


def _build_choice(asked: _CompletionRequest, output: Any) -> wire.CompletionChoice:
    ids = list(output.token_ids)
    found = [one[id].logprob for one, id in zip(output.logprobs or [], ids, strict=False)]
    return wire.CompletionChoice(
        0,
        output.text,
        wire.CompletionLogprobs(token_logprobs=found, tokens=["" for _ in ids]),
        output.finish_reason,
        output.stop_reason,
        token_ids=ids,
        prompt_token_ids=asked.prompt,
    )
