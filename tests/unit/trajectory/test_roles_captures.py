"""Roles in the runs of real harnesses: each call gets the one that a person would give it.

The runs are read as if they had gone through the gateway: their replies' ids are replaced by ours, there and wherever
the harness echoed them.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polar import harnesses, ids, plugins
from polar.records.exchange import Exchange, RawRequest
from polar.trajectory.roles import CallLabel, ModelCall, assign_roles, read_call
from polar.types import Part, Reasoning, Reply, Text, ToolCall
from tests import captures

M, S, C, A, R = "main", "subagent", "compaction", "auxiliary", "retry"

ROLES = {
    "agents": [M, M, M],
    "agents_chat": [M, M, M],
    "claude": [M, M, M],
    "claude_fail_midstream": [M, M, M, M],  # keeps the cut turn, and asks to go on
    "claude_parallel": [M, M, M],
    "claude_sub": [M, S, M, S, M],
    "claude_toolsearch": [M, M, M],
    "claude_unknownmodel": [M, M, M],
    "codex": [M, M, M],
    "codex_compact": [M, C, M],
    "codex_fail_midstream": [M, M, M, M, M],  # keeps what was whole of the cut turns
    "codex_gpt55": [M, M, M],
    "codex_parallel": [M, M, M],
    "codex_sub": [M, M, S, M, S],
    "gemini": [M, M, M],
    "gemini_parallel": [M, M, M],
    "lang": [M, M, M],
    "lang_stream": [M, M, M],
    "mswe": [M, M, M],
    "mswe_responses": [M, M, M],
    "mswe_text": [M, M, M],
    "opencode": [A, M, M, M],
    "opencode_sub": [A, M, S, S, M, M],
    "pi": [M, M, M],
    "pi_anthropic": [M, M, M],
    "pi_fail_close": [R, R, M, M, M],
    "pi_google": [M, M, M],
    "pi_openai": [M, M, M],
    "qwen": [M, M, M],
    "qwen_fail_midstream": [M, M, M, M],  # asks to go on, and forgets that it did
    "qwen_parallel": [M, M, M],
}

AGENTS = {
    "claude_sub": ["main", "ae05d117ac60193f7"],
    "codex_sub": ["01a1dcc9-cf21-7b81-bab3-e449760b505c", "01a1dcc9-cfba-7523-adf4-e35317810450"],
    "opencode_sub": ["ses_e23253e83ffe6X3a8cknMW7XmE", "ses_e23252828ffefs5cO9C9JmfYfW"],
}

SUMMARY = "<xedibake>x</xedibake><gumomol>Remosih-Pazomog-Rexe: turn 1 siha.</gumomol>"
"""Requests have pseudo-words for prose, replies don't: this is what came back of codex's summary."""


def calls_of(name: str) -> list[ModelCall]:
    records = {
        record["n"]: record for record in captures.load(name)
    }  # of a failed one the second record says what was sent
    renamed: dict[str, str] = {}
    calls = []
    for seq, (number, record) in enumerate(records.items()):
        sent = json.dumps(record["body"])
        for theirs, ours in renamed.items():
            sent = sent.replace(theirs, ours)
        exchange_id = f"x{number:024x}"
        reply = reply_of(record, exchange_id)
        if reply is not None:
            if (name, number) == ("codex_compact", 2):
                reply.parts = [Text(SUMMARY)]
            renamed |= rename(reply)
        calls.append(read_call(exchange(record, sent, exchange_id, seq, reply)))
    return calls


def exchange(record: dict[str, Any], sent: str, exchange_id: str, seq: int, reply: Reply | None) -> Exchange:
    path = record["path"]
    names = {"chat": "openai_chat", "responses": "openai_responses", "messages": "anthropic", "models": "google"}
    dialect = plugins.load("dialects", names[path.split("/")[2]])()
    params = next(found.groupdict() for route in dialect.routes if (found := route.path.fullmatch(path)))
    wire: RawRequest = dialect.split(sent.encode())
    cut = "injected" in record
    return Exchange(
        exchange_id=exchange_id,
        session_id="s",
        seq=seq,
        dialect=dialect.name,
        params=params,
        hints={name.lower(): value for name, value in record["headers"]},
        raw_request=wire,
        status="failed" if reply is None else "partial" if cut else "complete",
        started_at=record["t"],
        ended_at=record["t"],
        reply=reply,
        sampled_ids=None if reply is None else np.arange(9, dtype=np.int32),
        delivered=0 if reply is None else 5 if cut else 9,
    )


def rename(reply: Reply) -> dict[str, str]:
    """Gives the reply the ids that the gateway would have given it."""
    renamed = {}
    for index, part in enumerate(reply.parts):
        if isinstance(part, ToolCall):
            ours = ids.make_call_id(reply.exchange_id, index)
            renamed[part.id], part.id = ours, ours
        elif isinstance(part, Reasoning) and part.seal:
            ours = ids.make_seal(reply.exchange_id, index)
            renamed[part.seal], part.seal = ours, ours
    return renamed


def reply_of(record: dict[str, Any], exchange_id: str) -> Reply | None:
    if "resp_sse" in record:
        path = record["path"]
        read = (
            chat if "chat" in path else responses if "responses" in path else google if "models" in path else anthropic
        )
        parts = list(read(events(record["resp_sse"])))
    elif "resp" in record:
        path = record["path"]
        dialect = "openai_chat" if "chat" in path else "openai_responses"
        parts = plugins.load("dialects", dialect)().decode_reply(json.dumps(record["resp"]).encode()).parts
    else:
        return None
    return Reply(exchange_id, "model", 0, parts)


# Just enough of each provider's stream


def events(stream: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def chat(stream: list[dict[str, Any]]) -> Iterator[Part]:
    deltas = [choice["delta"] for event in stream for choice in event["choices"]]
    yield Text("".join(delta.get("content") or "" for delta in deltas))
    calls: dict[int, ToolCall] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or ()):
        call = calls.setdefault(piece["index"], ToolCall(piece.get("id", ""), piece["function"].get("name", ""), ""))
        call.arguments += piece["function"].get("arguments", "")
    yield from calls.values()


def responses(stream: list[dict[str, Any]]) -> Iterator[Part]:
    for item in (event["item"] for event in stream if event["type"] == "response.output_item.done"):
        if item["type"] == "message":
            yield Text("".join(part["text"] for part in item["content"]))
        elif item["type"] == "reasoning":
            yield Reasoning("", item.get("encrypted_content"))
        else:
            yield ToolCall(item["call_id"], item.get("name", ""), item.get("arguments", ""))


def anthropic(stream: list[dict[str, Any]]) -> Iterator[Part]:
    blocks: dict[int, Part] = {}
    for event in stream:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            made: dict[str, Part] = {"text": Text(""), "thinking": Reasoning("")}
            blocks[event["index"]] = made.get(block["type"]) or ToolCall(block["id"], block["name"], "")
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if isinstance(block, ToolCall):
                block.arguments += delta["partial_json"]
            elif isinstance(block, Reasoning):
                block.text += delta.get("thinking", "")
                block.seal = delta.get("signature", block.seal)
            elif isinstance(block, Text):
                block.text += delta["text"]
    yield from blocks.values()


def google(stream: list[dict[str, Any]]) -> Iterator[Part]:
    for part in (part for event in stream for part in event["candidates"][0]["content"].get("parts", ())):
        if "functionCall" in part:
            call = part["functionCall"]
            yield ToolCall(call.get("id") or "none", call["name"], json.dumps(call["args"]))
        elif not part.get("thought"):
            yield Text(part["text"])


def roles(calls: list[ModelCall], labels: dict[str, CallLabel]) -> list[str]:
    return [labels[call.exchange_id].role for call in calls]


def test_every_capture_has_its_roles() -> None:
    assert set(ROLES) == set(captures.names())


@pytest.mark.parametrize("name", captures.names())
def test_known_harness(name: str) -> None:
    calls = calls_of(name)
    labels = assign_roles(calls, patterns=harnesses.find_call_patterns(None))
    assert roles(calls, labels) == ROLES[name]
    agents = list(dict.fromkeys(labels[call.exchange_id].agent_id for call in calls))
    assert agents == AGENTS.get(name, agents[:1])


@pytest.mark.parametrize("name", captures.names())
def test_structure_suffices(name: str) -> None:
    calls = calls_of(name)
    labels = assign_roles(calls)
    assert roles(calls, labels) == ROLES[name]
    agents = list(dict.fromkeys(label.agent_id for label in labels.values()))
    assert agents == (["main", "agent-1"] if name in AGENTS else ["main"])


@pytest.mark.parametrize("name", ["codex_compact", "codex_sub", "claude_sub", "opencode_sub"])
def test_ids_that_do_not_come_back(name: str) -> None:
    """Where a harness echoes none of our ids, what the messages say is enough."""
    strangers = calls_of(name)
    for call in strangers:
        for message in call.request.messages:
            for part in message.parts:
                if isinstance(part, ToolCall):
                    part.id = "call"
                elif isinstance(part, Reasoning):
                    part.seal = None
    assert assign_roles(strangers) == assign_roles(calls_of(name))
