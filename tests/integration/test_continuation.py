"""Continuation through the gateway: what harnesses send back goes on from recorded tokens, or branches and says why.

Half of all words drift here: a history that is tokenised anew has other ids than were sampled. So where a prompt begins
with the ids of the one before it, and what was sampled there, those ids were recorded.
"""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from polar.cli.verify import verify_sessions
from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from polar.gateway.data_plane import DataPlane
from polar.records.exchange import Exchange
from polar.trajectory import session as sessions
from polar.trajectory.builders import prefix_merging
from tests.integration.clients import (
    CLIENTS,
    GOOGLE_WARNS,
    PNG,
    Answer,
    Chat,
    Client,
    Output,
    Picture,
    Responses,
    Wish,
    tool,
)
from tests.integration.listening import Gateway, Listening, exact, raw_http
from tests.integration.stack import settings

pytestmark = pytest.mark.filterwarnings(GOOGLE_WARNS)

Mode = Literal["auto", "sampled", "off"]
TOOLS = [tool("shell", "command"), tool("look", "path")]
LIST = PlayedCall("shell", {"command": "ls -l 'Ünï \"code\"' 🙂", "times": 1.0})
LOOK = PlayedCall("look", {"path": "having/been/there.txt"})
PROSE = "Having looked at the other files, I am sure: nothing of it was written by them, or by anybody else."
PATCH = '*** Begin Patch\n+ say "hällo" to the others\n*** End Patch'

PLAYS = PlaySet(
    Play([ScriptedTurn(text=f"{PROSE} ({number})") for number in range(30)]),
    {
        "loop": Play(
            [
                ScriptedTurn(reasoning=PROSE, text="Listing the folder for the others.", calls=[LIST]),
                ScriptedTurn(reasoning="Then both of them.", calls=[LOOK, LIST]),
                ScriptedTurn(calls=[LOOK]),
                ScriptedTurn(text=f" {PROSE}\n\n", calls=[LIST, LOOK]),
                ScriptedTurn(reasoning="That is all of it.", text=PROSE),
            ]
        ),
        "stops": Play([ScriptedTurn(text="Having said that STOP and more"), ScriptedTurn(text=PROSE)]),
        "malformed": Play(
            [ScriptedTurn(raw=f'{PROSE}<tool_call>{{"name": "shell", "arg</tool_call>'), ScriptedTurn(text=PROSE)]
        ),
        "patch": Play(
            [ScriptedTurn(text="So:", calls=[PlayedCall("apply_patch", {"input": PATCH})]), ScriptedTurn(text=PROSE)]
        ),
        "agents": Play(
            [ScriptedTurn(calls=[PlayedCall("agents__spawn", {"task": "count"})]), ScriptedTurn(text=PROSE)]
        ),
        "long": Play([ScriptedTurn(text=f"{PROSE} " * 30)] * 3),
    },
)


@asynccontextmanager
async def running(data: Path, mode: Mode = "auto", **engine: Any) -> AsyncIterator[Gateway]:
    """A gateway with a session. Whatever a test did with it, what is stored must be in order in the end."""
    async with Listening(PLAYS, drift=0.5, **engine) as server:
        chosen = settings([server.url], engine={"continuation": mode})
        async with DataPlane(chosen, data) as service:
            session, key = await service.sessions.create({})
            assert isinstance(server, Listening)
            yield Gateway(service, server, session.session_id, key)
        assert (await verify_sessions(chosen, data, [])).describe_failure(0) is None


@asynccontextmanager
async def talking(kind: Callable[[str, str], Client], gateway: Gateway) -> AsyncIterator[Client]:
    client = kind(gateway.url, gateway.key)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.dialect)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def continues(before: Exchange, after: Exchange) -> bool:
    """Whether a prompt begins with everything up to the end of a turn, token for token."""
    assert before.prompt_ids is not None
    assert before.sampled_ids is not None
    assert after.prompt_ids is not None
    context = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
    return after.prompt_ids[: len(context)].tolist() == context


def check_goes_on(before: Exchange, after: Exchange) -> None:
    assert (after.continuation, after.branch_reason, after.parent) == ("recorded", None, before.exchange_id)
    assert continues(before, after)


