"""Real sub-agents beside their parent: each agent is one trace, and branches have their true reasons."""

from pathlib import Path
from typing import Any

import pytest

from polar.records.trajectory import Trace
from polar.trajectory.builders import prefix_merging
from tests.harnesses.run import NODE, Run, Turn, check_tokens, qwen3, refused, run, verify, workspace

TASK = "Write the files."
HELP = "PLAY:helper Do your part."

pytestmark = pytest.mark.harnesses

HELPER: list[Turn] = [
    {
        "reasoning": f"My part, step {number}, having been asked.",
        "text": f"Helping with {number}.",
        "shell": f"expr {number} '*' 11 > helper{number}.txt; cat helper{number}.txt",
    }
    for number in range(3)
] + [{"reasoning": "My part is done.", "text": "The helper's part is done."}]


def leader(call: dict[str, Any]) -> list[Turn]:
    """Its own commands take long enough for the helper to end before it does."""
    turns: list[Turn] = [
        {
            "reasoning": f"Thinking about step {number}, having been checked well enough by now.",
            "text": f"Step {number}: running the command now.",
            "shell": f"sleep 1; expr {number} '*' 7 > f{number}.txt; cat f{number}.txt",
        }
        for number in range(6)
    ]
    turns[1] = {"reasoning": "Somebody else can do this.", "text": "Starting a helper.", "calls": [call]}
    return [*turns, {"reasoning": "All of it is done.", "text": "Everything is written."}]


async def play(
    tmp_path: Path, command: list[str], call: dict[str, Any], mode: str, options: tuple[str, ...] = ()
) -> tuple[Run, list[Trace]]:
    variables = qwen3(tmp_path, mode)
    done = await run(
        tmp_path, command, NODE, options=options, turns=leader(call), plays={"helper": HELPER}, variables=variables
    )
    for number in (0, 2, 3, 4, 5):
        assert (workspace(tmp_path) / f"f{number}.txt").read_text() == f"{number * 7}\n"
    for number in range(3):
        assert (workspace(tmp_path) / f"helper{number}.txt").read_text() == f"{number * 11}\n"
    assert not refused(done)
    for exchange in done.exchanges:
        check_tokens(exchange)
    found = await verify(done.data)
    assert found["sampled"] == found["trainable"]
    merged = prefix_merging(done.session)
    assert not merged.excluded
    return done, merged.traces


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
async def test_claude(tmp_path: Path, mode: str, background: bool) -> None:
    arguments = {"description": "a part", "prompt": HELP, "subagent_type": "general-purpose"}
    call = {"name": "Agent", "arguments": arguments if background else arguments | {"run_in_background": False}}
    done, traces = await play(tmp_path, ["claude", "-p", TASK], call, mode)
    assert [(trace.role, len(trace.exchange_ids)) for trace in traces] == [("main", 7), ("subagent", 4)]
    assert len({trace.agent_id for trace in traces}) == 2
    assert [exchange.branch_reason for exchange in done.exchanges] == [None] * 11


@pytest.mark.parametrize("mode", ["auto", "sampled"])
async def test_codex(tmp_path: Path, mode: str) -> None:
    """That its helper is done, it is told by a user message, before which Qwen3's template drops thinking. To a model
    that it doesn't know it offers helpers at once, to others only in its search for tools."""
    call = {"name": "multi_agent_v1__spawn_agent", "arguments": {"message": HELP}}
    command = ["codex", "exec", "--skip-git-repo-check", TASK]
    done, traces = await play(tmp_path, command, call, mode, ("--model", "gpt-5-codex"))
    helping = [trace for trace in traces if trace.role == "subagent"]
    leading = [trace for trace in traces if trace.role == "main"]
    assert [len(trace.exchange_ids) for trace in helping] == [4]
    assert sum(len(trace.exchange_ids) for trace in leading) == 7
    assert len({trace.agent_id for trace in leading}) == 1
    assert helping[0].agent_id != leading[0].agent_id
    reasons = [exchange.branch_reason for exchange in done.exchanges if exchange.branch_reason]
    assert reasons == (["thinking_dropped_by_template"] if mode == "auto" else [])
    assert len(leading) == 1 + len(reasons)
