"""Whole runs of real harnesses, replayed request by request: the engine says what it said then.

The gateway must understand each request to the last word, answer in a form that the provider's own client reads, and
record the request as it was sent.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from polar.engines.scripted import PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from polar.engines.scripted.play import TurnContext
from polar.gateway import view
from polar.records.exchange import Exchange
from polar.trajectory.builders import prefix_merging
from polar.trajectory.session import load_session_paths
from tests import captures
from tests.integration.clients import GOOGLE_WARNS, Answer, Chat, Client, ClientKind, Gemini, Messages, Responses
from tests.integration.listening import Gateway, exact, gateway

pytestmark = pytest.mark.filterwarnings(GOOGLE_WARNS)

TRANSPORT_HEADERS = {"host", "connection", "content-length", "accept-encoding", "transfer-encoding"}


class Prompter(PlaySet):
    """Says whatever it was last told to."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = ScriptedTurn()

    def next_turn(self, context: TurnContext) -> ScriptedTurn:
        return self.turn


class Player:
    """A server that answers everything with the same bytes, so that an official client can read them."""

    def __init__(self) -> None:
        self.url = ""
        self._body = b""
        self._type = ""

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response(body=self._body, headers={"Content-Type": self._type})

    async def read(self, client: ClientKind, body: bytes) -> Answer:
        """The reply, whole or streamed, as the client understands it."""
        stream = not body.startswith(b"{")
        self._body, self._type = body, "text/event-stream" if stream else "application/json"
        reader: Client = client(self.url, "sk-polar")
        try:
            return await reader.ask(reader.user("Hello."), stream=stream)
        finally:
            await reader.close()


@asynccontextmanager
async def playing() -> AsyncIterator[Player]:
    player = Player()
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", player.answer)
    async with TestServer(app) as server:
        player.url = f"http://{server.host}:{server.port}"
        yield player


def client_of(path: str) -> ClientKind:
    kinds: dict[str, ClientKind] = {"chat": Chat, "responses": Responses, "messages": Messages, "models": Gemini}
    return kinds[path.split("/")[2]]


def requests_of(name: str) -> list[dict[str, Any]]:
    """A request that the harness's server was made to fail stands there twice; the second time with what was sent."""
    return list({record["n"]: record for record in captures.load(name)}.values())


def headers_of(record: dict[str, Any], key: str) -> dict[str, str]:
    """As the harness sent them, with our key where its own stood."""
    headers = {name: value for name, value in record["headers"] if name.lower() not in TRANSPORT_HEADERS}
    for name in headers.keys() & {"authorization", "Authorization"}:
        headers[name] = f"Bearer {key}"
    for name in headers.keys() & {"x-api-key", "x-goog-api-key"}:
        headers[name] = key
    return headers


def to_play(answer: Answer) -> ScriptedTurn:
    calls = []
    for call in answer.calls:
        arguments = call.arguments if isinstance(call.arguments, dict) else {"input": call.arguments}
        calls.append(PlayedCall(f"{call.namespace}__{call.name}" if call.namespace else call.name, arguments))
    return ScriptedTurn(reasoning=answer.reasoning, text=answer.text, calls=calls)


def said(answer: Answer) -> tuple[str, str, list[tuple[str, Any, str | None]]]:
    """All but the ids, and white space at the edges."""
    calls = [(call.name, call.arguments, call.namespace) for call in answer.calls]
    return answer.text.strip(), answer.reasoning.strip(), calls


# What the model must see of a request: every string in it that is no label.

LABELS = {
    *("type", "role", "status", "phase", "format", "execution", "namespace"),
    *("id", "call_id", "tool_use_id", "tool_call_id"),
    *("signature", "encrypted_content", "thoughtSignature"),  # seals
    *("cache_control", "annotations", "provider_specific_fields"),  # the provider's and the harness's own notes
}
BILLING = "x-anthropic-billing-header:"  # claude-code's accounting line, which no model is shown


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name == "arguments" and isinstance(inner, str):
                yield from strings(json.loads(inner))
            elif name not in LABELS:
                yield from strings(inner)


def words_of(body: dict[str, Any]) -> Iterator[str]:
    for name in ("system", "instructions", "systemInstruction", "messages", "input", "contents"):
        yield from (text for text in strings(body.get(name)) if not text.startswith(BILLING))
    for tool in body.get("tools") or ():
        runs_elsewhere = not tool.keys() & {"name", "function", "functionDeclarations", "parameters"}
        if not runs_elsewhere and not tool.get("defer_loading"):  # deferred tools are shown once they were searched for
            yield from strings(tool)


