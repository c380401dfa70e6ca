"""Replies that a harness never got whole: cut, retried, or kept as far as they came (design: Delivery).

A turn is the tokens whose text was written to the harness. Whatever becomes of it, the rest of the session is unharmed:
every sampled token trains once in its own context, or is excluded with a reason, and later turns go on from recorded
ids.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import pytest

from polar.cli.verify import VerifyFindings, verify_sessions
from polar.dialects.sse import EventParser
from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from polar.gateway.data_plane import DataPlane
from polar.records.exchange import Exchange
from polar.records.trajectory import SessionPaths
from polar.store.base import Store
from polar.trajectory import session as sessions
from polar.trajectory.builders import prefix_merging
from tests.conditions import wait_until
from tests.integration.listening import Gateway, Listening
from tests.integration.stack import settings
from tests.selection import leave_to_slow

Mode = Literal["auto", "sampled"]
THOUGHT = "Having thought about the others, I am sure of it."
SAID = "Nothing of it was written by them, or by anybody else who was there."
CALL = PlayedCall("shell", {"command": "ls -l 'Ünï' 🙂"})
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TASK, RESUME = "Do it.", "You were cut off: go on."
SLOW = 0.01


# What is heard of a stream, dialect by dialect


class Heard(NamedTuple):
    """What a harness got of a reply, and has of it: an open thought has no signature yet, and is worth nothing."""

    reasoning: str = ""
    text: str = ""
    sealed: str | None = None  # the signature of a thought that was closed
    call: str | None = None  # the id of a call that came whole
    ended: bool = False


class Wire(NamedTuple):
    """How a dialect asks, what it hears, and how it sends a turn back."""

    path: str
    body: Callable[[list[Any]], dict[str, Any]]
    user: Callable[[str], Any]
    hear: Callable[[Heard, dict[str, Any]], Heard]
    turn: Callable[[Heard], list[Any]]
    result: Callable[[Heard, str], Any]


def _chat_hear(heard: Heard, event: dict[str, Any]) -> Heard:
    for choice in event.get("choices", ()):
        delta = choice["delta"]
        calls = delta.get("tool_calls") or [{}]
        heard = heard._replace(
            reasoning=heard.reasoning + (delta.get("reasoning_content") or ""),
            text=heard.text + (delta.get("content") or ""),
            call=calls[0].get("id") or heard.call,
            ended=heard.ended or choice.get("finish_reason") is not None,
        )
    return heard


def _chat_turn(heard: Heard) -> list[Any]:
    message: dict[str, Any] = {"role": "assistant", "content": heard.text}
    if heard.reasoning:
        message["reasoning_content"] = heard.reasoning
    if heard.call:
        function = {"name": CALL.name, "arguments": json.dumps(CALL.arguments)}
        message["tool_calls"] = [{"id": heard.call, "type": "function", "function": function}]
    return [message]


CHAT = Wire(
    "/v1/chat/completions",
    lambda history: {
        "model": "m",
        "stream": True,
        "messages": history,
        "tools": [{"type": "function", "function": {"name": CALL.name, "parameters": SCHEMA}}],
    },
    lambda text: {"role": "user", "content": text},
    _chat_hear,
    _chat_turn,
    lambda heard, output: {"role": "tool", "tool_call_id": heard.call, "content": output},
)


def _responses_hear(heard: Heard, event: dict[str, Any]) -> Heard:
    match event.get("type"):
        case "response.reasoning_summary_text.delta":
            return heard._replace(reasoning=heard.reasoning + event["delta"])
        case "response.output_text.delta":
            return heard._replace(text=heard.text + event["delta"])
        case "response.output_item.done" if event["item"]["type"] == "reasoning":
            return heard._replace(sealed=event["item"]["encrypted_content"])
        case "response.output_item.done" if event["item"]["type"] == "function_call":
            return heard._replace(call=event["item"]["call_id"])
        case "response.completed":
            return heard._replace(ended=True)
    return heard


def _responses_turn(heard: Heard) -> list[Any]:
    items: list[Any] = []
    if heard.sealed:
        summary = [{"type": "summary_text", "text": heard.reasoning}]
        items.append({"type": "reasoning", "summary": summary, "encrypted_content": heard.sealed})
    if heard.text:
        content = [{"type": "output_text", "text": heard.text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
    if heard.call:
        arguments = json.dumps(CALL.arguments)
        items.append({"type": "function_call", "name": CALL.name, "call_id": heard.call, "arguments": arguments})
    return items


RESPONSES = Wire(
    "/v1/responses",
    lambda history: {
        "model": "m",
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "input": history,
        "tools": [{"type": "function", "name": CALL.name, "parameters": SCHEMA}],
    },
    lambda text: {"role": "user", "content": text},
    _responses_hear,
    _responses_turn,
    lambda heard, output: {"type": "function_call_output", "call_id": heard.call, "output": output},
)


def _anthropic_hear(heard: Heard, event: dict[str, Any]) -> Heard:
    match event.get("type"), (event.get("delta") or {}).get("type"):
        case "content_block_delta", "thinking_delta":
            return heard._replace(reasoning=heard.reasoning + event["delta"]["thinking"])
        case "content_block_delta", "signature_delta":
            return heard._replace(sealed=event["delta"]["signature"])
        case "content_block_delta", "text_delta":
            return heard._replace(text=heard.text + event["delta"]["text"])
        case "content_block_start", _ if event["content_block"]["type"] == "tool_use":
            return heard._replace(call=event["content_block"]["id"])
        case "message_stop", _:
            return heard._replace(ended=True)
    return heard


def _anthropic_turn(heard: Heard) -> list[Any]:
    blocks: list[Any] = []
    if heard.sealed:
        blocks.append({"type": "thinking", "thinking": heard.reasoning, "signature": heard.sealed})
    if heard.text:
        blocks.append({"type": "text", "text": heard.text})
    if heard.call:
        blocks.append({"type": "tool_use", "id": heard.call, "name": CALL.name, "input": CALL.arguments})
    return [{"role": "assistant", "content": blocks}]


def _anthropic_result(heard: Heard, output: str) -> Any:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": heard.call, "content": output}]}


ANTHROPIC = Wire(
    "/v1/messages",
    lambda history: {
        "model": "m",
        "stream": True,
        "max_tokens": 500,
        "messages": history,
        "tools": [{"name": CALL.name, "input_schema": SCHEMA}],
    },
    lambda text: {"role": "user", "content": text},
    _anthropic_hear,
    _anthropic_turn,
    _anthropic_result,
)


def _google_hear(heard: Heard, event: dict[str, Any]) -> Heard:
    for candidate in event.get("candidates", ()):
        for part in candidate.get("content", {}).get("parts", ()):
            heard = heard._replace(sealed=part.get("thoughtSignature") or heard.sealed)
            if "functionCall" in part:
                heard = heard._replace(call=part["functionCall"]["id"])
            elif part.get("thought"):
                heard = heard._replace(reasoning=heard.reasoning + part.get("text", ""))
            else:
                heard = heard._replace(text=heard.text + part.get("text", ""))
        heard = heard._replace(ended=heard.ended or candidate.get("finishReason") is not None)
    return heard


def _google_turn(heard: Heard) -> list[Any]:
    parts: list[Any] = []
    if heard.reasoning:
        parts.append({"thought": True, "text": heard.reasoning})
    if heard.text:
        parts.append({"text": heard.text})
    if heard.call:
        parts.append({"functionCall": {"id": heard.call, "name": CALL.name, "args": CALL.arguments}})
    if heard.sealed and parts:
        parts[-1]["thoughtSignature"] = heard.sealed
    return [{"role": "model", "parts": parts}]


def _google_result(heard: Heard, output: str) -> Any:
    response = {"id": heard.call, "name": CALL.name, "response": {"output": output}}
    return {"role": "user", "parts": [{"functionResponse": response}]}


GOOGLE = Wire(
    "/v1beta/models/m:streamGenerateContent?alt=sse",
    lambda history: {
        "contents": history,
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        "tools": [{"functionDeclarations": [{"name": CALL.name, "parametersJsonSchema": SCHEMA}]}],
    },
    lambda text: {"role": "user", "parts": [{"text": text}]},
    _google_hear,
    _google_turn,
    _google_result,
)

WIRES = {"chat": CHAT, "responses": RESPONSES, "anthropic": ANTHROPIC, "google": GOOGLE}


@pytest.fixture(params=leave_to_slow(WIRES, but=["chat", "anthropic"]))
def wire(request: pytest.FixtureRequest) -> Wire:
    return WIRES[request.param]


# A harness


class Amendments:
    """Those that were begun, and that the store has not confirmed yet."""

    def __init__(self, store: Store) -> None:
        self.pending = 0
        self._amend = store.amend
        store.amend = self._count  # type: ignore[method-assign]

    async def _count(self, *arguments: Any, **named: Any) -> None:
        self.pending += 1
        try:
            await self._amend(*arguments, **named)
        finally:
            self.pending -= 1


class Harness:
    """Sends a history and hears the reply, all of it or as much as it likes."""

    def __init__(self, gateway: Gateway, wire: Wire, http: aiohttp.ClientSession) -> None:
        self.gateway, self.wire, self._http = gateway, wire, http
        self.amendments = Amendments(gateway.service.store)
        self.history: list[Any] = [wire.user(TASK)]

    async def ask(self, until: Callable[[Heard], bool] = lambda _: False) -> Heard:
        """Goes away as soon as `until` says so."""
        headers = {"x-api-key": self.gateway.key}
        body, heard, parser = self.wire.body(self.history), Heard(), EventParser()
        async with self._http.post(self.gateway.url + self.wire.path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data != b"[DONE]":
                        heard = self.wire.hear(heard, json.loads(data))
                    if until(heard):
                        response.close()
                        return heard
        return heard

    async def act(self, heard: Heard) -> None:
        """Takes a whole turn as its own and runs its tool; without a call there is a new task."""
        assert heard.ended
        last = self.wire.result(heard, "a.txt") if heard.call else self.wire.user("Once more.")
        self.history += [*self.wire.turn(heard), last]

    def resume(self, heard: Heard) -> None:
        """Keeps what came of a turn, and asks for the rest."""
        self.history += [*self.wire.turn(heard), self.wire.user(RESUME)]

    async def is_abandoned(self) -> None:
        """Waits until the gateway has noticed that nobody reads any more; while the grace lasts."""
        plane = self.gateway.service
        session = await plane.sessions.find_by_key(self.gateway.key)
        assert session is not None
        await wait_until(lambda: bool(plane.gateway.generations.list_orphans(session)))

    async def exchanges(self, count: int) -> list[Exchange]:
        """Waits until so many are recorded, with the corrections that follow at once."""

        async def are_recorded() -> bool:
            return len(await self.gateway.exchanges()) >= count

        await wait_until(are_recorded)
        await wait_until(lambda: not self.amendments.pending)
        found = await self.gateway.exchanges()
        assert len(found) == count
        return found

    async def session(self) -> SessionPaths:
        return await sessions.load_session_paths(self.gateway.service.store, self.gateway.session_id)


def turns(first: ScriptedTurn) -> Play:
    return Play(
        [first, ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL]), ScriptedTurn(reasoning="Well.", text="Done.")]
    )


@asynccontextmanager
async def running(
    data: Path, wire: Wire, first: ScriptedTurn, *, mode: Mode = "auto", grace: float = 0.05
) -> AsyncIterator[Harness]:
    """What is stored must be in order in the end, whatever happened."""
    async with Listening(PlaySet(turns(first)), drift=0.4) as server, aiohttp.ClientSession() as http:
        chosen = settings([server.url], engine={"continuation": mode}, gateway={"grace": grace})
        async with DataPlane(chosen, data) as service:
            session, key = await service.sessions.create({})
            assert isinstance(server, Listening)
            yield Harness(Gateway(service, server, session.session_id, key), wire, http)
        found: VerifyFindings = await verify_sessions(chosen, data, [])
        assert found.describe_failure(0) is None
        assert found.sampled == found.trainable + found.excluded.total()


def check_goes_on(before: Exchange, after: Exchange, kept: int | None = None) -> None:
    """After the turn, or after so many of its tokens."""
    assert (after.continuation, after.branch_reason, after.parent) == ("recorded", None, before.exchange_id)
    assert before.prompt_ids is not None
    assert before.sampled_ids is not None
    assert after.prompt_ids is not None
    context = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()[:kept]]
    assert after.prompt_ids[: len(context)].tolist() == context


async def to_the_end(harness: Harness, heard: Heard) -> None:
    """The conversation goes on after a whole turn: two more."""
    for _ in range(2):
        await harness.act(heard)
        heard = await harness.ask()


# The connection is cut, and the same is asked again


async def test_a_retry_in_time_gets_the_same_reply(tmp_path: Path, wire: Wire) -> None:
    first = ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL], token_delay=SLOW)
    async with running(tmp_path, wire, first, grace=600) as harness:
        cut = await harness.ask(until=lambda heard: len(heard.text) > 10)
        await harness.is_abandoned()
        whole = await harness.ask()
        assert (whole.reasoning, whole.text) == (THOUGHT, SAID)
        assert whole.text.startswith(cut.text)
        await to_the_end(harness, whole)
        one, two, three = await harness.exchanges(3)
        assert one.status == "complete"
        assert one.delivered == len(one.sampled_ids if one.sampled_ids is not None else ())
        check_goes_on(one, two)
        check_goes_on(two, three)
        merged = prefix_merging(await harness.session())
        assert (len(merged.traces), merged.excluded) == (1, [])


async def test_a_retry_that_comes_late_is_another_sample(tmp_path: Path, wire: Wire) -> None:
    """The first one is dead: it is a retry, and trains nothing."""
    first = ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL], token_delay=SLOW)
    async with running(tmp_path, wire, first) as harness:
        await harness.ask(until=lambda heard: len(heard.text) > 10)
        await harness.exchanges(1)
        await to_the_end(harness, await harness.ask())
        dead, one, two, three = await harness.exchanges(4)
        assert (dead.status, one.status) == ("partial", "complete")
        assert dead.sampled_ids is not None
        assert 0 < dead.delivered <= len(dead.sampled_ids)
        check_goes_on(one, two)
        check_goes_on(two, three)
        session = await harness.session()
        assert [path.role for path in session.paths] == ["retry", "main", "main", "main"]
        merged = prefix_merging(session)
        assert len(merged.traces) == 1
        assert {excluded.exchange_id for excluded in merged.excluded} == {dead.exchange_id}
        assert {excluded.reason for excluded in merged.excluded} <= {"role_retry", "undelivered"}
        assert sum(excluded.stop - excluded.start for excluded in merged.excluded) == len(dead.sampled_ids)


async def test_a_reply_that_came_whole_but_not_to_its_end(tmp_path: Path, wire: Wire) -> None:
    """All text was written, but not the last bytes: the harness asks again, and the first one is dead."""
    first = ScriptedTurn(text=SAID, calls=[CALL], token_delay=SLOW, fail="hang", fail_after=1000, fail_times=1)
    async with running(tmp_path, wire, first) as harness:
        await harness.ask(until=lambda heard: heard.text.strip() == SAID)
        await harness.exchanges(1)
        await to_the_end(harness, await harness.ask())
        dead, one, two, three = await harness.exchanges(4)
        assert dead.status == "partial"
        check_goes_on(one, two)
        check_goes_on(two, three)
        assert [path.role for path in (await harness.session()).paths] == ["retry", "main", "main", "main"]


# The engine breaks off: what had come of the turn is what the harness has


@pytest.mark.parametrize(
    ("fail", "after"),
    [
        pytest.param("close", 3, marks=pytest.mark.slow),
        ("midstream", 14),
        pytest.param("midstream", 33, marks=pytest.mark.slow),
        ("close", 60),
    ],
)
async def test_an_attempt_that_broke_off_is_dead(
    tmp_path: Path, wire: Wire, fail: Literal["midstream", "close"], after: int
) -> None:
    """Early or late in its thought, in its text, in its call."""
    first = ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL], fail=fail, fail_after=after, fail_times=1)
    async with running(tmp_path, wire, first) as harness:
        assert not (await harness.ask()).ended
        await to_the_end(harness, await harness.ask())
        dead, one, two, three = await harness.exchanges(4)
        assert dead.status == "partial"
        assert dead.sampled_ids is not None
        assert 0 < dead.delivered <= len(dead.sampled_ids) <= after
        check_goes_on(one, two)
        check_goes_on(two, three)
        session = await harness.session()
        assert [path.role for path in session.paths] == ["retry", "main", "main", "main"]
        assert len(prefix_merging(session).traces) == 1


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize("after", leave_to_slow([29, 37, 41], but=[37]))
async def test_a_partial_turn_that_is_kept_is_continued(tmp_path: Path, wire: Wire, after: int, mode: Mode) -> None:
    """The thought and some of the text came, and stay in the history, with a message that asks for the rest."""
    first = ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL], fail="close", fail_after=after, fail_times=1)
    async with running(tmp_path, wire, first, mode=mode) as harness:
        cut = await harness.ask()
        assert cut.reasoning == THOUGHT
        assert cut.text
        assert SAID.startswith(cut.text)
        harness.resume(cut)
        await to_the_end(harness, await harness.ask())
        partial, one, two, three = await harness.exchanges(4)
        assert partial.status == "partial"
        check_goes_on(partial, one, partial.delivered)
        assert f"{cut.text}<|im_end|>" in harness.gateway.prompt_text(one)  # closed, as context
        check_goes_on(one, two)
        check_goes_on(two, three)
        session = await harness.session()
        assert [path.role for path in session.paths] == ["main"] * 4
        assert session.paths[0].num_trainable == partial.delivered
        merged = prefix_merging(session)
        assert {excluded.reason for excluded in merged.excluded} <= {"undelivered"}
        assert len(merged.traces) == 1


@pytest.mark.parametrize("after", leave_to_slow([36, 37, 38], but=[37]))
async def test_what_was_written_but_not_kept_still_trains_once(tmp_path: Path, wire: Wire, after: int) -> None:
    """A harness that keeps the thought alone, and drops the text that had come. A thought that names its exchange is
    continued; the text trains where it was sampled."""
    first = ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL], fail="close", fail_after=after, fail_times=1)
    async with running(tmp_path, wire, first) as harness:
        cut = await harness.ask()
        assert cut.text
        harness.resume(cut._replace(text=""))
        await to_the_end(harness, await harness.ask())
        partial, one, two, three = await harness.exchanges(4)
        if cut.sealed:
            assert partial.sampled_ids is not None
            kept = partial.sampled_ids.tolist().index(harness.gateway.engine.tokenizer.added_tokens["</think>"]) + 1
            check_goes_on(partial, one, kept)
        else:
            assert one.branch_reason == "unknown_turn"
        assert "Nothing of it" not in harness.gateway.prompt_text(one)
        check_goes_on(one, two)
        check_goes_on(two, three)
        session = await harness.session()
        assert session.paths[0].num_trainable == partial.delivered
        assert not [excluded for excluded in prefix_merging(session).excluded if excluded.reason != "undelivered"]


@pytest.mark.parametrize("wire", ["chat", "responses"], indirect=True)
async def test_a_partial_turn_may_be_the_last_thing_said(tmp_path: Path, wire: Wire) -> None:
    """Codex keeps the items that it has, and asks on without a word."""
    first = ScriptedTurn(reasoning=THOUGHT, text=SAID, calls=[CALL], fail="close", fail_after=37, fail_times=1)
    async with running(tmp_path, wire, first) as harness:
        harness.history += wire.turn(await harness.ask())
        await to_the_end(harness, await harness.ask())
        partial, one, two, three = await harness.exchanges(4)
        check_goes_on(partial, one, partial.delivered)
        check_goes_on(one, two)
        check_goes_on(two, three)
        assert len(prefix_merging(await harness.session()).traces) == 1


@pytest.mark.parametrize("grace", [0.05, 600])
async def test_a_cut_turn_with_a_whole_call_is_acted_on(tmp_path: Path, wire: Wire, grace: float) -> None:
    """The call came whole, the rest of the turn didn't: its tool is run, as codex does. What goes on from a turn is no
    retry of it, and doesn't wait for its end."""
    first = ScriptedTurn(text=SAID, calls=[CALL, CALL], token_delay=3 * SLOW)
    async with running(tmp_path, wire, first, grace=grace) as harness:
        cut = await harness.ask(until=lambda heard: heard.call is not None)
        assert cut.call is not None
        harness.history += [*wire.turn(cut), wire.result(cut, "a.txt")]
        heard = await harness.ask()
        await harness.act(heard)
        await harness.ask()
        partial, one, two = await harness.exchanges(3)
        assert partial.status == "partial"
        assert one.continuation == "recorded"
        assert one.parent == partial.exchange_id
        check_goes_on(one, two)
        session = await harness.session()
        assert [path.role for path in session.paths] == ["main"] * 3
        assert session.paths[0].num_trainable == partial.delivered