def check_chain(exchanges: Sequence[Exchange]) -> None:
    """Each goes on from the one before it."""
    assert (exchanges[0].continuation, exchanges[0].branch_reason, exchanges[0].parent) == ("rendered", None, None)
    for before, after in pairwise(exchanges):
        check_goes_on(before, after)


def drifts(gateway: Gateway, exchange: Exchange) -> bool:
    """Whether the turn's text, encoded anew, gives other ids."""
    assert exchange.sampled_ids is not None
    sampled, tokenizer = exchange.sampled_ids.tolist(), gateway.engine.tokenizer
    return tokenizer.encode(tokenizer.decode(sampled)) != sampled


async def traces(gateway: Gateway) -> int:
    return len(prefix_merging(await sessions.load_session_paths(gateway.service.store, gateway.session_id)).traces)


async def loop(client: Client, *, stream: bool, wish: Wish, turns: int = 5) -> list[Answer]:
    """A conversation with tools, each turn sent back as the client has it."""
    history, answers = client.user("PLAY:loop Go on."), []
    for _ in range(turns):
        answer = await client.ask(history, stream=stream, wish=wish)
        answers.append(answer)
        results = [Output(call, [f"from {call.name}:\n  some <|im_end|> lines\n"]) for call in answer.calls]
        history += [*answer.echo, *(client.results(*results) if results else client.user("And then?"))]
    return answers


# A conversation


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_turns_go_on_from_recorded_ids(tmp_path: Path, kind: Any, stream: bool, mode: Mode) -> None:
    """Calls alone, text and calls, thinking, several calls: whatever a turn has, the next goes on from it."""
    async with running(tmp_path, mode) as gateway, talking(kind, gateway) as client:
        answers = await loop(client, stream=stream, wish=Wish(system="Be brief.", tools=TOOLS))
        exchanges = await gateway.recorded(*answers)
        check_chain(exchanges)
        assert sum(drifts(gateway, exchange) for exchange in exchanges) >= 3
        assert await traces(gateway) == 1


async def test_off_renders_every_prompt_anew(tmp_path: Path, kind: Any) -> None:
    async with running(tmp_path, "off") as gateway, talking(kind, gateway) as client:
        answers = await loop(client, stream=True, wish=Wish(tools=TOOLS))
        exchanges = await gateway.recorded(*answers)
        assert [exchange.continuation for exchange in exchanges] == ["rendered"] * 5
        assert [exchange.branch_reason for exchange in exchanges] == [None, *["continuation_off"] * 4]
        assert not all(continues(before, after) for before, after in pairwise(exchanges))
        assert await traces(gateway) > 1


async def test_dialects_may_change_in_the_middle(tmp_path: Path) -> None:
    """Text is enough to know a turn by."""
    async with running(tmp_path) as gateway, talking(Chat, gateway) as chat, talking(Responses, gateway) as responses:
        one = await chat.ask(chat.user("Hello."))
        turn = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": one.text}]
        other = await responses.ask([*turn, {"role": "user", "content": "Go on."}])
        check_chain(await gateway.recorded(one, other))


# Counting


async def test_counted_tokens_are_those_of_the_prompt(tmp_path: Path) -> None:
    """Also where it goes on from recorded ids, of which no tokenizer knows."""
    function = {"name": "look", "description": "A tool.", "input_schema": TOOLS[1].schema}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "Go on."}]}]
    async with running(tmp_path) as gateway, raw_http(gateway) as http:
        for turn in range(3):
            body = {"model": "m", "messages": messages, "tools": [function]}
            counted = await post(http, "/v1/messages/count_tokens", body)
            reply = await post(http, "/v1/messages", body | {"max_tokens": 500})
            assert counted["input_tokens"] == reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"]
            again = {"role": "user", "content": f"Once more. {turn}"}
            messages += [{"role": "assistant", "content": reply["content"]}, again]
        for turn in range(3):
            counted = await post(http, "/v1beta/models/m:countTokens", {"contents": contents})
            reply = await post(http, "/v1beta/models/m:generateContent", {"contents": contents})
            assert counted["totalTokens"] == reply["usageMetadata"]["promptTokenCount"]
            contents += [reply["candidates"][0]["content"], {"role": "user", "parts": [{"text": f"More. {turn}"}]}]
        exchanges = await gateway.exchanges()
        check_chain(exchanges[:3])
        check_chain(exchanges[3:])


