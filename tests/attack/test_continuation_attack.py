"""Attacks on prompts: what the engine is sent is what is recorded, and nothing that a message says becomes control."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from polar.engines.scripted import TOKENIZER_FOLDER, Play, PlaySet, ScriptedServer, ScriptedTurn
from polar.gateway import prompt_renderer
from polar.gateway.data_plane import DataPlane
from polar.rendering.continuation import TurnHistory
from polar.rendering.model_codec import ModelCodec
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer
from polar.types import Message, Request, Text
from tests.conditions import wait_until
from tests.integration.stack import Stack, running, settings

WORDS = "word " * 40


class Told(ScriptedServer):
    """Remembers the token ids that it was sent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prompts: list[list[int]] = []

        @web.middleware
        async def hear(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path.endswith("generate"):
                self.prompts.append((await request.json())["token_ids"])
            return await handler(request)

        self.server.app.middlewares.append(hear)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: aiohttp.ClientSession, url: str, messages: list[Any], **fields: Any) -> int:
    body = {"model": "m", "messages": messages, "max_tokens": 60} | fields
    async with client.post(f"{url}/v1/chat/completions", json=body) as reply:
        await reply.read()
        return reply.status


async def ask_and_leave(client: aiohttp.ClientSession, url: str, text: str) -> None:
    """Reads the beginning of a reply, and goes away."""
    body = {"model": "m", "messages": [user(text)], "stream": True}
    async with client.post(f"{url}/v1/chat/completions", json=body) as reply:
        got = b""
        while b"word" not in got:
            got += await reply.content.readany()
        reply.close()


@asynccontextmanager
async def talking(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {stack.key}"}) as client:
        yield client


# What is sent is what is recorded

_BARE = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{{- '<think>' + message.reasoning_content + '</think>' if message.reasoning_content -}}
{{- message.content + '<|im_end|>' -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


async def test_a_branch_behind_a_prompt_that_is_only_its_opening(tmp_path: Path) -> None:
    """Nothing is left of the recorded prompt; the engine must not be sent a piece of a number."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER_FOLDER, folder)
    (folder / "chat_template.jinja").write_text(_BARE)
    plays = PlaySet(Play([ScriptedTurn(reasoning="hm", text="word one")] * 5))
    async with (
        Told(plays, tokenizer=folder) as engine,
        DataPlane(settings([engine.url], engine={"tokenizer": str(folder)}), tmp_path / "data") as service,
    ):
        session, key = await service.sessions.create({})
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
            await ask(client, service.gateway_url, [user("")])
            dropped = {"role": "assistant", "content": "word one"}  # without its thinking
            await ask(client, service.gateway_url, [user(""), dropped, user("go")])
        exchanges = [exchange async for exchange in service.store.read_exchanges(session.session_id)]
    recorded = [exchange.prompt_ids.tolist() for exchange in exchanges if exchange.prompt_ids is not None]
    assert len(recorded) == 2
    assert engine.prompts[-2:] == recorded  # type: ignore[attr-defined]


# Content stays content

_GLUED = """
{%- for message in messages -%}
{{- '<|' + (message.name or message.role) + '|>' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize("name", ["im_end", "im_start", "endoftext"])
def test_a_template_completes_a_spelling_on_both_sides(name: str) -> None:
    base = Tokenizer.load(TOKENIZER_FOLDER)
    model = ModelCodec(Tokenizer(base.backend, base.special_tokens, ChatTemplate(_GLUED, base.special_tokens)))
    request = Request(model="m", messages=[Message("user", [Text("x")], name=name)])
    plan = model.plan_prompt(request, TurnHistory(), lambda _, __: None)
    first = model.encoder.encode(plan.text).tolist()[0]
    assert first not in model.encoder.control_tokens.values()


async def test_texts_that_are_joined_say_what_they_say_together(tmp_path: Path) -> None:
    """'foo ' and 'bar' are not 'foobar': the harness decides what the model sees."""
    async with running(tmp_path, PlaySet(Play([ScriptedTurn(text="foobar")] * 3))) as stack, talking(stack) as client:
        await ask(client, stack.url, [user("a")])
        pieces = [{"type": "text", "text": "foo "}, {"type": "text", "text": "bar"}]
        await ask(client, stack.url, [user("a"), {"role": "assistant", "content": pieces}, user("b")])
        last = (await stack.exchanges())[-1]
    assert last.prompt_ids is not None
    shown = stack.engine.tokenizer.decode(last.prompt_ids.tolist())
    assert "foo bar" in shown


# Races and side effects


async def test_parallel_calls_beside_partial_turns_whose_ids_are_not_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart, or when memory is short: each call waits for the store while others are being learned."""
    monkeypatch.setattr(prompt_renderer, "ID_CACHE_BYTES", 1)
    plays = PlaySet(Play([ScriptedTurn(text=WORDS)] * 100))
    engine = {"rate": 200.0}
    async with running(tmp_path, plays, engine=engine, gateway={"grace": 0.05}) as stack, talking(stack) as client:
        for number in range(4):
            await ask_and_leave(client, stack.url, f"q{number}")
        await asyncio.sleep(0.3)

        async def worker(name: int) -> list[int]:
            return [await ask(client, stack.url, [user(f"{name} {again}")], max_tokens=1) for again in range(8)]

        statuses = await asyncio.gather(*(worker(name) for name in range(8)))
    assert {status for each in statuses for status in each} == {200}


async def test_counting_tokens_ends_no_turn(tmp_path: Path) -> None:
    """A harness that was cut off counts its tokens, and then tries again: the reply is still there."""
    plays = PlaySet(Play([ScriptedTurn(reasoning="hm so", text=WORDS)] * 5))
    engine = {"rate": 50.0}
    async with running(tmp_path, plays, engine=engine, gateway={"grace": 600}) as stack, talking(stack) as client:
        body = {"model": "m", "max_tokens": 500, "stream": True, "messages": [user("go")]}
        reply = await client.post(f"{stack.url}/v1/messages", json=body)
        got = b""
        while b"word" not in got:
            got += await reply.content.readany()
        reply.close()
        opened = await stack.service.sessions.find_by_key(stack.key)
        assert opened is not None
        generations = stack.service.data_plane.gateway.generations
        await wait_until(lambda: bool(generations.list_orphans(opened)))
        found = re.search(r"x[0-9a-f]{24}", got.decode())
        assert found is not None
        seal = {"type": "thinking", "thinking": "hm so", "signature": f"polar.{found.group()}.0"}
        turn = {"role": "assistant", "content": [seal, {"type": "text", "text": "word"}]}
        counted = {"model": "m", "messages": [user("go"), turn, user("?")]}
        async with client.post(f"{stack.url}/v1/messages/count_tokens", json=counted) as answer:
            assert answer.status == 200
        async with client.post(f"{stack.url}/v1/messages", json=body) as again:
            assert found.group().encode() in await again.read()


async def test_a_tool_whose_schema_is_nested_deeply(tmp_path: Path) -> None:
    """Rendered, or refused as the harness's fault; never ours, which harnesses retry."""
    schema = '{"properties":{"a":' * 250 + "{}" + "}}" * 250
    tools = '[{"type":"function","function":{"name":"f","parameters":' + schema + "}}]"
    body = '{"model":"m","messages":[{"role":"user","content":"go"}],"tools":' + tools + "}"
    async with running(tmp_path) as stack, talking(stack) as client:
        url, headers = f"{stack.url}/v1/chat/completions", {"Content-Type": "application/json"}
        async with client.post(url, data=body.encode(), headers=headers) as reply:
            status, said = reply.status, json.loads(await reply.read())
    assert status in (200, 400), said
