"""What is seen of a run while it goes on, and what is said of it when it is over."""

import asyncio
import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polar.cli import run_tally
from polar.cli.run_progress import LineProgress, LiveProgress, TokenRate, describe_session, poll_load, show_progress
from polar.cli.run_tally import RunTally
from polar.config import EngineSettings
from polar.evaluators.base import Outcome
from polar.node.finished_session import FinishedSession
from polar.node.node import NodeLoad
from polar.records.session import Evidence, Verdict

LOAD = NodeLoad(waiting=1, init=2, ready=1, run=3, postrun=1, calls=4, held=2, paused=True, tokens=120)


def finished(
    reward: float | None = None, reason: str | None = None, why: object = None, **changes: Any
) -> FinishedSession:
    known = {
        "session_id": "s1",
        "task_id": "fix [red]it[/]",
        "sample": 0,
        "verdict": Verdict(reward, reason, detail={} if why is None else {"why": why}),
        "seconds": {"queued": 1.0, "init": 0.5, "run": 2.0, "postrun": 0.5},
        "folder": Path("sessions/s1"),
        "outcome": Outcome("finished", 0, 2.0),
        "turns": 3,
        "tokens": 40,
    }
    return FinishedSession(**(known | changes))


def tally(*ended: FinishedSession) -> RunTally:
    counted = RunTally()
    for one in ended:
        counted.add(one)
    return counted


def terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, width=width, color_system=None), written


def test_rewards_and_reasons_are_counted_apart() -> None:
    counted = tally(finished(1.0), finished(0.5), finished(reason="timeout"), finished(reason="engine_failed"))
    assert (counted.sessions, counted.rewarded, counted.mean_reward, counted.solved) == (4, 2, 0.75, 1)
    assert counted.reasons == {"timeout": 1, "engine_failed": 1}
    assert counted.platform_failures == {"engine_failed": 1}  # the other is as the task wants it
    assert (counted.turns, counted.tokens, counted.seconds["run"]) == (12, 160, 8.0)


def test_a_session_that_nobody_evaluates_is_no_failure() -> None:
    counted = tally(finished())
    assert (counted.mean_reward, counted.platform_failures.total()) == (None, 0)


def test_the_speed_is_that_of_the_last_seconds() -> None:
    speed = TokenRate()
    assert speed.update(0, 100.0) == 0
    assert speed.update(50, 101.0) == 50
    assert speed.update(50, 110.0) == 5
    assert speed.update(50, 200.0) == 0  # nothing for a long while


def test_lines_tell_stages_and_each_end() -> None:
    console, written = terminal(40)
    lines = LineProgress(console, 9, silent=False)
    counted = tally(finished(1.0))
    lines.on_session_ended(finished(1.0), counted)
    lines.update(LOAD, counted)
    first, second = written.getvalue().splitlines()
    assert first == "1/9  fix [red]it[/] #0: reward 1, 3 turns, 40 tokens, 2.0 s (s1)"
    assert second == (
        "1 waiting, 2 init, 1 ready, 3 run, 1 postrun, 1 of 9 done; mean reward 1, 1 of 1 solved; "
        "0 tokens/s, 4 calls at the engine, 2 held, paused"
    )


def test_why_a_reward_is_what_it_is_stands_in_the_sessions_line() -> None:
    zero = describe_session(finished(0.0, why="There is no number in r.txt."))
    assert zero.startswith("fix [red]it[/] #0: reward 0 (There is no number in r.txt.), 3 turns")
    assert "reward 0, " in describe_session(finished(0.0, why={"reward": 1.0}))  # a part of that name, and no sentence
    quoted = describe_session(finished(0.0, why="The agent's file \x1b[2J\nis " + "x" * 500))
    assert "\x1b" not in quoted
    assert "\n" not in quoted
    assert "x…), 3 turns" in quoted
    assert len(quoted) < 250


def test_a_silent_run_says_only_what_must_be_said() -> None:
    console, written = terminal()
    lines = LineProgress(console, 9, silent=True)
    lines.on_session_ended(finished(1.0), tally(finished(1.0)))
    lines.update(LOAD, RunTally())
    lines.print_message("Interrupted.")
    assert written.getvalue() == "Interrupted.\n"


@pytest.mark.parametrize("width", [100, 30])
def test_the_picture_holds_everything_and_is_gone_in_the_end(width: int) -> None:
    console, written = terminal(width)
    handlers = list(logging.getLogger().handlers)
    with show_progress(console, 9, silent=True) as shown:
        assert isinstance(shown, LiveProgress)
        counted = tally(*(finished(1.0, sample=number) for number in range(7)), finished(reason="timeout"))
        for number in range(7):
            shown.on_session_ended(finished(1.0, sample=number), counted)
        drawn = Console(width=100, file=io.StringIO())
        drawn.print(shown.render(LOAD, counted, 10.0))
        shown.update(LOAD, counted)
        logging.getLogger("polar").warning("something above it")
    text = drawn.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("8/9", "3 run", "mean reward 1", "timeout 1", "4 calls at the engine", "fix [red]it[/] #6"):
        assert expected in text
    assert "#1:" not in text  # only the last ones
    assert "WARNING polar: something" in written.getvalue()
    assert written.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    assert logging.getLogger().handlers == handlers


