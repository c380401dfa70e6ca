"""What every provider's client can do, done with the official client of each, whole and as a stream.

After every call the store must have the exchange: whole, with the ids and log-probabilities that the engine sampled,
and with the counts that the client was told. What only one provider has stands in the files named after it.
"""

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from tests.conditions import wait_until
from tests.integration.clients import (
    CLIENTS,
    GOOGLE_WARNS,
    MODEL,
    PICTURE_URL,
    PNG,
    Chat,
    Client,
    Content,
    Messages,
    Output,
    Picture,
    Responses,
    Wish,
    status_of,
    tool,
)
from tests.integration.listening import Gateway, gateway
from tests.selection import leave_to_slow

pytestmark = pytest.mark.filterwarnings(GOOGLE_WARNS)

TOOLS = [tool("shell", "command"), tool("look", "path")]
LIST = PlayedCall("shell", {"command": "ls -l 'Ünï \"code\"' 🙂"})
LOOK = PlayedCall("look", {"path": "a.txt"})
WORDS = "One two three, four; fünf — 六 🙂 eight STOP nine ten."

PLAYS = PlaySet(
    Play([ScriptedTurn(text=WORDS)]),
    {
        "thinks": Play([ScriptedTurn(reasoning="Well.\n\nLet me see…", text="Yes.")]),
        "calls": Play([ScriptedTurn(calls=[LIST])]),
        "calls_twice": Play([ScriptedTurn(calls=[LIST, LOOK])]),
        "says_and_calls": Play([ScriptedTurn(reasoning="Hm.", text="I look.\n\n", calls=[LOOK, LIST])]),
        "loop": Play(
            [
                ScriptedTurn(reasoning="First the folder.", text="Listing.", calls=[LIST]),
                ScriptedTurn(reasoning="Then both.", calls=[LOOK, LIST]),
                ScriptedTurn(reasoning="That is all.", text="Done."),
            ]
        ),
        "form": Play([ScriptedTurn(text='{"answer": "yes"}')]),
        **{str(status): Play([ScriptedTurn(fail=status)]) for status in (429, 500, 503)},
        "breaks": Play([ScriptedTurn(text=WORDS, fail="midstream", fail_after=5)]),
    },
)


@pytest.fixture
def image_urls() -> str:
    return "refuse"


