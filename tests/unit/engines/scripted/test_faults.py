"""What a play can make go wrong: the failures and spoiled log-probabilities that a gateway must survive."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from polar.engines.scripted import Play, ScriptedTurn
from tests.unit.engines.scripted.client import CAPTURE, HELLO, Client, merged, serving, whole

TEXT = "one two three four five six"
CHAT = "/v1/chat/completions"


async def broken_stream(client: Client, **body: Any) -> tuple[list[bytes], bool]:
    """The events that came, and whether the connection broke."""
    body = {"messages": HELLO, "stream": True, **CAPTURE, **body}
    received = b""
    async with client.session.post(client.url + CHAT, json=body) as response:
        assert response.status == 200
        try:
            async for piece in response.content.iter_any():
                received += piece
        except aiohttp.ClientPayloadError:
            return received.split(b"\n\n")[:-1], True
    return received.split(b"\n\n")[:-1], False


async def test_a_status() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail=503)])) as client:
        for stream in (True, False):
            error = await client.post(CHAT, status=503, messages=HELLO, stream=stream)
            assert error["error"]["code"] == 503
        assert (await client.log())["failed"] == 2


async def test_only_the_first_times() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail=500, fail_times=2)])) as client:
        for _ in range(2):
            await client.post(CHAT, status=500, messages=HELLO)
        assert whole(await client.chat(**CAPTURE))["text"] == TEXT


async def test_an_error_in_mid_stream() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail="midstream", fail_after=4)])) as client:
        events, broke = await broken_stream(client)
        assert not broke
        *tokens, error, done = events
        assert len(tokens) == 1 + 4
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500
        assert done == b"data: [DONE]"
        await client.post(CHAT, status=500, messages=HELLO)
        assert await client.log() == {"requests": 2, "running": 0, "completed": 0, "aborted": 0, "failed": 2}


async def test_an_error_before_the_first_token_has_a_status() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail="midstream", fail_after=0)])) as client:
        await client.post(CHAT, status=500, messages=HELLO, stream=True)


async def test_a_connection_that_breaks() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail="close", fail_after=2)])) as client:
        events, broke = await broken_stream(client)
        assert broke
        assert len(events) == 1 + 2
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.chat()


async def test_garbage() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail="garbage")])) as client:
        events, broke = await broken_stream(client)
        assert not broke
        with pytest.raises(ValueError):
            json.loads(events[-1].removeprefix(b"data: "))
        async with client.session.post(client.url + CHAT, json={"messages": HELLO}) as response:
            assert response.status == 200
            body = await response.read()
        with pytest.raises(ValueError):
            json.loads(body)


async def test_a_reply_that_hangs() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, fail="hang", fail_after=1)])) as client:
        body = {"messages": HELLO, "stream": True}
        async with client.session.post(client.url + CHAT, json=body) as response:
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(response.content.readany(), 0.2)
            response.close()
        await client.running(0)
        assert (await client.log())["aborted"] == 1


@pytest.mark.parametrize(("spoil", "value"), [("nan", None), ("sentinel", -9999.0)])
async def test_one_spoiled_log_probability(spoil: Any, value: float | None) -> None:
    async with (
        serving(Play([ScriptedTurn(text=TEXT)])) as good,
        serving(Play([ScriptedTurn(text=TEXT, logprobs=spoil)])) as client,
    ):
        right = whole(await good.chat(**CAPTURE))
        for reply in (whole(await client.chat(**CAPTURE)), merged(await client.stream(**CAPTURE))):
            assert reply["ids"] == right["ids"]
            wrong = [place for place, one in enumerate(reply["logprobs"]) if one != right["logprobs"][place]]
            assert wrong == [len(right["ids"]) // 2]
            assert reply["logprobs"][wrong[0]] == value


async def test_one_log_probability_too_few() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, logprobs="short")])) as client:
        for reply in (whole(await client.chat(**CAPTURE)), merged(await client.stream(**CAPTURE))):
            assert len(reply["logprobs"]) == len(reply["ids"]) - 1


async def test_no_log_probabilities_at_all() -> None:
    async with serving(Play([ScriptedTurn(text=TEXT, logprobs="missing")])) as client:
        assert (await client.chat(**CAPTURE))["choices"][0]["logprobs"] is None
        assert merged(await client.stream(**CAPTURE))["logprobs"] == []
        generated = await client.post(
            "/inference/v1/generate", token_ids=[1, 2], sampling_params={"logprobs": 1, "max_tokens": 9}
        )
        assert generated["choices"][0]["logprobs"] is None
