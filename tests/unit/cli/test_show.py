"""A session as a tree that a person can read, however long or branchy it is."""

import json
import re
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from rich.console import Console
from rich.tree import Tree

from polar.cli.show import render_tree
from polar.records.exchange import Exchange, RawRequest, VersionSpan
from polar.records.session import Evidence, Session
from polar.records.spans import ExcludedSpan
from polar.records.trajectory import TokenPath
from polar.types import Reasoning, Reply, Text, ToolCall

SESSION = Session("s1", b"", 0.0, status="ended", reward=0.5)


def call(seq: int, parent: int | None, said: str = "", **changes: Any) -> Exchange:
    messages = [{"role": "user", "content": f"question {seq}"}]
    known = Exchange(
        exchange_id=f"x{seq}",
        session_id="s1",
        seq=seq,
        dialect="openai_chat",
        params={},
        hints={},
        raw_request=RawRequest(
            {"model": Raw(b'"m"')}, "messages", [Raw(json.dumps(message).encode()) for message in messages]
        ),
        status="complete",
        started_at=0.0,
        ended_at=1.0,
        reply=Reply(f"x{seq}", "m", 0, [Text(said or f"answer {seq}")]),
        prompt_ids=np.arange(5, dtype=np.int32),
        sampled_ids=np.array([1, 2], np.int32),
        delivered=2,
        versions=[VersionSpan(7, 0, 2)],
        finish_reason="stop",
        parent=None if parent is None else f"x{parent}",
    )
    return msgspec.structs.replace(known, **changes)


def path_of(exchange: Exchange, **changes: Any) -> TokenPath:
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    known = TokenPath(
        "s1", exchange.exchange_id, exchange.seq, exchange.prompt_ids, exchange.sampled_ids, None, None, 2
    )
    return msgspec.structs.replace(known, agent_id="main", **changes)


def shown(exchanges: list[Exchange], paths: list[TokenPath] | None = None, limit: int = 20, **options: Any) -> str:
    known = [path_of(exchange) for exchange in exchanges] if paths is None else paths
    console = Console(width=250, color_system=None)
    with console.capture() as capture:
        console.print(render_tree(options.get("session", SESSION), exchanges, known, None, limit))
    return capture.get()


def depth_of(text: str, seq: int) -> int:
    (line,) = (line for line in text.splitlines() if f"#{seq} complete" in line)
    return line.index("#") // 4


def test_what_is_said_of_a_call() -> None:
    parts: list[Any] = [Reasoning("hm"), Text("so"), ToolCall("c", "bash", '{"a": 1}')]
    changes: dict[str, Any] = {
        "status": "partial",
        "delivered": 1,
        "reply": Reply("x0", "m", 0, parts),
        "continuation": "rendered",
        "branch_reason": "thinking_dropped",
        "malformed": True,
        "error": "the harness went away",
        "versions": [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)],
    }
    exchange = call(0, None, **changes)
    path = path_of(exchange, role="subagent", num_trainable=1, excluded=[ExcludedSpan("x0", 1, 2, "undelivered")])
    path.agent_id = "agent-1"
    session = msgspec.structs.replace(SESSION, turn_rewards={"x0": 0.25})
    text = shown([exchange], [path], session=session)
    assert "s1 ended, reward 0.5, 1 model call" in text
    assert (
        "1 subagent; 2 tokens sampled, 1 of them train; excluded: 1 undelivered; branches: 1 thinking_dropped" in text
    )
    assert (
        "#0 partial subagent agent-1 openai_chat: 5 tokens in (rendered), 2 sampled, policy 3-4, stop, reward 0.25, "
        "branch: thinking_dropped, 1 excluded: undelivered, malformed call" in text
    )
    for line in ("user: question 0", "thinks: hm", "says: so", 'calls: bash {"a": 1}', "error: the harness went away"):
        assert line in text


