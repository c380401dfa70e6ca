"""The official clients through the gateway against a real vLLM: what is stored is what vLLM reported."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from google import genai
from google.genai import types as google_types
from openai import AsyncOpenAI, BadRequestError

from polar.config import Settings
from polar.records.exchange import Exchange
from polar.service import Service
from tests.engines.conftest import CHAT, COMPLETIONS, GENERATE, Recorded, Recorder, met

pytestmark = pytest.mark.engines
QUESTION = "Name three colours of the rainbow."
LIMIT = 24


class Setup:
    def __init__(self, service: Service, session_id: str, key: str) -> None:
        self.service, self.session_id, self.key = service, session_id, key
        self.url = service.gateway_url
        self.openai = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        self.anthropic = AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0)
        self.google = genai.Client(api_key=key, http_options=google_types.HttpOptions(base_url=self.url)).aio

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.google.aclose()

    async def exchanges(self) -> list[Exchange]:
        return [exchange async for exchange in self.service.store.read_exchanges(self.session_id)]


@asynccontextmanager
async def gateway(recorder: Recorder, data: Path, **engine: Any) -> AsyncIterator[Setup]:
    settings = Settings.model_validate(
        {
            "engine": {"kind": "vllm", "urls": [recorder.url]} | engine,
            "gateway": {"port": 0},
            "server": {"port": 0},
        }
    )
    async with Service(settings, data) as service:
        await met(service, recorder)
        session, key = await service.sessions.create({})
        setup = Setup(service, session.session_id, key)
        try:
            yield setup
        finally:
            await setup.close()


def reported(call: Recorded) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids (our own where we wrote them), sampled ids and log-probabilities, read from vLLM's own words."""
    if call.reply.startswith(b"data:"):
        lines = [line[6:] for line in call.reply.split(b"\n") if line.startswith(b"data: {")]
        chunks = [json.loads(line) for line in lines]
    else:
        chunks = [json.loads(call.reply)]
    prompt: list[int] = call.request.get("token_ids") or call.request.get("prompt") or []
    sampled: list[int] = []
    logprobs: list[float] = []
    for chunk in chunks:
        prompt = chunk.get("prompt_token_ids") or prompt
        for choice in chunk["choices"]:
            sampled += choice.get("token_ids") or []
            if call.path == COMPLETIONS:
                logprobs += choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else []
            elif choice.get("logprobs"):
                logprobs += [token["logprob"] for token in choice["logprobs"]["content"]]
    return prompt, sampled, logprobs


def check(exchange: Exchange, call: Recorded) -> None:
    prompt, sampled, logprobs = reported(call)
    assert exchange.status == "complete"
    assert exchange.untrainable is None
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    assert exchange.prompt_ids.tolist() == prompt
    assert exchange.sampled_ids.tolist() == sampled
    assert len(sampled) > 0
    np.testing.assert_array_equal(exchange.logprobs, np.array(logprobs, dtype=np.float32))
    assert exchange.usage.prompt == len(prompt)
    assert exchange.usage.completion == len(sampled)
    assert exchange.logprob_kind == "raw"


async def ask_chat(setup: Setup, stream: bool) -> str:
    client = setup.openai
    asked: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": LIMIT}
    if not stream:
        return (await client.chat.completions.create(**asked)).choices[0].message.content or ""
    text = ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return text


async def ask_responses(setup: Setup, stream: bool) -> str:
    client = setup.openai
    asked: dict[str, Any] = {"model": "any", "input": QUESTION, "max_output_tokens": LIMIT}
    if not stream:
        return (await client.responses.create(**asked)).output_text
    events = await client.responses.create(**asked, stream=True)
    return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])


async def ask_anthropic(setup: Setup, stream: bool) -> str:
    client = setup.anthropic
    asked: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": LIMIT,
    }
    if not stream:
        return "".join(block.text for block in (await client.messages.create(**asked)).content)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_text()


async def ask_google(setup: Setup, stream: bool) -> str:
    client = setup.google
    config = google_types.GenerateContentConfig(max_output_tokens=LIMIT)
    asked: dict[str, Any] = {"model": "any", "contents": QUESTION, "config": config}
    if not stream:
        return (await client.models.generate_content(**asked)).text or ""
    return "".join([chunk.text or "" async for chunk in await client.models.generate_content_stream(**asked)])


ASK = {"chat": ask_chat, "responses": ask_responses, "anthropic": ask_anthropic, "google": ask_google}


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", ASK)
async def test_what_is_stored_is_what_vllm_reported(
    recorder: Recorder, tmp_path: Path, dialect: str, stream: bool, route: str
) -> None:
    if route == COMPLETIONS:
        recorder.missing.add(GENERATE)
    async with gateway(recorder, tmp_path, render="engine" if route == CHAT else "gateway") as setup:
        text = await ASK[dialect](setup, stream)
        (exchange,) = await setup.exchanges()
        (call,) = recorder.calls
        assert call.path == route
        check(exchange, call)
        assert text
        assert exchange.reply is not None
        assert text == exchange.reply.parts[0].text