@pytest.fixture(params=leave_to_slow(["gateway", "engine"], but=["gateway"]))
async def running(tmp_path: Path, request: pytest.FixtureRequest, image_urls: str) -> AsyncIterator[Gateway]:
    """Whoever renders, clients see the same."""
    async with gateway(tmp_path, PLAYS, render=request.param, image_urls=image_urls, max_model_len=4096) as started:
        yield started


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.dialect)
async def client(running: Gateway, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    made = request.param(running.url, running.key)
    yield made
    await made.close()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# What is said


async def test_text(running: Gateway, client: Client, stream: bool) -> None:
    answer = await client.ask(client.user("Hello."), stream=stream)
    assert answer.text == WORDS
    assert answer.reasoning == ""
    assert answer.calls == []
    (exchange,) = await running.recorded(answer)
    assert exchange.dialect == client.dialect
    assert exchange.untrainable is None
    assert "Hello." in running.prompt_text(exchange)


async def test_reasoning(running: Gateway, client: Client, stream: bool) -> None:
    answer = await client.ask(client.user("PLAY:thinks"), stream=stream)
    assert (answer.reasoning, answer.text) == ("Well.\n\nLet me see…", "Yes.")
    (exchange,) = await running.recorded(answer)
    assert 0 < exchange.usage.reasoning < answer.completion


@pytest.mark.parametrize(
    ("play", "text", "calls"),
    [("calls", "", [LIST]), ("calls_twice", "", [LIST, LOOK]), ("says_and_calls", "I look.", [LOOK, LIST])],
)
async def test_calls(
    running: Gateway, client: Client, stream: bool, play: str, text: str, calls: list[PlayedCall]
) -> None:
    answer = await client.ask(client.user(f"PLAY:{play}"), stream=stream, wish=Wish(tools=TOOLS))
    assert answer.text.strip() == text  # white space before a call is formatting
    assert [(call.name, call.arguments) for call in answer.calls] == [(call.name, call.arguments) for call in calls]
    assert answer.finish == "tool_calls"
    await running.recorded(answer)


async def test_ids_are_unique(running: Gateway, client: Client, stream: bool) -> None:
    wish = Wish(tools=TOOLS)
    one = await client.ask(client.user("PLAY:says_and_calls"), stream=stream, wish=wish)
    other = await client.ask(client.user("PLAY:says_and_calls"), stream=stream, wish=wish)
    issued = [*one.issued, *other.issued]
    assert len(set(issued)) == len(issued)


# What is sent


@pytest.mark.parametrize("running", ["gateway", "engine"], indirect=True)
async def test_a_tool_loop_of_three_turns(running: Gateway, client: Client, stream: bool) -> None:
    """What the model said in one turn, it sees in the next, letter by letter."""
    wish = Wish(system="Be brief.", tools=TOOLS)
    history = client.user("PLAY:loop Go on.")
    first = await client.ask(history, stream=stream, wish=wish)
    history += [*first.echo, *client.results(Output(first.calls[0], ["a.txt"]))]
    second = await client.ask(history, stream=stream, wish=wish)
    results = client.results(*(Output(call, [f"from {call.name}"]) for call in second.calls))
    history += [*second.echo, *results]
    third = await client.ask(history, stream=stream, wish=wish)
    assert (third.text, third.reasoning, third.finish) == ("Done.", "That is all.", "stop")

    exchanges = await running.recorded(first, second, third)
    assert [exchange.parent for exchange in exchanges] == [None, *(exchange.exchange_id for exchange in exchanges[:2])]
    for before, after in pairwise(exchanges):
        assert before.sampled_ids is not None
        said = running.engine.tokenizer.decode(before.sampled_ids.tolist())
        assert running.prompt_text(after).startswith(running.prompt_text(before) + said)
    last = running.prompt_text(exchanges[-1])
    assert last.startswith("<|im_start|>system\nBe brief.")
    assert "<tool_response>a.txt</tool_response>" in last
    assert "<tool_response>from look</tool_response><tool_response>from shell</tool_response>" in last


@pytest.mark.parametrize("image_urls", ["pass"])
async def test_pictures_are_passed_on(running: Gateway, client: Client, stream: bool) -> None:
    content: list[Content] = ["Before.", Picture(data=PNG), "Between.", Picture(url=PICTURE_URL), "After."]
    answer = await client.ask(client.user(*content), stream=stream)
    await running.recorded(answer)
    assert running.engine.heard[-1]["messages"][-1]["content"] == [
        {"type": "text", "text": "Before."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "Between."},
        {"type": "image_url", "image_url": {"url": PICTURE_URL}},
        {"type": "text", "text": "After."},
    ]


@pytest.mark.parametrize(
    "address",
    leave_to_slow(
        [PICTURE_URL, "http://169.254.169.254/latest", "file:///etc/passwd", "FTP://a/b", "gs://bucket/cat.png"],
        but=[PICTURE_URL, "file:///etc/passwd"],
    ),
)
async def test_addresses_are_refused(running: Gateway, client: Client, stream: bool, address: str) -> None:
    """The engine would fetch them."""
    message = await fails(client, 400, client.user("Look:", Picture(url=address)), stream)
    assert "[engine] image_urls" in message
    assert address in message
    assert address not in json.dumps(running.engine.heard)
    assert await running.exchanges() == []


@pytest.mark.parametrize("client", [Chat, Responses, Messages], indirect=True)  # Google's results carry data alone
async def test_addresses_in_results_are_refused(running: Gateway, client: Client, stream: bool) -> None:
    wish = Wish(tools=TOOLS)
    history = client.user("PLAY:calls_twice")
    first = await client.ask(history, stream=stream, wish=wish)
    seen = [Output(call, ["A picture:", Picture(url=PICTURE_URL)]) for call in first.calls]
    message = await fails(client, 400, [*history, *first.echo, *client.results(*seen)], stream, wish)
    assert "[engine] image_urls" in message
    await running.recorded(first)


async def test_results_with_pictures_and_errors(running: Gateway, client: Client, stream: bool) -> None:
    wish = Wish(tools=TOOLS)
    history = client.user("PLAY:calls_twice")
    first = await client.ask(history, stream=stream, wish=wish)
    failed = Output(first.calls[0], ["No such folder."], is_error=True)
    seen = Output(first.calls[1], ["A picture:", Picture(data=PNG)])
    second = await client.ask([*history, *first.echo, *client.results(failed, seen)], stream=stream, wish=wish)
    await running.recorded(first, second)
    one, other = running.engine.heard[-1]["messages"][-2:]
    assert (one["role"], one["tool_call_id"]) == ("tool", first.calls[0].id)
    assert "No such folder." in str(one["content"])
    assert other["tool_call_id"] == first.calls[1].id
    assert other["content"] == [
        {"type": "text", "text": "A picture:"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]


# What ends a turn, and what bends it


async def test_stop_sequences(running: Gateway, client: Client, stream: bool) -> None:
    answer = await client.ask(client.user("Go."), stream=stream, wish=Wish(stop=["STOP", "nowhere"]))
    assert answer.text == WORDS.partition("STOP")[0]
    (exchange,) = await running.recorded(answer)
    assert exchange.reply is not None
    assert exchange.reply.stop_sequence == "STOP"
    assert exchange.sampling.stop == ["STOP", "nowhere"]


async def test_a_turn_that_is_cut(running: Gateway, client: Client, stream: bool) -> None:
    answer = await client.ask(client.user("Go."), stream=stream, wish=Wish(max_tokens=5))
    assert answer.text
    assert WORDS.startswith(answer.text)
    assert (answer.finish, answer.completion) == ("length", 5)
    await running.recorded(answer)


async def test_structured_output_is_not_trained_on(running: Gateway, client: Client, stream: bool) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    answer = await client.ask(client.user("PLAY:form"), stream=stream, wish=Wish(schema=schema))
    assert answer.text == '{"answer": "yes"}'
    (exchange,) = await running.recorded(answer)
    assert exchange.untrainable == "structured_output"
    assert running.engine.heard[-1]["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize("force", ["look", ""], ids=["named", "any"])
async def test_forced_tools_are_not_trained_on(running: Gateway, client: Client, stream: bool, force: str) -> None:
    answer = await client.ask(client.user("Go."), stream=stream, wish=Wish(tools=TOOLS, force=force))
    assert [call.name for call in answer.calls] == ["look" if force else "shell"]
    (exchange,) = await running.recorded(answer)
    assert exchange.untrainable == "forced_tool"


# Counting, models


async def test_cached_tokens(running: Gateway, client: Client, stream: bool) -> None:
    history = client.user("word " * 100)
    one = await client.ask(history, stream=stream)
    other = await client.ask(history, stream=stream)
    assert one.cached == 0
    assert 0 < other.cached < other.prompt == one.prompt
    await running.recorded(one, other)


async def test_whatever_model_is_asked_for_exists(running: Gateway, client: Client) -> None:
    await client.ask(client.user("Hello."))
    assert await client.model("no-such/model") == "no-such/model"
    assert await client.models() == [MODEL, running.engine.model]


# What goes wrong


async def fails(client: Client, status: int, history: list[Any], stream: bool, wish: Wish | None = None) -> str:
    """The call raises the client's own exception for this status; the message."""
    with pytest.raises(client.errors[status]) as caught:
        await client.ask(history, stream=stream, wish=wish)
    assert status_of(caught.value) == status
    return str(caught.value)


async def test_a_wrong_key(running: Gateway, client: Client, stream: bool) -> None:
    stranger: Client = type(client)(running.url, "sk-polar-wrong")  # type: ignore[call-arg]
    assert "API key" in await fails(stranger, 401, client.user("Hello."), stream)
    await stranger.close()
    assert await running.exchanges() == []


async def test_an_ended_session(running: Gateway, client: Client, stream: bool) -> None:
    answer = await client.ask(client.user("Hello."), stream=stream)
    await running.service.sessions.end(running.session_id)
    assert "ended" in await fails(client, 401, client.user("Hello."), stream)
    await running.recorded(answer)


async def test_a_context_that_is_too_long(running: Gateway, client: Client, stream: bool) -> None:
    message = await fails(client, 400, client.user("word " * 5000), stream)
    assert "maximum context length is 4096 tokens" in message
    (exchange,) = await running.exchanges()
    assert (exchange.status, exchange.untrainable) == ("failed", "no_reply")


async def test_a_limit_beyond_the_context_is_clamped(running: Gateway, client: Client, stream: bool) -> None:
    answer = await client.ask(client.user("Hello."), stream=stream, wish=Wish(max_tokens=10_000))
    assert answer.text == WORDS
    await running.recorded(answer)


async def test_what_the_engine_refuses(running: Gateway, client: Client, stream: bool) -> None:
    for play, status in (("429", 429), ("500", client.broken), ("503", client.overloaded)):
        message = await fails(client, status, client.user(f"PLAY:{play}"), stream)
        assert "The play refuses this turn." in message
    exchanges = await running.exchanges()
    assert [exchange.status for exchange in exchanges] == ["failed"] * 3
    assert all("The play refuses this turn." in str(exchange.error) for exchange in exchanges)


async def test_an_engine_that_is_down(running: Gateway, client: Client, stream: bool) -> None:
    await running.engine.stop()
    assert "can't be reached" in await fails(client, client.overloaded, client.user("Hello."), stream)
    (exchange,) = await running.exchanges()
    assert exchange.status == "failed"


async def test_an_engine_that_breaks_off(running: Gateway, client: Client) -> None:
    """A client must not take half a turn for a whole one."""
    with pytest.raises(client.error):
        await client.ask(client.user("PLAY:breaks"), stream=True)

    async def is_delivered() -> bool:  # what was delivered is known a moment after the client has it
        return [exchange.delivered >= 4 for exchange in await running.exchanges()] == [True]

    await wait_until(is_delivered)
    (exchange,) = await running.exchanges()
    # The fifth may be white space, of which it isn't known yet whether it belongs to the text.
    assert exchange.status == "partial"
    assert exchange.delivered in (4, 5)


REFUSED: dict[str, dict[str, Any]] = {
    "openai_chat": {"n": 3},
    "openai_responses": {"previous_response_id": "resp_1"},
    "anthropic": {"extra_body": {"mcp_servers": [{"type": "url", "name": "one", "url": "https://mcp.example"}]}},
    "google": {"candidate_count": 3},
}


async def test_what_would_change_the_sampling_silently(running: Gateway, client: Client, stream: bool) -> None:
    wish = Wish(extra=REFUSED[client.dialect])
    assert "not supported" in await fails(client, 400, client.user("Hello."), stream, wish)
    assert await running.exchanges() == []
