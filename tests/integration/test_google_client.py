"""Google's own client, where its API differs from the others: see `test_clients` for what all can do."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import types as gt

from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from tests.integration.clients import GOOGLE_WARNS, MODEL, Gemini, Output, Wish, tool
from tests.integration.listening import Gateway, exact, gateway, raw_http

pytestmark = pytest.mark.filterwarnings(GOOGLE_WARNS)

WORDS = "One two three, four; fünf — 六 🙂 eight STOP nine ten."
LIST = PlayedCall("shell", {"command": "ls"})

PLAYS = PlaySet(
    Play([ScriptedTurn(text=WORDS)]),
    {
        "thinks": Play([ScriptedTurn(reasoning="Hm.", text="Yes.")]),
        "calls": Play(
            [ScriptedTurn(reasoning="Hm.", text="Two calls.", calls=[LIST, LIST]), ScriptedTurn(text="Done.")]
        ),
        "chat": Play(
            [
                ScriptedTurn(reasoning="Who is it?", text="Hello, Ann."),
                ScriptedTurn(reasoning="Ann.", text="You are Ann."),
            ]
        ),
        "503": Play([ScriptedTurn(fail=503)]),
    },
)
SHELL = tool("shell", "command")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, PLAYS, max_model_len=4096) as started:
        yield started


@pytest.fixture
async def client(running: Gateway) -> AsyncIterator[Gemini]:
    made = Gemini(running.url, running.key)
    yield made
    await made.close()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_thoughts_are_shown_only_where_asked_for(running: Gateway, client: Gemini, stream: bool) -> None:
    wish = Wish(extra={"thinking_config": None})
    answer = await client.ask(client.user("PLAY:thinks"), stream=stream, wish=wish)
    assert (answer.reasoning, answer.text) == ("", "Yes.")
    (exchange,) = await running.recorded(answer)
    assert exchange.usage.reasoning > 0
    assert exchange.reply is not None
    assert [type(part).__name__ for part in exchange.reply.parts] == ["Reasoning", "Text"]


async def test_the_clients_own_chat(running: Gateway, client: Gemini, stream: bool) -> None:
    """It keeps a stream's chunks as contents of their own; the model sees one turn."""
    config = gt.GenerateContentConfig(
        system_instruction="Be brief.", thinking_config=gt.ThinkingConfig(include_thoughts=True)
    )
    chat = client.client.aio.chats.create(model=MODEL, config=config)
    for words in ("PLAY:chat I am Ann.", "Who am I?"):
        if stream:
            said = "".join([chunk.text or "" async for chunk in await chat.send_message_stream(words)])
        else:
            said = (await chat.send_message(words)).text or ""
    assert said == "You are Ann."
    one, other = await running.exchanges()
    exact(one)
    exact(other)
    assert other.parent == one.exchange_id
    assert running.prompt_text(other) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nPLAY:chat I am Ann.<|im_end|>\n"
        "<|im_start|>assistant\n<think>Who is it?</think>Hello, Ann.<|im_end|>\n"
        "<|im_start|>user\nWho am I?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_calls_that_come_back_without_ids(running: Gateway, client: Gemini, stream: bool) -> None:
    """gemini-cli and others drop ids and thoughts: results go by name and order."""
    wish = Wish(tools=[SHELL])
    history = client.user("PLAY:calls")
    first = await client.ask(history, stream=stream, wish=wish)
    results = client.results(*(Output(call, [f"result {n}"]) for n, call in enumerate(first.calls)))
    for content in [*first.echo, *results]:
        content.parts = [part for part in content.parts if not part.thought]
        for part in content.parts:
            if part.function_call:
                part.function_call.id = None
            if part.function_response:
                part.function_response.id = None
    echo = [content for content in first.echo if content.parts]
    second = await client.ask([*history, *echo, *results], stream=stream, wish=wish)
    assert second.text == "Done."
    await running.recorded(first, second)
    said, *told = running.engine.heard[-1]["messages"][-3:]
    assert said["content"] == "Two calls."
    assert [call["id"] for call in said["tool_calls"]] == [call.id for call in first.calls]
    assert [(result["tool_call_id"], result["content"]) for result in told] == [
        (call.id, f"result {n}") for n, call in enumerate(first.calls)
    ]


