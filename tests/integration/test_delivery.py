"""Delivery: what happens when harnesses go away, come back, or ask twice (design: Delivery)."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from polar.engines.scripted import Play, ScriptedTurn
from polar.engines.scripted.sampler import expected_logprobs
from polar.gateway.generation import Generation
from polar.records.exchange import Exchange
from polar.records.session import Verdict
from tests.conditions import wait_until
from tests.integration.stack import Stack, running

WORDS = " ".join(f"word{number}" for number in range(60))
PATIENT = {"grace": 600}  # a generation waits for its retry, however slow the machine is
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def slow(seconds_a_token: float = 0.02) -> Play:
    return Play([ScriptedTurn(text=WORDS, token_delay=seconds_a_token)])


async def post(stack: Stack, http: aiohttp.ClientSession, body: object = BODY) -> aiohttp.ClientResponse:
    headers = {"Authorization": f"Bearer {stack.key}"}
    return await http.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers)


async def read_some(response: aiohttp.ClientResponse, events: int) -> str:
    """The text of the first so many events that have any."""
    text = ""
    async for line in response.content:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            piece = choices[0]["delta"].get("content") if choices else None
            if piece:
                text += piece
                events -= 1
                if events == 0:
                    break
    return text


async def recorded(stack: Stack, *statuses: str) -> list[Exchange]:
    """Waits until exchanges with these statuses are recorded, in this order."""

    async def are_there() -> bool:
        return [exchange.status for exchange in await stack.exchanges()] == list(statuses)

    await wait_until(are_there)
    return await stack.exchanges()


async def abandon(stack: Stack, response: aiohttp.ClientResponse) -> None:
    """Closes the connection, and waits until the gateway has noticed."""
    response.close()
    await has_orphans(stack)


async def has_orphans(stack: Stack) -> None:
    async def are_there() -> bool:
        return bool(await orphans(stack))

    await wait_until(are_there)


async def orphans(stack: Stack) -> Sequence[Generation]:
    """Those of the session."""
    session = await stack.service.sessions.find_by_key(stack.key)
    assert session is not None
    return stack.service.data_plane.gateway.generations.list_orphans(session)


async def engine_log(stack: Stack, http: aiohttp.ClientSession) -> dict[str, int]:
    async with http.get(f"{stack.engine.url}/scripted/log") as log:
        counters: dict[str, int] = await log.json()
        return counters


def faithful(exchange: Exchange) -> None:
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    assert exchange.logprobs is not None
    expected = expected_logprobs(0, exchange.prompt_ids, exchange.sampled_ids)
    np.testing.assert_array_equal(exchange.logprobs, expected)


async def test_a_harness_that_stays_away_leaves_a_partial_exchange(tmp_path: Path) -> None:
    async with running(tmp_path, slow(), gateway=PATIENT) as stack, aiohttp.ClientSession() as http:
        response = await post(stack, http)
        await read_some(response, 5)
        await abandon(stack, response)
        (orphan,) = await orphans(stack)
        had = len(orphan.record.sampled)
        await wait_until(lambda: len(orphan.record.sampled) > had + 5)
        orphan.give_up()  # as it does itself after its grace
        (exchange,) = await recorded(stack, "partial")
        assert exchange.sampled_ids is not None
        assert 5 <= exchange.delivered < len(exchange.sampled_ids)
        assert exchange.reply is not None
        said = exchange.reply.parts[0].text
        assert WORDS.startswith(said)
        assert said != WORDS

        async def has_ended() -> bool:
            return (await engine_log(stack, http))["running"] == 0

        await wait_until(has_ended)
        assert (await engine_log(stack, http))["aborted"] == 1


async def test_a_retry_attaches_and_is_served_from_the_first_byte(tmp_path: Path) -> None:
    async with running(tmp_path, slow(), gateway=PATIENT) as stack, aiohttp.ClientSession() as http:
        first = await post(stack, http)
        begun = await read_some(first, 5)
        await abandon(stack, first)
        again = await read_some(await post(stack, http), 10_000)
        assert again == WORDS
        assert again.startswith(begun)
        (exchange,) = await recorded(stack, "complete")
        faithful(exchange)
        assert exchange.delivered == len(exchange.sampled_ids)


async def test_a_retry_attaches_to_a_generation_that_ended_meanwhile(tmp_path: Path) -> None:
    async with running(tmp_path, slow(0.005), gateway=PATIENT) as stack, aiohttp.ClientSession() as http:
        first = await post(stack, http)
        await read_some(first, 2)
        await abandon(stack, first)
        await recorded(stack, "partial")
        assert await read_some(await post(stack, http), 10_000) == WORDS
        (exchange,) = await recorded(stack, "complete")
        assert exchange.delivered == len(exchange.sampled_ids)


async def test_whole_replies_are_retried_the_same_way(tmp_path: Path) -> None:
    body = BODY | {"stream": False}
    async with (
        running(tmp_path, Play([ScriptedTurn(text=WORDS)]), gateway=PATIENT) as stack,
        aiohttp.ClientSession() as http,
    ):
        await http.post(f"{stack.engine.url}/pause?mode=keep")
        lost = asyncio.create_task(post(stack, http, body))
        await wait_until(lambda: bool(stack.service.pool.replicas[0].running))
        lost.cancel()
        await has_orphans(stack)
        await http.post(f"{stack.engine.url}/resume")
        reply = await (await post(stack, http, body)).json()
        assert reply["choices"][0]["message"]["content"] == WORDS
        await recorded(stack, "complete")


async def test_two_open_connections_are_two_samples(tmp_path: Path) -> None:
    async with running(tmp_path, slow(0.005)) as stack, aiohttp.ClientSession() as http:
        responses = await asyncio.gather(post(stack, http), post(stack, http))
        texts = await asyncio.gather(*(read_some(response, 10_000) for response in responses))
        assert texts == [WORDS, WORDS]
        one, other = await recorded(stack, "complete", "complete")
        assert one.exchange_id != other.exchange_id


async def test_another_body_does_not_attach(tmp_path: Path) -> None:
    async with running(tmp_path, slow()) as stack, aiohttp.ClientSession() as http:
        first = await post(stack, http)
        await read_some(first, 5)
        await abandon(stack, first)
        other = await post(stack, http, BODY | {"temperature": 0.5})
        assert await read_some(other, 10_000) == WORDS
        await recorded(stack, "partial", "complete")


async def test_the_first_token_does_not_wait_for_the_last(tmp_path: Path) -> None:
    async with running(tmp_path, slow(0.05)) as stack, aiohttp.ClientSession() as http:
        response = await post(stack, http)
        await read_some(response, 1)
        assert (await engine_log(stack, http))["running"] == 1
        response.close()


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/chat/completions", BODY, b": "),
        ("/v1/responses", {"model": "m", "input": "hi", "stream": True}, b": "),
        (
            "/v1/messages",
            {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}], "stream": True},
            b"ping",
        ),
        ("/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "hi"}]}]}, b"data: "),
    ],
)
async def test_streams_are_kept_alive_while_the_engine_thinks(
    tmp_path: Path, path: str, body: dict[str, object], sign: bytes
) -> None:
    # Both timers are of one event loop, and the engine's starts later: the keep-alive comes first on any machine.
    play = Play([ScriptedTurn(text="done", delay=0.5)], aside="")
    async with running(tmp_path, play, gateway={"keep_alive": 0.1}) as stack, aiohttp.ClientSession() as http:
        headers = {"x-api-key": stack.key}
        async with http.post(stack.url + path, json=body, headers=headers) as response:
            assert response.status == 200
            text = await response.read()
        assert text.index(sign) < text.index(b"done")


async def test_ending_a_session_cuts_what_runs_and_closes_its_key(tmp_path: Path) -> None:
    async with running(tmp_path, slow()) as stack, aiohttp.ClientSession() as http:
        response = await post(stack, http)
        await read_some(response, 3)
        await http.post(f"{stack.engine.url}/pause?mode=keep")
        await stack.service.sessions.end(stack.session_id, Verdict(0.5))
        rest = await response.read()
        assert b'"error"' in rest
        (exchange,) = await stack.exchanges()
        assert exchange.status == "partial"
        assert (await post(stack, http)).status == 401
        session = await stack.service.store.find_session(stack.session_id)
        assert session is not None
        assert (session.status, session.reward) == ("ended", 0.5)


async def test_an_engine_that_breaks_off_leaves_what_came(tmp_path: Path) -> None:
    play = Play([ScriptedTurn(text=WORDS, fail="close", fail_after=7)], aside="")
    async with running(tmp_path, play) as stack, aiohttp.ClientSession() as http:
        response = await post(stack, http)
        text = await response.read()
        assert b'"error"' in text
        assert b"[DONE]" not in text
        (exchange,) = await recorded(stack, "partial")
        assert exchange.sampled_ids is not None
        assert len(exchange.sampled_ids) == 7

        async def all_is_delivered() -> bool:  # what was delivered is known a moment after the client has it
            return [one.delivered for one in await stack.exchanges()] == [7]

        await wait_until(all_is_delivered)
