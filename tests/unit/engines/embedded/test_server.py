"""The server's routes, as vLLM's clients see them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.config import EngineSettings
from polar.engines.embedded.engine import EmbeddedEngine
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.probe import probe_engine
from polar.errors import ConfigError
from tests.conditions import wait_until
from tests.unit.engines.embedded import tiny

GENERATE = "/inference/v1/generate"


class Http:
    def __init__(self, session: aiohttp.ClientSession, server: EmbeddedServer) -> None:
        self.session = session
        self.server = server

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.server.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.server.url + path) as answer:
            return await answer.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        async with self.session.post(self.server.url + path, json=body | {"stream": True}) as answer:
            lines = (await answer.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture
async def http(folder: Path) -> AsyncIterator[Http]:
    async with EmbeddedServer(folder, tiny.OPTIONS) as server, aiohttp.ClientSession() as session:
        yield Http(session, server)


async def test_a_stream_says_the_same_as_a_whole_reply(http: Http) -> None:
    parameters = {"max_tokens": 6, "seed": 3, "logprobs": 2}
    body = {"token_ids": [5, 6, 7], "sampling_params": parameters}
    status, whole = await http.post(GENERATE, body)
    assert status == 200
    choice = whole["choices"][0]
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"]) == 6
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 6
    events = await http.events(GENERATE, body | {"stream_options": {"include_usage": True}})
    *steps, usage = events
    assert usage["usage"] == whole["usage"]
    choices = [step["choices"][0] for step in steps]  # a step has all tokens that came since the last one was written
    assert [id for it in choices for id in it["token_ids"]] == choice["token_ids"]
    streamed = [entry for it in choices for entry in it["logprobs"]["content"]]
    assert [entry["logprob"] for entry in streamed] == pytest.approx(
        [entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-5
    )
    assert choices[-1]["weight_versions"] == choice["weight_versions"]


async def test_every_chunk_says_which_weights_sampled_what_came_so_far(http: Http) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "return_token_ids": True}
    prompt = {"prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True}
    bodies: dict[str, dict[str, Any]] = {
        GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6}},
        "/v1/chat/completions": chat,
        "/v1/completions": prompt,
    }
    for path, body in bodies.items():
        choices = [event["choices"][0] for event in await http.events(path, body)]
        steps = [choice for choice in choices if choice.get("token_ids")]
        assert steps, path
        came = 0
        for step in steps:
            came += len(step["token_ids"])
            assert step["weight_versions"] == [{"version": "0", "start": 0, "end": came}], path
        _, whole = await http.post(path, body)
        assert whole["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}], path


async def test_what_cannot_be_honoured_is_refused(http: Http) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 2}, "n."),
        ({"guided_json": {}}, "guided_json"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "maximum context length"),
        ({"logprobs": 1000}, "alternatives"),
    ]
    for parameters, named in refused:
        status, reply = await http.post(GENERATE, {"token_ids": [5], "sampling_params": parameters})
        assert status == 400, parameters
        assert named in reply["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    elsewhere: list[tuple[str, dict[str, Any]]] = [
        (GENERATE, {"token_ids": [5], "sampling_params": {"use_beam_search": True}}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"truncate_prompt_tokens": 4}}),
        ("/v1/completions", {"prompt": [5], "response_format": {"type": "json_object"}}),
        ("/v1/completions", {"prompt": [5], "echo": True}),
        ("/v1/chat/completions", chat | {"chat_template": "{{ messages }}"}),
        ("/v1/chat/completions", chat | {"continue_final_message": True}),
        ("/v1/chat/completions", chat | {"add_special_tokens": True}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_object"}}),
    ]
    for path, body in elsewhere:
        status, reply = await http.post(path, body)
        assert status == 400, body
        assert "does not support" in reply["error"]["message"]
    prompts: list[list[int]] = [[], [10**6], [-1], list(range(600))]
    for prompt in prompts:
        assert (await http.post(GENERATE, {"token_ids": prompt}))[0] == 400, prompt


async def test_what_changes_nothing_is_taken(http: Http) -> None:
    neutral = {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "skip_special_tokens": False,
        "use_beam_search": False,
        "response_format": {"type": "text"},
    }
    status, _ = await http.post(GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 1} | neutral})
    assert status == 200


async def test_a_client_that_goes_away_frees_its_place(http: Http) -> None:
    await http.post("/pause?mode=keep")  # so that it can't end by itself
    body = {"token_ids": [5], "stream": True, "sampling_params": {"max_tokens": 400}}
    call = asyncio.create_task(http.session.post(http.server.url + GENERATE, json=body))
    await wait_until(lambda: http.server.core.running_count == 1)
    call.cancel()
    await wait_until(lambda: http.server.core.running_count == 0)


async def test_new_weights_over_http(http: Http, folder: Path, tmp_path: Path) -> None:
    path = tiny.save_perturbed_weights(folder, tmp_path / "weights", 1)
    assert await http.get("/weight_version") == {"version": 0}
    assert await http.post("/update_weights", {"path": str(path), "version": 5}) == (200, {"version": 5})
    status, reply = await http.post("/update_weights", {"path": str(tmp_path / "none"), "version": 6})
    assert (status, await http.get("/weight_version")) == (400, {"version": 5})
    assert "can't be read" in reply["error"]["message"]


async def test_a_port_that_is_taken_is_found_before_the_model_is_loaded(http: Http, tmp_path: Path) -> None:
    port = int(http.server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"Can't listen on 127.0.0.1:{port}: .*in use"):
        await EmbeddedServer(tmp_path, tiny.OPTIONS.model_copy(update={"port": port})).start()


async def test_pausing_over_http(http: Http) -> None:
    assert await http.get("/is_paused") == {"is_paused": False}
    await http.post("/pause?mode=keep")
    assert await http.get("/is_paused") == {"is_paused": True}
    call = asyncio.create_task(http.post(GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 2}}))
    await wait_until(lambda: http.server.core.running_count == 1)
    assert not call.done()
    await http.post("/resume")
    assert (await call)[0] == 200


async def test_passes_the_conformance_test(http: Http) -> None:
    engine = EmbeddedEngine(http.server.url, EngineSettings(kind="embedded"))
    findings = await probe_engine(engine)
    await engine.close()
    assert {finding.check: finding.seen for finding in findings if not finding.ok} == {}
    assert {finding.check: finding.seen for finding in findings}["kind of log-probabilities"] == "processed"