async def test_counting_samples_nothing(running: Gateway, client: Gemini) -> None:
    contents = [*client.user("How many?")]
    count = await client.client.aio.models.count_tokens(model=MODEL, contents=contents)
    assert await running.exchanges() == []
    answer = await client.ask(contents)
    await running.recorded(answer)
    assert count.total_tokens == answer.prompt


async def test_counting_a_whole_request(running: Gateway, client: Gemini) -> None:
    """As other clients than Google's Python one send it: wrapped, with tools and system instruction."""
    request: dict[str, Any] = {
        "contents": [{"role": "user", "parts": [{"text": "How many?"}]}],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "shell", "parameters": {"type": "OBJECT", "properties": {}}}]}],
    }
    async with raw_http(running) as http:
        counted = await http.post(f"/v1beta/models/{MODEL}:countTokens", json={"generateContentRequest": request})
        assert await running.exchanges() == []
        await http.post(f"/v1beta/models/{MODEL}:generateContent", json=request)
    (exchange,) = await running.exchanges()
    assert counted.json()["totalTokens"] == exact(exchange)[0]
    assert "Be brief." in running.prompt_text(exchange)


async def test_a_stream_as_one_array(running: Gateway) -> None:
    """What streamGenerateContent sends where nobody says alt=sse; and a key in the query."""
    body = {"contents": [{"parts": [{"text": "Go."}]}]}
    async with raw_http(running) as http:
        del http.headers["x-api-key"]
        reply = await http.post(f"/v1beta/models/{MODEL}:streamGenerateContent?key={running.key}", json=body)
    assert reply.headers["content-type"].startswith("application/json")
    chunks = json.loads(reply.text)
    assert len(chunks) > 5
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(part["text"] for part in parts) == WORDS
    (exchange,) = await running.exchanges()
    exact(exchange)


async def test_usage_tells_thoughts_apart(running: Gateway, client: Gemini, stream: bool) -> None:
    answer = await client.ask(client.user("PLAY:thinks"), stream=stream)
    (exchange,) = await running.recorded(answer)
    usage = answer.native.usage_metadata
    assert usage.thoughts_token_count == exchange.usage.reasoning > 0
    assert (
        usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count + usage.thoughts_token_count
    )
    assert answer.native.model_version == MODEL


async def test_errors_have_googles_codes(running: Gateway, client: Gemini, stream: bool) -> None:
    async def fails(words: str, **extra: Any) -> tuple[int, str | None, str | None]:
        with pytest.raises(genai.errors.APIError) as caught:
            await client.ask(client.user(words), stream=stream, wish=Wish(extra=extra))
        return caught.value.code, caught.value.status, caught.value.message

    code, status, message = await fails("word " * 5000)
    assert (code, status) == (400, "INVALID_ARGUMENT")
    assert "input token count exceeds the maximum number of tokens" in str(message)
    assert (await fails("PLAY:503"))[:2] == (503, "UNAVAILABLE")
    assert (await fails("x", response_modalities=["IMAGE"]))[:2] == (400, "INVALID_ARGUMENT")
    assert (await fails("x", max_output_tokens=-1))[:2] == (400, "INVALID_ARGUMENT")
    assert len(await running.exchanges()) == 2  # those that an engine was asked for


async def test_a_path_that_is_not_there(running: Gateway, client: Gemini) -> None:
    with pytest.raises(genai.errors.ClientError) as caught:
        await client.client.aio.models.embed_content(model=MODEL, contents="x")
    assert (caught.value.code, caught.value.status) == (405, "UNIMPLEMENTED")