async def test_both_render_the_same_prompt(recorder: Recorder, tmp_path: Path) -> None:
    """The ids that we give vLLM are those that it would have made of the messages itself."""
    prompts = []
    for render in ("engine", "gateway"):
        async with gateway(recorder, tmp_path / render, render=render) as setup:
            await ask_chat(setup, False)
            (exchange,) = await setup.exchanges()
            assert exchange.prompt_ids is not None
            prompts.append(exchange.prompt_ids.tolist())
    assert prompts[0] == prompts[1]


async def test_legacy_completions_with_ids(recorder: Recorder, tmp_path: Path) -> None:
    async with gateway(recorder, tmp_path) as setup:
        client = setup.openai
        prompt = [504, 2365, 6354, 1163]
        reply = await client.completions.create(model="any", prompt=prompt, max_tokens=8)
        (exchange,) = await setup.exchanges()
        assert exchange.prompt_ids is not None
        assert exchange.prompt_ids.tolist() == prompt
        assert exchange.untrainable is None
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(exchange.sampled_ids if exchange.sampled_ids is not None else ())


async def test_log_probabilities_are_those_of_the_recorded_context(
    recorder: Recorder, vllm_url: str, tmp_path: Path
) -> None:
    """Teacher forcing: vLLM scores prompt + sampled ids, and gives the probabilities it reported while sampling."""
    async with gateway(recorder, tmp_path) as setup, aiohttp.ClientSession() as http:
        await ask_chat(setup, True)
        (exchange,) = await setup.exchanges()
        assert exchange.prompt_ids is not None
        assert exchange.sampled_ids is not None
        assert exchange.logprobs is not None
        whole = [*exchange.prompt_ids.tolist(), *exchange.sampled_ids.tolist()]
        body = {"model": "smollm2", "prompt": whole, "max_tokens": 1, "prompt_logprobs": 0}
        async with http.post(f"{vllm_url}/v1/completions", json=body) as response:
            scores = (await response.json())["choices"][0]["prompt_logprobs"]
        forced = [
            scores[position][str(token)]["logprob"]
            for position, token in enumerate(whole)
            if position >= len(exchange.prompt_ids)
        ]
        np.testing.assert_allclose(exchange.logprobs, forced, atol=1e-3)


async def test_counting_equals_the_prompt_and_samples_nothing(recorder: Recorder, tmp_path: Path) -> None:
    async with gateway(recorder, tmp_path) as setup:
        client = setup.anthropic
        counted = await client.messages.count_tokens(model="any", messages=[{"role": "user", "content": QUESTION}])
        assert recorder.calls == []
        await ask_anthropic(setup, False)
        (exchange,) = await setup.exchanges()
        assert exchange.prompt_ids is not None
        assert counted.input_tokens == len(exchange.prompt_ids)


async def test_max_tokens_is_clamped_and_a_prompt_too_long_is_told(recorder: Recorder, tmp_path: Path) -> None:
    async with gateway(recorder, tmp_path) as setup:
        client = setup.openai
        for limit in (4090, 32000):
            stream = await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=limit,
                stream=True,
                stop=["."],
            )
            async for _ in stream:
                break
            await stream.close()
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "word " * 6000}], max_tokens=16
            )
        assert refused.value.code == "context_length_exceeded"


async def test_forced_tools_and_structured_output_are_not_trained(recorder: Recorder, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    async with gateway(recorder, tmp_path) as setup:
        client = setup.openai
        messages: Any = [{"role": "user", "content": "Which city? Say Oslo."}]
        tool: Any = {"type": "function", "function": {"name": "city", "parameters": schema}}
        forced: Any = {"type": "function", "function": {"name": "city"}}
        await client.chat.completions.create(
            model="any", messages=messages, tools=[tool], tool_choice=forced, max_tokens=48
        )
        structured: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
        await client.chat.completions.create(model="any", messages=messages, response_format=structured, max_tokens=48)
        one, two = await setup.exchanges()
        assert (one.untrainable, two.untrainable) == ("forced_tool", "structured_output")
        assert one.sampled_ids is not None
        assert two.sampled_ids is not None


async def test_log_probabilities_can_be_left_to_the_trainer(recorder: Recorder, tmp_path: Path) -> None:
    async with gateway(recorder, tmp_path, logprobs=False) as setup:
        await ask_chat(setup, True)
        (exchange,) = await setup.exchanges()
        assert exchange.logprobs is None
        assert exchange.logprob_kind == "none"
        assert exchange.untrainable is None
        assert b"logprob" not in recorder.calls[0].reply.replace(b'"logprobs":null', b"")
