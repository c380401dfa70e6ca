"""Requests that are long: refused before they cost anything, or made elsewhere, in each provider's own shape."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from polar.gateway import http, prompt_renderer
from polar.rendering import worker_pool
from tests.attack.parts import ANTHROPIC, CHAT, DIALECTS, GOOGLE, PATIENCE, RESPONSES, Answer, Dialect, Wire
from tests.attack.replies import encode
from tests.integration.stack import Stack, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)

CONTEXT = 4096
TOO_LONG = {
    "openai_chat": "context_length_exceeded",
    "openai_completions": "context_length_exceeded",
    "openai_responses": "context_length_exceeded",
    "anthropic": "prompt is too long",
    "google": "exceeds the maximum number of tokens",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def it(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(tmp_path_factory.mktemp("data"), engine={"max_model_len": CONTEXT}) as stack:
        yield stack


async def post(it: Stack, dialect: Dialect, body: bytes) -> Answer:
    async with Wire.open(it.url) as wire:
        return await wire.request("POST", dialect.path, {"Authorization": f"Bearer {it.key}"}, body)


@each_dialect
async def test_what_cannot_fit_is_refused_unrendered(
    it: Stack, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_prompt(*_: object) -> None:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(prompt_renderer, "make_prompt", make_prompt)
    monkeypatch.setattr(worker_pool.WorkerPool, "make_prompt", make_prompt)
    _, body = dialect.call(text="word " * (CONTEXT * 128 // 4))
    answer = await post(it, dialect, encode(body))
    assert answer.status == 400, answer
    dialect.check_error(answer.body, 400)
    assert TOO_LONG[dialect.name] in answer.body.decode()


@each_dialect
async def test_what_fits_no_context_by_its_tokens_is_refused(it: Stack, dialect: Dialect) -> None:
    """It is short enough for a context of the longest tokens, and has others."""
    _, body = dialect.call(text="0 1 2 3 4 5 6 7 8 9 " * 16_000)
    answer = await post(it, dialect, encode(body))
    assert answer.status == 400, answer
    dialect.check_error(answer.body, 400)
    assert TOO_LONG[dialect.name] in answer.body.decode()


async def test_a_refused_giant_is_not_kept(it: Stack) -> None:
    """Everybody's calls would wait until it is written. It still counts as one that did not fit."""
    session, key = await it.service.sessions.create({})
    for size, kept in ((CONTEXT * 64, 1), (2 * 1024 * 1024, 1), (CONTEXT * 64, 2)):
        async with Wire.open(it.url) as wire:
            body = encode(CHAT.call(text="word " * (size // 5))[1])
            answer = await wire.request("POST", CHAT.path, {"Authorization": f"Bearer {key}"}, body)
        assert answer.status == 400
        assert TOO_LONG["openai_chat"] in answer.body.decode()
        assert len(await it.exchanges(session.session_id)) == kept
        opened = await it.service.sessions.find_by_key(key)
        assert opened is not None
        assert opened.meter.has_unrecorded_long_call == (size > 1024 * 1024)


@each_dialect
async def test_a_body_beyond_the_limit_is_refused_unread(it: Stack, dialect: Dialect) -> None:
    async with Wire.open(it.url) as wire:
        head = wire.head("POST", dialect.path, {"Authorization": f"Bearer {it.key}"}, 30 * 1024 * 1024)
        await wire.send(head)
        answer = await wire.answer()
    assert answer.status == 413, answer
    dialect.check_error(answer.body, 413)


async def test_the_limit_of_a_body_follows_from_the_context(it: Stack) -> None:
    gateway = it.service.data_plane.gateway
    assert (
        gateway.prompt_renderer.compute_body_limit(it.service.pool) == 16 * 1024 * 1024
    )  # a short context: room for pictures
    capabilities = it.service.pool.replicas[0].engine.capabilities
    try:
        capabilities.context_length = 1_000_000
        assert (
            gateway.prompt_renderer.compute_body_limit(it.service.pool) == 1_000_000 * 48 + 2**20
        )  # its longest token has 48 bytes
        capabilities.context_length = 2_000_000
        assert gateway.prompt_renderer.compute_body_limit(it.service.pool) == 64 * 1024 * 1024
    finally:
        capabilities.context_length = CONTEXT


# Numbers, and nesting


def with_arguments(dialect: Dialect, arguments: str) -> bytes:
    """A conversation in which a tool was called with these arguments, JSON or not."""
    text = json.dumps(arguments)
    if dialect is CHAT:
        call = f'{{"id":"c1","type":"function","function":{{"name":"f","arguments":{text}}}}}'
        result = '{"role":"tool","tool_call_id":"c1","content":"done"}'
        turns = f'{{"role":"assistant","content":null,"tool_calls":[{call}]}},{result}'
        return f'{{"model":"m","messages":[{{"role":"user","content":"hi"}},{turns}]}}'.encode()
    if dialect is RESPONSES:
        call = f'{{"type":"function_call","call_id":"c1","name":"f","arguments":{text}}}'
        result = '{"type":"function_call_output","call_id":"c1","output":"done"}'
        return f'{{"model":"m","input":[{{"role":"user","content":"hi"}},{call},{result}]}}'.encode()
    if dialect is ANTHROPIC:
        call = f'{{"type":"tool_use","id":"c1","name":"f","input":{arguments}}}'
        result = '{"type":"tool_result","tool_use_id":"c1","content":"done"}'
        turns = f'{{"role":"assistant","content":[{call}]}},{{"role":"user","content":[{result}]}}'
        return f'{{"model":"m","max_tokens":99,"messages":[{{"role":"user","content":"hi"}},{turns}]}}'.encode()
    call = f'{{"functionCall":{{"name":"f","args":{arguments}}}}}'
    result = '{"functionResponse":{"name":"f","response":{"output":"done"}}}'
    turns = f'{{"role":"model","parts":[{call}]}},{{"role":"user","parts":[{result}]}}'
    return f'{{"contents":[{{"role":"user","parts":[{{"text":"hi"}}]}},{turns}]}}'.encode()


NUMBERS = {
    "a long integer": "9" * 900_000,
    "a shorter one": "9" * 5_000,
    "a long fraction": "0." + "9" * 900_000,
    "a long exponent": "1e" + "9" * 900_000,
    "a large exponent": "1e400",
    "a deep list": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC, GOOGLE], ids=lambda dialect: dialect.name)
async def test_arguments_of_any_number_are_answered_or_refused(it: Stack, dialect: Dialect, name: str) -> None:
    answer = await post(it, dialect, with_arguments(dialect, f'{{"n":{NUMBERS[name]}}}'))
    assert answer.status in (200, 400), answer
    if answer.status == 400:
        dialect.check_error(answer.body, 400)


@pytest.mark.parametrize("name", NUMBERS)
async def test_schemas_of_any_number_are_answered_or_refused(it: Stack, name: str) -> None:
    schema = f'{{"type":"object","properties":{{"n":{{"type":"integer","maximum":{NUMBERS[name]}}}}}}}'
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    body = f'{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"tools":[{tool}]}}'
    answer = await post(it, CHAT, body.encode())
    assert answer.status in (200, 400), answer


@each_dialect
async def test_settings_of_any_number_are_answered_or_refused(it: Stack, dialect: Dialect) -> None:
    for field in ("max_tokens", "temperature", "seed", "top_p"):
        for name, number in NUMBERS.items():
            body = encode(dialect.body)[:-1]
            body += (
                f',"generationConfig":{{"{field}":{number}}}}}' if dialect is GOOGLE else f',"{field}":{number}}}'
            ).encode()
            answer = await post(it, dialect, body)
            assert answer.status in (200, 400), (field, name, answer)


# Connections


async def test_half_a_request_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a whole request to come in time on any machine.
    monkeypatch.setattr(http, "IDLE_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr("polar.service.control_plane.IDLE_TIMEOUT_SECONDS", 3.0)
    async with running(tmp_path) as stack:
        body = encode(CHAT.body)
        authorization = {"Authorization": f"Bearer {stack.key}"}

        async def nothing_at_all(url: str) -> None:
            async with Wire.open(url) as wire:
                await is_closed(wire)

        async def half_a_header(url: str) -> None:
            async with Wire.open(url) as wire:
                await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Half: ")
                await is_closed(wire)

        async def half_a_body(url: str) -> None:
            async with Wire.open(url) as wire:
                path = CHAT.path if url == stack.url else "/sessions"
                await wire.send(wire.head("POST", path, authorization, len(body)) + body[:10])
                if url == stack.url:
                    assert (await wire.answer()).status == 400
                else:
                    await is_closed(wire)

        async def half_a_header_behind_a_whole_request(url: str) -> None:
            async with Wire.open(url) as wire:
                await wire.send(wire.head("GET", "/v1/models" if url == stack.url else "/health", authorization))
                assert (await wire.answer()).status == 200
                await wire.send(b"GET / HT")
                await is_closed(wire)

        halves = (nothing_at_all, half_a_header, half_a_body, half_a_header_behind_a_whole_request)
        await asyncio.gather(*(half(url) for url in (stack.url, stack.service.control_url) for half in halves))


async def is_closed(wire: Wire) -> None:
    assert await asyncio.wait_for(wire.reader.read(), PATIENCE) == b""


async def test_a_slow_upload_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(http, "MIN_UPLOAD_BYTES_PER_SECOND", 1)
    async with running(tmp_path) as stack, Wire.open(stack.url) as wire:
        body = encode(CHAT.body)
        await wire.send(wire.head("POST", CHAT.path, {"Authorization": f"Bearer {stack.key}"}, len(body)))
        for index in range(0, len(body), 10):
            await wire.send(body[index : index + 10])
            await asyncio.sleep(0.01)
        assert (await wire.answer()).status == 200