async def test_a_failure_to_look_is_not_hidden() -> None:
    def broken() -> NodeLoad:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with poll_load(LineProgress(terminal()[0], 1, silent=True), broken, RunTally()):
            await asyncio.sleep(0.01)


def summary(tasks: dict[str, RunTally], total: RunTally | None = None) -> str:
    console, written = terminal(140)
    total = total or tally(finished(1.0), finished(0.0))
    run_tally.print_summary(console, tasks, total, 2.0)
    return written.getvalue()


def test_the_summary_has_a_row_for_each_task() -> None:
    said = summary({"a": tally(finished(1.0), finished(0.0)), "b": tally(finished(reason="timeout"))})
    row = next(line for line in said.splitlines() if line.startswith("│ a "))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["a", "2", "0.5", "1/2", "", "3.0", "40.0", "0.50", "0.00", "2.00", "0.50"]
    assert "timeout 1" in said
    assert "2 sessions in 2.0 s: mean reward 0.5, 1 of 2 solved; 6 turns, 80 tokens sampled (40 a second)." in said


def test_a_summary_of_many_tasks_is_cut() -> None:
    said = summary({f"t{number}": tally(finished(1.0)) for number in range(60)})
    assert "and 10 more tasks" in said
    assert "t59" not in said


def test_the_summary_counts_rewards_of_0_by_why() -> None:
    ended = [finished(1.0, why="All of [1] passed."), finished(0.0)]
    assert "Why rewards" not in summary({}, tally(*ended))
    whys = ["There is no number in [b]r.txt[/].", "The command took too long.", "a", "b", "c"]
    ended += [finished(0.0, why=why) for why, times in zip(whys, (3, 2, 1, 1, 1), strict=True) for _ in range(times)]
    lines = summary({}, tally(*ended)).splitlines()
    assert lines[lines.index("Why rewards are 0:") + 1 :] == [
        "  3 sessions: There is no number in [b]r.txt[/].",
        "  2 sessions: The command took too long.",
        "  1 session: a",
        "  2 sessions for other reasons",
    ]


PROVEN = Evidence("test_edited", "tests/test_a.py", True)
UNPROVEN = Evidence("grader_path", "/tests")


def test_the_summary_counts_suspicious_sessions() -> None:
    honest = tally(finished(1.0))
    assert "suspicious" not in summary({"a": honest}, honest)
    ended = [
        finished(verdict=Verdict(0.0, evidence=[PROVEN, PROVEN])),
        finished(verdict=Verdict(reason="suspicious", evidence=[UNPROVEN, PROVEN])),
        finished(verdict=Verdict(1.0, evidence=[UNPROVEN])),
    ]
    said = summary({"a": tally(*ended), "b": honest}, tally(*ended, finished(1.0)))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
    assert [(row[0], row[5]) for row in rows] == [("a", "2"), ("b", "0")]
    assert "Proven tampering with the grading: 2 sessions (test_edited 2)." in said
    assert "Unproven signs of tampering, which change no reward: 1 session." in said
    assert tally(*ended).platform_failures == {}  # none of it is the platform's
    assert describe_session(ended[0]).startswith("fix [red]it[/] #0: reward 0, suspicious, ")


def test_harnesses_that_ended_by_themselves_with_0_are_counted() -> None:
    outcomes = [Outcome("finished", 0, 1.0), Outcome("finished", 1, 1.0), Outcome("timeout", None, 1.0), None]
    assert [tally(finished(0.0, outcome=outcome)).exited_cleanly for outcome in outcomes] == [1, 0, 0, 0]


def test_the_complaint_names_each_reason_with_what_to_do() -> None:
    counted = tally(
        finished(1.0),
        finished(reason="timeout"),
        finished(reason="engine_failed", error="The engine\x1b[2J is gone.", session_id="s2"),
        finished(reason="engine_failed", error="Later.", session_id="s3"),
    )
    said = run_tally.describe_failures(counted, Path("data"), EngineSettings())
    assert said.splitlines() == [
        "2 of 4 sessions ended without a reward because the platform failed: engine_failed 2.",
        "  engine_failed: check whether the engine is up: polar doctor (in data/sessions/s2)",
        "    The engine␛[2J is gone.",
    ]
    harmless = tally(finished(0.0), finished(reason="length"))
    assert run_tally.describe_failures(harmless, Path("data"), EngineSettings()) == ""


@pytest.mark.parametrize(("kind", "asked"), [("vllm", "http://a:1"), ("sglang", "http://a:1 --kind sglang")])
def test_the_complaint_names_the_engine(kind: str, asked: str) -> None:
    engine = EngineSettings(kind=kind, urls=["http://a:1", "http://b:1"])
    said = run_tally.describe_failures(tally(finished(reason="engine_failed")), Path("data"), engine)
    assert f"polar doctor {asked} (in " in said