def test_no_reward_has_a_reason_and_markup_in_it_is_text() -> None:
    session = msgspec.structs.replace(SESSION, reward=None, reason="grader [bold]crashed[/]")
    assert "no reward: grader [bold]crashed[/]" in shown([call(0, None, "[red]x[/] \x1b[31m")], session=session)


def test_evidence_of_tampering_is_shown_proven_or_not() -> None:
    evidence = [
        Evidence("link_out", "a\x1b[31m -> /tests/x", True, "it leads out"),
        Evidence("grader_path", "[red]/tests[/]", count=3),
    ]
    text = shown([call(0, None)], session=msgspec.structs.replace(SESSION, evidence=evidence))
    assert "proven tampering: link_out a␛[31m -> /tests/x (it leads out)" in text
    assert "unproven sign of tampering: grader_path [red]/tests[/] x 3" in text
    assert "tampering" not in shown([call(0, None)])


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert "says: a ␛[31m b" in shown([call(0, None, "a \x1b[31m b")])


def test_a_refused_request_is_shown_without_its_messages() -> None:
    broken = call(0, None, status="failed", reply=None, prompt_ids=None, sampled_ids=None, error="no such field")
    broken.raw_request = RawRequest({}, "messages", [Raw(b"3")])
    assert "error: no such field" in shown([broken], [])


def test_a_conversation_runs_straight_and_forks_hang_below_the_call_they_leave() -> None:
    """0 - 1 - 2 - 5 - 6, and from 1 another way: 3 - 4."""
    text = shown([call(0, None), call(1, 0), call(2, 1), call(3, 1), call(4, 3), call(5, 2), call(6, 5)])
    order = [int(found) for found in re.findall(r"#(\d+) ", text)]
    assert order == [0, 1, 3, 4, 2, 5, 6]
    assert {seq: depth_of(text, seq) for seq in order} == {0: 1, 1: 1, 2: 1, 5: 1, 6: 1, 3: 2, 4: 3}


def test_agents_stand_side_by_side() -> None:
    text = shown([call(0, None), call(1, None), call(2, 0), call(3, 1)])
    assert [int(found) for found in re.findall(r"#(\d+) ", text)] == [0, 2, 1, 3]
    assert [depth_of(text, seq) for seq in range(4)] == [1, 1, 2, 2]


def test_a_long_run_is_summed_up_but_what_happens_in_it_is_shown() -> None:
    turns = [call(seq, seq - 1 if seq else None) for seq in range(200)]
    turns[90].branch_reason = "edited"
    turns[150].status = "partial"
    text = shown(turns)
    assert len(text.splitlines()) < 100
    assert re.findall(r"… (\d+) calls like these, #(\d+) to #(\d+)", text) == [
        ("80", "10", "89"),
        ("58", "92", "149"),
        ("39", "151", "189"),
    ]
    assert "branch: edited" in text
    assert "#150 partial" in text
    assert len(re.findall(r"#\d+ (complete|partial)", shown(turns, limit=0))) == 200


@st.composite
def parents(draw: st.DrawFn) -> list[int | None]:
    count = draw(st.integers(1, 40))
    return [draw(st.none() | st.integers(0, seq - 1)) if seq else None for seq in range(count)]


@given(parents(), st.integers(0, 12))
def test_every_call_is_shown_once_or_counted(above: list[int | None], limit: int) -> None:
    text = shown([call(seq, parent) for seq, parent in enumerate(above)], limit=limit)
    listed = [int(seq) for seq in re.findall(r"#(\d+) complete", text)]
    counted = sum(int(count) for count in re.findall(r"… (\d+) calls like these", text))
    assert len(set(listed)) == len(listed)
    assert len(listed) + counted == len(above)


@given(parents())
def test_it_is_never_deep(above: list[int | None]) -> None:
    def height(node: Tree) -> int:
        return 1 + max((height(below) for below in node.children), default=0)

    calls = [call(seq, parent) for seq, parent in enumerate(above)]
    assert height(render_tree(SESSION, calls, [], None, 0)) <= 4 + 2 * np.log2(len(above))
