"""Token ids in, token ids out, against servers that answer as the engines' documentation says."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from polar.config import EngineSettings
from polar.engines.base import Chunk, TokenPrompt
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError, EngineError
from polar.records.exchange import VersionSpan
from polar.records.experts import decode_experts
from polar.types import Request, SamplingParams

PROMPT = TokenPrompt(np.array([5, 6, 7], np.int32), b"5,6,7")


class Server:
    """Answers one route, remembers what it was asked."""

    def __init__(self, path: str, bodies: list[bytes], *, stream: bool, status: int = 200) -> None:
        self._path, self._bodies, self._stream, self.status = path, bodies, stream, status
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 100, "root": "/nowhere"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if not self._stream:
            return web.Response(body=self._bodies[0], status=self.status, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for body in self._bodies:
            await response.write(b"data: " + body + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post(self._path, self._answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def request(**sampling: Any) -> Request:
    return Request("whatever", [], sampling=SamplingParams(**sampling))


async def sampled(engine: Any, asked: Request, *, stream: bool) -> list[Chunk]:
    try:
        return [chunk async for chunk in engine.generate(asked, stream=stream, prompt=PROMPT)]
    finally:
        await engine.close()


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float | None]]:
    ids = [id for chunk in chunks for id in chunk.ids]
    return ids, [logprob for chunk in chunks for logprob in chunk.logprobs or []]


def sglang(ids: list[int], reason: dict[str, Any] | None) -> bytes:
    meta = {
        "output_token_logprobs": [[-0.5 * number, id, None] for number, id in enumerate(ids)],
        "finish_reason": reason,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 2,
        "weight_version": "7",
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


async def test_sglang_repeats_what_it_has_said() -> None:
    bodies = [sglang([1], None), sglang([1, 2, 3], None), sglang([1, 2, 3, 4], {"type": "stop", "matched": 4})]
    async with Server("/generate", bodies, stream=True).running() as server:
        engine = SglangEngine(server.url, EngineSettings(kind="sglang"))
        chunks = await sampled(engine, request(temperature=0.5, max_tokens=1000, stop=["END"]), stream=True)
    assert joined(chunks) == ([1, 2, 3, 4], [0.0, -0.5, -1.0, -1.5])
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].stop_sequence is None
    assert (chunks[-1].usage.prompt, chunks[-1].usage.cached) == (3, 2)  # type: ignore[union-attr]
    (asked,) = server.asked
    assert asked["input_ids"] == [5, 6, 7]
    assert asked["return_logprob"] is True
    assert asked["sampling_params"]["max_new_tokens"] == 97  # all that the context has room for
    assert asked["sampling_params"]["stop"] == ["END"]
    assert asked["sampling_params"]["skip_special_tokens"] is False


async def test_sglang_whole() -> None:
    async with Server("/generate", [sglang([1, 2], {"type": "length"})], stream=False).running() as server:
        (chunk,) = await sampled(SglangEngine(server.url, EngineSettings()), request(), stream=False)
    assert (chunk.ids, chunk.logprobs, chunk.finish_reason) == ([1, 2], [0.0, -0.5], "length")


async def test_sglang_has_its_own_names_of_seed_and_bias() -> None:
    async with Server("/generate", [sglang([1], {"type": "length"})], stream=False).running() as server:
        await sampled(
            SglangEngine(server.url, EngineSettings()), request(seed=7, logit_bias={"5": -100.0}), stream=False
        )
        await sampled(SglangEngine(server.url, EngineSettings()), request(), stream=False)
    biased, plain = (asked["sampling_params"] for asked in server.asked)
    assert (biased["sampling_seed"], biased["logit_bias"]) == (7, {"5": -100.0})
    assert not {"seed", "sampling_seed", "logit_bias"} & plain.keys()


@pytest.mark.parametrize(("each", "shape"), [(2, (4, 3, 2)), (4, None), (None, None)])
async def test_sglangs_experts(each: int | None, shape: tuple[int, ...] | None) -> None:
    """It tells them where it is asked, as bare numbers: three layers of two experts, of all tokens but the last."""
    routed = np.arange(24, dtype="<i4").reshape(4, 6)
    reply = json.loads(sglang([1, 2], {"type": "stop"}))
    reply["meta_info"]["routed_experts"] = base64.b64encode(routed.tobytes()).decode()
    async with Server("/generate", [json.dumps(reply).encode()], stream=False).running() as server:
        engine = SglangEngine(
            server.url, EngineSettings(kind="sglang", options={} if each is None else {"routed_experts": each})
        )
        (chunk,) = await sampled(engine, request(), stream=False)
    assert server.asked[0].get("return_routed_experts", False) is (each is not None)
    if shape is None:
        assert chunk.routed_experts is None
    else:
        assert chunk.routed_experts is not None
        found = decode_experts(chunk.routed_experts, 5)
        assert found is not None
        assert (found.shape, found.ravel().tolist(), found.dtype) == (shape, list(range(24)), np.uint8)


@pytest.mark.parametrize("each", [0, "8", 2.5, True])
def test_how_many_experts_is_a_number(each: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[engine.options\] routed_experts: Input should be"):
        SglangEngine("http://127.0.0.1:1", EngineSettings(options={"routed_experts": each}))


def test_options_that_sglang_has_not() -> None:
    with pytest.raises(ConfigError, match=r"\[engine.options\] routed_expert: .*; known: routed_experts"):
        SglangEngine("http://127.0.0.1:1", EngineSettings(options={"routed_expert": 8}))


async def test_sglang_that_breaks_off() -> None:
    async with Server("/generate", [sglang([1], None)], stream=True).running() as server:
        with pytest.raises(EngineError, match="without a finish reason"):
            await sampled(SglangEngine(server.url, EngineSettings()), request(), stream=True)


def vllm(ids: list[int], **more: Any) -> bytes:
    content = [{"token_id": id, "logprob": -0.25, "top_logprobs": []} for id in ids]
    return json.dumps({"choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, **more}]}).encode()


async def test_vllm_labels_its_weights() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}).encode()
    bodies = [vllm([1, 2]), vllm([3], finish_reason="stop", stop_reason=None, weight_versions=spans), usage]
    async with Server("/inference/v1/generate", bodies, stream=True).running() as server:
        chunks = await sampled(VllmEngine(server.url, EngineSettings()), request(top_p=0.9), stream=True)
    assert joined(chunks) == ([1, 2, 3], [-0.25] * 3)
    versions = [chunk.versions for chunk in chunks if chunk.versions is not None]
    assert versions == [[VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]]
    (asked,) = server.asked
    assert asked["token_ids"] == [5, 6, 7]
    assert asked["sampling_params"]["top_p"] == 0.9
    assert asked["sampling_params"]["max_tokens"] == 97


async def test_labels_that_are_no_numbers_say_nothing() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}]
    body = vllm([1], finish_reason="stop", weight_versions=spans)
    async with Server("/inference/v1/generate", [body], stream=False).running() as server:
        (chunk,) = await sampled(VllmEngine(server.url, EngineSettings()), request(), stream=False)
    assert chunk.versions is None


async def test_vllm_without_that_route() -> None:
    """Then ids go through the completions API, and are asked for there from the first time on."""
    body = {
        "choices": [
            {
                "text": "",
                "token_ids": [1, 2],
                "logprobs": {"token_logprobs": [-0.5, -0.75]},
                "finish_reason": "stop",
                "prompt_token_ids": [5, 6, 7],
            }
        ]
    }
    async with Server("/v1/completions", [json.dumps(body).encode()], stream=False).running() as server:
        engine = VllmEngine(server.url, EngineSettings())
        (chunk,) = await sampled(engine, request(), stream=False)
    assert (chunk.ids, chunk.logprobs) == ([1, 2], [-0.5, -0.75])
    (asked,) = server.asked
    assert (asked["prompt"], asked["return_token_ids"], asked["max_tokens"]) == ([5, 6, 7], True, 97)


async def test_vllm_that_does_not_know_the_model() -> None:
    """Which is a 404 of every route: the next call still asks the one that takes ids."""
    body = vllm([1], finish_reason="stop")
    async with Server("/inference/v1/generate", [body], stream=False, status=404).running() as server:
        engine = VllmEngine(server.url, EngineSettings())
        with pytest.raises(EngineError, match="404"):
            [chunk async for chunk in engine.generate(request(), stream=False, prompt=PROMPT)]
        server.status = 200
        (chunk,) = await sampled(engine, request(), stream=False)
    assert chunk.ids == [1]


async def test_a_prompt_that_is_too_long() -> None:
    long = TokenPrompt(np.zeros(100, np.int32), b",".join([b"0"] * 100))
    async with Server("/inference/v1/generate", [], stream=False).running() as server:
        engine = VllmEngine(server.url, EngineSettings())
        with pytest.raises(EngineError, match="maximum context length is 100 tokens, and the prompt has 100") as error:
            [chunk async for chunk in engine.generate(request(), stream=False, prompt=long)]
        await engine.close()
    assert error.value.kind == "context_length"
    assert not server.asked