async def post(http: httpx.AsyncClient, path: str, body: object) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


# What harnesses do to their copy


async def chat_turns(http: httpx.AsyncClient) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A Chat request whose last turns were sampled here: one with thinking, text and a call, and one with two calls."""
    functions = [
        {"type": "function", "function": {"name": spec.name, "description": "", "parameters": spec.schema}}
        for spec in TOOLS
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "PLAY:loop Go on."},
    ]
    for _ in range(2):
        body = {"model": "m", "messages": messages, "tools": functions}
        message = (await post(http, "/v1/chat/completions", body))["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "there it is"} for call in message["tool_calls"]
        ]
    return body | {"messages": messages}, messages


Edit = Callable[[dict[str, Any], list[dict[str, Any]]], None]


def _reordered(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = dict(reversed(json.loads(call["function"]["arguments"]).items()))
            if "times" in arguments:
                arguments["times"] = 1
            call["function"]["arguments"] = json.dumps(arguments, indent=1)


def _shapes(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if isinstance(message.get("content"), str) and message["content"]:
            message["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]


def _trimmed(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages[2]["content"] = f"\n{messages[2]['content']}  "
    messages[2]["reasoning_content"] = messages[2]["reasoning_content"].strip() + "\n"


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize("edit", [_reordered, _shapes, _trimmed])
async def test_what_says_the_same_makes_no_difference(tmp_path: Path, edit: Edit, mode: Mode) -> None:
    async with running(tmp_path, mode) as gateway, raw_http(gateway) as http:
        body, messages = await chat_turns(http)
        edit(body, messages)
        await post(http, "/v1/chat/completions", body)
        check_chain(await gateway.exchanges())


def _text(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages[2]["content"] = "Something else."


def _arguments(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"command": "rm"}'


def _no_thinking(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    del messages[2]["reasoning_content"]


def _other_thinking(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages[2]["reasoning_content"] = "Something shorter."


def _last_thinking(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    del messages[4]["reasoning_content"]


def _fewer_calls(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    del messages[4]["tool_calls"][1], messages[6]


def _system(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages[0]["content"] = "Be verbose."


def _tools(body: dict[str, Any], _: list[dict[str, Any]]) -> None:
    del body["tools"][1]


def _cleared_result(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages[3]["content"] = "[cleared]"


def _foreign(_: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages += [{"role": "assistant", "content": "Never said here."}, {"role": "user", "content": "Was it?"}]


# What was edited, the reason for it, whether the model's own turn is kept all the same in mode `sampled`, and after how
# many of the two turns that were sampled the branch begins.
EDITS: list[tuple[Edit, str, bool, int]] = [
    (_text, "text_changed", True, 0),
    (_arguments, "calls_changed", True, 0),
    (_no_thinking, "thinking_dropped_by_harness", True, 0),
    (_other_thinking, "thinking_changed", True, 0),
    (_last_thinking, "thinking_dropped_by_harness", True, 1),
    (_fewer_calls, "calls_changed", True, 1),
    (_system, "context_changed", False, 0),
    (_tools, "context_changed", False, 0),
    (_cleared_result, "context_changed", False, 1),
    (_foreign, "unknown_turn", False, 2),
]


@pytest.mark.parametrize(("edit", "reason", "kept", "turns"), EDITS, ids=[case[0].__name__[1:] for case in EDITS])
@pytest.mark.parametrize("mode", ["auto", "sampled"])
async def test_edits_are_honoured_and_have_their_reason(
    tmp_path: Path, edit: Edit, reason: str, kept: bool, turns: int, mode: Mode
) -> None:
    """What the harness wrote is what the model sees, behind as many recorded turns as stand before it; and the
    conversation goes on from there as if nothing had been."""
    async with running(tmp_path, mode) as gateway, raw_http(gateway) as http:
        body, messages = await chat_turns(http)
        edit(body, messages)
        reply = await post(http, "/v1/chat/completions", body)
        one, two, edited = await gateway.exchanges()
        exact(edited)
        if kept and mode == "sampled":
            check_goes_on(two, edited)
        else:
            assert edited.branch_reason == reason
            assert [continues(before, edited) for before in (one, two)] == [turns >= 1, turns >= 2]
            for said in _said(messages):
                assert said in gateway.prompt_text(edited)
        message = {name: value for name, value in reply["choices"][0]["message"].items() if value is not None}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "so"} for call in message.get("tool_calls", ())
        ]
        messages += [message, *(results or [{"role": "user", "content": "Go on."}])]
        await post(http, "/v1/chat/completions", body)
        check_goes_on(edited, (await gateway.exchanges())[-1])


def _said(messages: Sequence[dict[str, Any]]) -> list[str]:
    """All texts of a Chat history."""
    texts = [message.get(name) for message in messages for name in ("content", "reasoning_content")]
    return [text for text in texts if isinstance(text, str)]


# Many conversations in one session


async def test_calls_at_the_same_time_find_their_own_parents(tmp_path: Path, kind: Any) -> None:
    """Also where all of them are asked the same, and say the same."""
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:

        async def talk(number: int) -> list[Answer]:
            history, answers = client.user(f"Task {number % 3}."), []
            for turn in range(4):
                answers.append(await client.ask(history, stream=number % 2 == 0, wish=Wish(system="You help.")))
                history += [*answers[-1].echo, *client.user(f"Go on. {turn}")]
            return answers

        talks = await asyncio.gather(*(talk(number) for number in range(6)))
        exchanges = {exchange.exchange_id: exchange for exchange in await gateway.exchanges()}
        assert len(exchanges) == 24
        for answers in talks:
            found = [exchanges[_exchange(answer, exchanges)] for answer in answers]
            for before, after in pairwise(found):
                # One of those that said the same in the same place, if not this very one.
                assert (after.continuation, after.branch_reason) == ("recorded", None)
                assert after.parent is not None
                assert continues(exchanges[after.parent], after)
                parent = exchanges[after.parent]
                assert parent.reply is not None
                assert before.reply is not None
                assert parent.reply.parts[-1] == before.reply.parts[-1]


def _exchange(answer: Answer, exchanges: dict[str, Exchange]) -> str:
    (found,) = {exchange_id for exchange_id in exchanges if any(exchange_id in issued for issued in answer.issued)}
    return found


async def test_forks_have_the_same_parent(tmp_path: Path, kind: Any) -> None:
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        wish = Wish(tools=TOOLS)
        history = client.user("PLAY:loop Go on.")
        first = await client.ask(history, wish=wish)
        history += [*first.echo, *client.results(*(Output(call, ["so"]) for call in first.calls))]
        for _ in range(3):  # the very same once more is another sample
            await client.ask(history, wish=wish)
        second = await client.ask([*history[:-1], *client.results(Output(first.calls[0], ["otherwise"]))], wish=wish)
        after = [*client.results(*(Output(call, ["so"]) for call in second.calls))]
        await client.ask(
            [*history[:-1], *client.results(Output(first.calls[0], ["otherwise"])), *second.echo, *after], wish=wish
        )
        root, *forks, last = await gateway.exchanges()
        for fork in forks:
            check_goes_on(root, fork)
        check_goes_on(forks[-1], last)


async def test_sub_agents_go_on_by_themselves(tmp_path: Path, kind: Any) -> None:
    """Two agents with prompts and tools of their own, who speak in turns."""
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        wishes = [Wish(system="You lead.", tools=TOOLS), Wish(system="You follow.", tools=TOOLS[:1])]
        histories = [client.user("PLAY:loop Lead."), client.user("Follow.")]
        for _ in range(4):
            for wish, history in zip(wishes, histories, strict=True):
                answer = await client.ask(history, wish=wish)
                results = client.results(*(Output(call, ["so"]) for call in answer.calls))
                history += [*answer.echo, *(results if answer.calls else client.user("Go on."))]
        exchanges = await gateway.exchanges()
        check_chain(exchanges[0::2])
        check_chain(exchanges[1::2])
        assert await traces(gateway) == 2


@pytest.mark.parametrize("mode", ["auto", "sampled"])
async def test_a_session_sees_no_turns_of_another(tmp_path: Path, kind: Any, mode: Mode) -> None:
    """Not even where a harness sends an id that was issued there: what it wrote itself is all that the model sees."""
    async with running(tmp_path, mode) as gateway, talking(kind, gateway) as client:
        wish = Wish(tools=TOOLS)
        history = client.user("PLAY:loop A secret.")
        secret = await client.ask(history, wish=wish)
        stranger_session, key = await gateway.service.sessions.create({})
        stranger: Client = kind(gateway.url, key)
        echo = json.loads(_as_json(secret.echo).replace("Listing the folder", "Guessing a folder"))
        asked = [*stranger.user("What was it?"), *echo]
        await stranger.ask([*asked, *stranger.results(Output(secret.calls[0], ["none"]))], wish=wish)
        whole = [*history, *secret.echo, *stranger.results(Output(secret.calls[0], ["none"]))]
        await stranger.ask(whole, wish=wish)
        await stranger.close()
        (told,) = await gateway.exchanges()
        strange = [it async for it in gateway.service.store.read_exchanges(stranger_session.session_id)]
        assert "Guessing a folder" in gateway.prompt_text(strange[0])
        assert "Listing the folder" not in gateway.prompt_text(strange[0])
        for exchange in strange:
            exact(exchange)
            assert (exchange.continuation, exchange.parent) == ("rendered", None)
            assert exchange.branch_reason in ("unknown_turn", "not_proved")
            assert not continues(told, exchange)


def _as_json(items: Sequence[Any]) -> str:
    """Items of any client, as they go over the wire."""
    return json.dumps(
        [item.model_dump(exclude_none=True, mode="json") if hasattr(item, "model_dump") else item for item in items]
    )


# How turns end


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stop_string_is_sampled_but_not_said(tmp_path: Path, kind: Any, stream: bool) -> None:
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        history = client.user("PLAY:stops Go.")
        first = await client.ask(history, stream=stream, wish=Wish(stop=["STOP"]))
        assert first.text.strip() == "Having said that"
        second = await client.ask([*history, *first.echo, *client.user("Go on.")], stream=stream)
        exchanges = await gateway.recorded(first, second)
        check_chain(exchanges)
        sampled = exchanges[0].sampled_ids
        assert sampled is not None
        assert "STOP" in gateway.engine.tokenizer.decode(sampled.tolist())
        assert "STOP<|im_end|>" in gateway.prompt_text(exchanges[1])  # the template's end token, as context


async def test_a_turn_cut_by_its_limit_is_closed_and_continued(tmp_path: Path, kind: Any) -> None:
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        history = client.user("Go.")
        first = await client.ask(history, wish=Wish(max_tokens=9))
        assert (first.finish, first.completion) == ("length", 9)
        second = await client.ask([*history, *first.echo, *client.user("Go on.")])
        exchanges = await gateway.recorded(first, second)
        check_chain(exchanges)
        prompts = [exchange.prompt_ids for exchange in exchanges]
        assert prompts[0] is not None
        assert prompts[1] is not None
        end = gateway.engine.tokenizer.added_tokens["<|im_end|>"]
        assert int(prompts[1][len(prompts[0]) + 9]) == end


async def test_replies_fit_into_the_context_until_nothing_does(tmp_path: Path, kind: Any) -> None:
    async with running(tmp_path, max_model_len=1024) as gateway, talking(kind, gateway) as client:
        history = client.user("PLAY:long Go.")
        first = await client.ask(history, wish=Wish(max_tokens=600))
        history += [*first.echo, *client.user("Go on.")]
        second = await client.ask(history, wish=Wish(max_tokens=20_000))
        assert second.finish == "length"
        assert second.prompt + second.completion == 1024
        check_chain(await gateway.recorded(first, second))
        history += [*second.echo, *client.user("Go on.")]
        with pytest.raises(client.errors[400]) as refused:
            await client.ask(history)
        assert "maximum context length is 1024 tokens" in str(refused.value)
        *_, failed = await gateway.exchanges()
        assert (failed.status, failed.sampled_ids) == ("failed", None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_that_does_not_parse_is_text_and_flagged(tmp_path: Path, kind: Any, stream: bool) -> None:
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        wish = Wish(tools=TOOLS)
        history = client.user("PLAY:malformed Go.")
        first = await client.ask(history, stream=stream, wish=wish)
        assert first.calls == []
        assert first.text == f'{PROSE}<tool_call>{{"name": "shell", "arg</tool_call>'
        second = await client.ask([*history, *first.echo, *client.user("Once more.")], stream=stream, wish=wish)
        exchanges = await gateway.recorded(first, second)
        check_chain(exchanges)
        assert [exchange.malformed for exchange in exchanges] == [True, False]


# What only some requests have


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_log_probabilities_that_a_harness_asks_for(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as gateway, talking(Chat, gateway) as client:
        wish = Wish(extra={"logprobs": True, "top_logprobs": 2})
        history = client.user("Go.")
        first = await client.ask(history, stream=stream, wish=wish)
        second = await client.ask([*history, *first.echo, *client.user("Go on.")], stream=stream, wish=wish)
        exchanges = await gateway.recorded(first, second)
        check_chain(exchanges)
        if stream:  # the client's helper for streams leaves them out
            return
        for answer, exchange in zip((first, second), exchanges, strict=True):
            assert exchange.logprobs is not None
            told = [token.logprob for token in answer.native.choices[0].logprobs.content]
            assert told == pytest.approx(exchange.logprobs.tolist())


@pytest.mark.parametrize(
    ("play", "tools"),
    [
        ("patch", [{"type": "custom", "name": "apply_patch", "description": "Patches."}]),
        (
            "agents",
            [
                {
                    "type": "namespace",
                    "name": "agents",
                    "description": "Agents.",
                    "tools": [{"type": "function", "name": "spawn", "parameters": tool("spawn", "task").schema}],
                }
            ],
        ),
    ],
)
async def test_custom_tools_and_namespaces(tmp_path: Path, play: str, tools: list[dict[str, Any]]) -> None:
    async with running(tmp_path) as gateway, talking(Responses, gateway) as client:
        wish = Wish(extra={"tools": tools})
        history = client.user(f"PLAY:{play} Go.")
        first = await client.ask(history, wish=wish)
        (call,) = first.calls
        output = "custom_tool_call_output" if play == "patch" else "function_call_output"
        result = {"type": output, "call_id": call.id, "output": "done"}
        second = await client.ask([*history, *first.echo, result], wish=wish)
        assert second.text == PROSE
        check_chain(await gateway.recorded(first, second))


async def test_pictures_take_the_engines_way(tmp_path: Path, kind: Any) -> None:
    """Only the engine can render them; what comes before and without them is continued as ever."""
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        history = client.user("Go.")
        first = await client.ask(history)
        history += first.echo
        seen = await client.ask([*history, *client.user("Look:", Picture(data=PNG))])
        blind = await client.ask([*history, *client.user("Don't look.")])
        one, two, three = await gateway.recorded(first, seen, blind)
        assert (two.continuation, two.context_mark) == ("engine", None)
        check_goes_on(one, three)


async def test_a_harness_that_sends_nothing_back_branches_nowhere(tmp_path: Path, kind: Any) -> None:
    """Single calls, each a conversation of its own."""
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        answers = [await client.ask(client.user(f"Question {number}.")) for number in range(3)]
        for exchange in await gateway.recorded(*answers):
            assert (exchange.continuation, exchange.branch_reason, exchange.parent) == ("rendered", None, None)


async def test_a_history_that_is_compacted_starts_anew(tmp_path: Path, kind: Any) -> None:
    """And may later go on from where it was before."""
    async with running(tmp_path) as gateway, talking(kind, gateway) as client:
        history = client.user("Go.")
        first = await client.ask(history)
        history += [*first.echo, *client.user("Go on.")]
        second = await client.ask(history)
        compact = await client.ask([*client.user("Go. Since then: a summary.")])
        third = await client.ask([*copy.deepcopy(history), *second.echo, *client.user("And on.")])
        one, two, fresh, three = await gateway.recorded(first, second, compact, third)
        assert (fresh.continuation, fresh.parent) == ("rendered", None)
        check_chain([one, two, three])
