"""Real harnesses whose stream breaks off in the middle of a turn, once. Each makes of it what it does, and goes on.

Whatever that is, the run comes to its end, and of the session nothing is lost: tokens that were not delivered are
excluded, those of a turn that is kept in part train once, dead attempts are retries, and later turns go on from
recorded ids.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.engines.scripted.sampler import expected_logprobs
from polar.records.exchange import Exchange
from polar.trajectory.builders import prefix_merging
from polar.types import Text
from tests.harnesses.run import NODE, PI, Run, Turn, asked, qwen3, run, verify, workspace

TASK = "Write the files."
BROKEN = 1  # which turn breaks off
TURNS = 6
CODEX = ["codex", "exec", "--skip-git-repo-check", TASK]
CLAUDE = ["claude", "-p", TASK]

pytestmark = pytest.mark.harnesses


def played(tmp_path: Path, fail: str, after: int) -> list[Turn]:
    turns: list[Turn] = [
        {
            "reasoning": f"Thinking about step {number}, having been checked well enough by now.",
            "text": f"Step {number}: running the command now, and the file will be there.",
            "shell": f"expr {number} '*' 7 > f{number}.txt; cat f{number}.txt",
        }
        for number in range(TURNS - 1)
    ]
    write = {"path": str(workspace(tmp_path) / "written.txt"), "content": "One line after the other.\n" * 3}
    turns[BROKEN] |= {"write": write, "fail": fail, "fail_after": after, "fail_times": 1}
    return [*turns, {"reasoning": "All of it is done.", "text": "Everything is written."}]


async def play(tmp_path: Path, command: list[str], binaries: Path, fail: str, after: int, mode: str) -> Run:
    """What holds for all of them."""
    turns = played(tmp_path, fail, after)
    done = await run(tmp_path, command, binaries, turns=turns, variables=qwen3(tmp_path, mode))
    for number in (0, 2, 3, 4):
        assert (workspace(tmp_path) / f"f{number}.txt").read_text() == f"{number * 7}\n"
    for exchange in done.exchanges:
        assert exchange.prompt_ids is not None
        assert exchange.sampled_ids is not None
        expected = expected_logprobs(0, exchange.prompt_ids, exchange.sampled_ids)
        np.testing.assert_array_equal(exchange.logprobs, expected)
    partial = [exchange for exchange in done.exchanges if exchange.status == "partial"]
    assert [exchange.seq for exchange in partial] == [BROKEN]
    found = await verify(done.data)
    assert found["sampled"] == found["trainable"] + sum(found["excluded"].values())
    assert {excluded.exchange_id for excluded in prefix_merging(done.session).excluded} <= {partial[0].exchange_id}
    return done


def check_chain(exchanges: list[Exchange]) -> None:
    """Each goes on from the one before it."""
    for before, after in pairwise(exchanges):
        assert (after.continuation, after.branch_reason, after.parent) == ("recorded", None, before.exchange_id)


def last_text(exchange: Exchange) -> str:
    """Of the request's last message."""
    parts: list[Any] = asked(exchange).messages[-1].parts
    return "".join(part.text for part in parts if isinstance(part, Text))


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize(
    ("command", "binaries", "fail", "after"),
    [
        (["pi", "-p", TASK], PI, "midstream", 30),
        (["pi", "--provider", "polar-responses", "--model", "polar", "-p", TASK], PI, "close", 30),
        (["pi", "--provider", "polar-anthropic", "--model", "polar", "-p", TASK], PI, "midstream", 80),
        (["pi", "--provider", "polar-google", "--model", "polar", "-p", TASK], PI, "close", 5),
        (CODEX, NODE, "close", 5),
    ],
    ids=["pi-chat", "pi-responses", "pi-anthropic", "pi-google", "codex"],
)
async def test_an_attempt_that_is_thrown_away(
    tmp_path: Path, command: list[str], binaries: Path, fail: str, after: int, mode: str
) -> None:
    """The same is asked again: the first attempt is a retry, and all others are one trace."""
    done = await play(tmp_path, command, binaries, fail, after, mode)
    assert (workspace(tmp_path) / "f1.txt").read_text() == "7\n"
    assert len(done.exchanges) == TURNS + 1
    assert [path.role for path in done.session.paths] == ["main", "retry", *["main"] * (TURNS - 1)]
    first, _, *others = done.exchanges
    check_chain([first, *others])
    merged = prefix_merging(done.session)
    assert len(merged.traces) == 1
    assert {excluded.reason for excluded in merged.excluded} <= {"role_retry", "undelivered"}


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize(("fail", "after", "kept"), [("close", 30, ""), ("midstream", 80, "Step 1: running")])
async def test_codex_keeps_what_was_done(tmp_path: Path, mode: str, fail: str, after: int, kept: str) -> None:
    """Items that came whole stay in its history (the thought, or the thought and the text), and it asks on with them as
    the last thing that was said. In mode `auto` the model sees as much; with `sampled`, all that was delivered."""
    done = await play(tmp_path, CODEX, NODE, fail, after, mode)
    assert len(done.exchanges) == TURNS
    partial, resumed = done.exchanges[BROKEN], done.exchanges[BROKEN + 1]
    assert asked(resumed).messages[-1].role == "assistant"
    assert last_text(resumed).startswith(kept)
    check_chain(done.exchanges)
    session = done.session
    assert [path.role for path in session.paths] == ["main"] * TURNS
    assert session.paths[BROKEN].num_trainable == partial.delivered
    assert {excluded.reason for excluded in prefix_merging(session).excluded} <= {"undelivered"}
    # What was delivered and not kept trains in a trace of its own.
    assert len(prefix_merging(session).traces) == (1 if mode == "sampled" else 2)


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize(("fail", "after", "kept"), [("close", 30, False), ("midstream", 80, True)])
async def test_claude_asks_for_the_rest(tmp_path: Path, mode: str, fail: str, after: int, kept: bool) -> None:
    """Blocks that came whole stay in its history, open ones don't, and a user message asks for the rest. Before a user
    message Qwen3's template drops thinking; with `sampled` it stays."""
    done = await play(tmp_path, CLAUDE, NODE, fail, after, mode)
    partial, resumed = done.exchanges[BROKEN], done.exchanges[BROKEN + 1]
    assert "cut off" in last_text(resumed)
    echoed = [message for message in asked(resumed).messages if message.role == "assistant"]
    assert len(echoed) == 1 + kept
    session = done.session
    assert {path.role for path in session.paths} == {"main"}
    assert session.paths[BROKEN].num_trainable == partial.delivered
    assert {excluded.reason for excluded in prefix_merging(session).excluded} <= {"undelivered"}
    assert resumed.branch_reason == ("thinking_dropped_by_template" if mode == "auto" else None)
    if mode == "sampled":
        assert resumed.parent == done.exchanges[BROKEN if kept else BROKEN - 1].exchange_id
    check_chain(done.exchanges[BROKEN + 1 :])
    assert len(prefix_merging(session).traces) == (1 if mode == "sampled" and kept else 2)