def stands_in(prompt: str, text: str) -> bool:
    """As it is, or inside of JSON."""
    return text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt


@pytest.mark.parametrize("render", ["gateway", "engine"])
@pytest.mark.parametrize("name", captures.names())
async def test_a_run(tmp_path: Path, name: str, render: str) -> None:
    requests = requests_of(name)
    prompter = Prompter()
    async with gateway(tmp_path, prompter, render=render, max_model_len=10**6) as running, playing() as player:
        async with aiohttp.ClientSession() as http:
            for record in requests:
                kind = client_of(record["path"])
                then = None
                if "injected" not in record:
                    then = await player.read(kind, (record.get("resp_sse") or json.dumps(record["resp"])).encode())
                prompter.turn = ScriptedTurn(text="So be it.") if then is None else to_play(then)
                url = URL(f"{running.url}{record['path']}?{record['query']}", encoded=True)
                sent = json.dumps(record["body"]).encode()
                async with http.post(url, data=sent, headers=headers_of(record, running.key)) as response:
                    assert response.status == 200, await response.text()
                    now = await player.read(kind, await response.read())
                if then is not None:
                    assert said(now) == said(then)
        exchanges = await running.exchanges()
        assert len(exchanges) == len(requests)
        for record, exchange in zip(requests, exchanges, strict=True):
            exact(exchange)
            assert json.loads(view.encode_json(exchange.build_request_body())) == record["body"]
            prompt = running.prompt_text(exchange)
            assert [text for text in words_of(record["body"]) if not stands_in(prompt, text)] == []
        if render == "gateway":
            await check_continuation(running, name, exchanges)
            return
        check_parents(exchanges)
        if not any("injected" in record for record in requests):  # pieces of cut turns, without ids of ours, are one
            check_prefixes(running, exchanges)


ECHOED_WHOLE = {"agents", "codex", "codex_parallel", "mswe", "mswe_responses", "pi_google", "pi_openai"}
"""Runs of one agent in whose captures a turn reads as it was said. (In others its paths were replaced in one place.)"""
DROP_THINKING = {"agents_chat", "gemini", "gemini_parallel", "lang", "lang_stream"}


async def check_continuation(running: Gateway, name: str, exchanges: list[Exchange]) -> None:
    """Echoed turns are known by what they say, since the ids in a capture are another server's."""
    by_id = {exchange.exchange_id: exchange for exchange in exchanges}
    for exchange in exchanges:
        assert exchange.continuation in ("recorded", "rendered")
        if exchange.continuation == "recorded" and exchange.branch_reason is None:
            parent = by_id[exchange.parent or ""]
            assert parent.prompt_ids is not None
            assert parent.sampled_ids is not None
            assert exchange.prompt_ids is not None
            before = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()]
            assert exchange.prompt_ids[: len(before)].tolist() == before
    session = await load_session_paths(running.service.store, running.session_id)
    merged = prefix_merging(session)
    assert sum(path.num_trainable for path in session.paths) == merged.tokens.trainable
    reasons = {exchange.branch_reason for exchange in exchanges[1:]}
    if name in ECHOED_WHOLE:
        assert len(merged.traces) == 1
        assert reasons == {None}
    if name in DROP_THINKING:
        assert reasons == {"thinking_dropped_by_harness"}


def check_parents(exchanges: list[Exchange]) -> None:
    """An exchange's parent is the one whose whole request it extends: the longest such, the latest among equals."""
    for index, exchange in enumerate(exchanges):
        items = [bytes(item) for item in exchange.raw_request.items]
        extended = [
            (len(before.raw_request.items), before.seq, before.exchange_id)
            for before in exchanges[:index]
            if len(before.raw_request.items) < len(items)
            and items[: len(before.raw_request.items)] == [bytes(item) for item in before.raw_request.items]
        ]
        assert exchange.parent == (max(extended)[2] if extended else None)


def check_prefixes(running: Gateway, exchanges: list[Exchange]) -> None:
    """A request that goes on where another ended gives a prompt that goes on where the other's ended."""
    by_id = {exchange.exchange_id: exchange for exchange in exchanges}
    for exchange in exchanges:
        parent = by_id.get(exchange.parent or "")
        if parent is not None and parent.raw_request.fields.get("tools") == exchange.raw_request.fields.get("tools"):
            assert running.prompt_text(exchange).startswith(running.prompt_text(parent))
