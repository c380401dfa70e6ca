"""Real harnesses over twenty turns, with thinking, with Qwen3's tokenizer and template, and with tokens that drift.

What must come of it, in every mode: all tokens are trained once, in the context that they were sampled in; `polar
verify` agrees; and where a harness sends its turns back whole, one trace an agent.
"""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from polar.records.exchange import Exchange
from polar.records.trajectory import Trace
from polar.rendering.tokenizer import Tokenizer
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree
from tests.harnesses.run import (
    NODE,
    PI,
    PYTHON,
    QWEN3,
    Run,
    Turn,
    check_tokens,
    qwen3,
    refused,
    run,
    verify,
    workspace,
)

TASK = "Write the files, one after the other."
TURNS = 20

Mode = Literal["auto", "sampled"]
MODES: tuple[Mode, ...] = ("auto", "sampled")

pytestmark = pytest.mark.harnesses


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for path in (PI / "pi", NODE / "codex", PYTHON / "mini", QWEN3):
        if not path.exists():
            pytest.fail(f"There is no {path}: run `make test-harnesses`, which installs it.")


# What is played

SCRIPT = '''#!/usr/bin/env python3
"""Grüße aus 東京 – a "script" with 'quotes', a \\\\backslash and a tab:\t."""

GREETINGS = {
    "de": "Schöne Grüße",
    "ja": "こんにちは",
    "emoji": "🙂👩‍🚀",
    "markup": "<b>&amp;</b> <tool_call> </think>",
}


def greet(name: str, language: str = "de") -> str:
    """Says hello;   with   odd   spacing, having been asked."""
    return f"{GREETINGS[language]}, {name!r}!  # {{braces}} $HOME `ls`"


if __name__ == "__main__":
    for language in GREETINGS:
        print(greet("Wörld", language))
'''


def played(tmp_path: Path, last: Turn) -> list[Turn]:
    """Mostly a command a turn; besides: two calls in one turn, no text, no thinking, a long file, an exit status."""
    turns: list[Turn] = []
    for number in range(TURNS - 1):
        turn: Turn = {
            "reasoning": f"Thinking about step {number}: the value has to be right, having been checked.\nThen on.",
            "text": f"Step {number}: running the command now.",
            "shell": f"expr {number} '*' 7 > f{number}.txt; cat f{number}.txt",
        }
        match number % 10:
            case 2:
                turn["write"] = {"path": str(workspace(tmp_path) / f"w{number}.txt"), "content": f"{number}: größer\n"}
            case 4:
                del turn["text"]
            case 6:
                del turn["reasoning"]
            case 7:
                del turn["shell"]
                turn["write"] = {"path": str(workspace(tmp_path) / f"s{number}.py"), "content": SCRIPT}
            case 8:
                turn["shell"] += f"; ls nothing{number}"
        turns.append(turn)
    return [*turns, last]


LAST: Turn = {"reasoning": "All of it is done.", "text": "Everything is written."}
SUBMIT: Turn = LAST | {"shell": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # how mini-swe-agent ends


async def play(tmp_path: Path, command: list[str], binaries: Path, mode: Mode, *, last: Turn = LAST) -> Run:
    turns = played(tmp_path, last)
    done = await run(tmp_path, command, binaries, turns=turns, variables=qwen3(tmp_path, mode))
    check_files(tmp_path)
    assert not refused(done)
    for exchange in done.exchanges:
        check_tokens(exchange)
    await check_verified(done)
    return done


def check_files(tmp_path: Path) -> None:
    """The turns were acted on, character for character."""
    folder = workspace(tmp_path)
    for number in range(TURNS - 1):
        if number % 10 != 7:
            assert (folder / f"f{number}.txt").read_text() == f"{number * 7}\n"
        else:
            assert (folder / f"s{number}.py").read_text() == SCRIPT


async def check_verified(done: Run) -> None:
    """`polar verify` agrees, and all that was sampled trains or has a reason."""
    found = await verify(done.data)
    sampled = sum(len(path.sampled) for path in done.session.paths)
    assert found["sampled"] == sampled == found["trainable"] + sum(found["excluded"].values())
    assert drifted(done.exchanges) > 0.2  # or none of this would show anything


def drifted(exchanges: list[Exchange]) -> float:
    """The share of turns whose text, encoded again, gives other ids."""
    tokenizer = Tokenizer.load(QWEN3)
    sampled = [exchange.sampled_ids.tolist() for exchange in exchanges if exchange.sampled_ids is not None]
    return float(np.mean([tokenizer.encode(tokenizer.decode(ids)) != ids for ids in sampled]))


def check_one_trace(done: Run, *, asides: int = 0) -> Trace:
    """All of the agent's turns are one sequence, and each begins where the one before it ended."""
    merged = prefix_merging(done.session)
    (trace,) = merged.traces
    main = [exchange for exchange in done.exchanges if exchange.exchange_id in trace.exchange_ids]
    assert len(main) == len(done.exchanges) - asides
    assert main[0].branch_reason is None
    for before, exchange in pairwise(main):
        assert (exchange.continuation, exchange.branch_reason) == ("recorded", None)
        assert exchange.parent == before.exchange_id
    assert trace.weight == 1
    assert int(trace.loss_mask.sum()) == merged.tokens.trainable
    tree = prefix_tree([done.session])
    assert merged.tokens.computed == tree.tokens.computed == tree.tokens.unique
    assert per_request(done.session).tokens.computed > 5 * merged.tokens.computed
    return trace


# Harnesses that send their turns back whole


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("command", "binaries"),
    [
        (["pi", "-p", TASK], PI),
        (["pi", "--provider", "polar-responses", "--model", "polar", "-p", TASK], PI),
        (["pi", "--provider", "polar-anthropic", "--model", "polar", "-p", TASK], PI),
        (["pi", "--provider", "polar-google", "--model", "polar", "-p", TASK], PI),
        (["codex", "exec", "--skip-git-repo-check", TASK], NODE),
        (["claude", "-p", TASK], NODE),
        (["qwen", "-p", TASK], NODE),
    ],
    ids=["pi-chat", "pi-responses", "pi-anthropic", "pi-google", "codex", "claude", "qwen"],
)
async def test_one_trace(tmp_path: Path, command: list[str], binaries: Path, mode: Mode) -> None:
    done = await play(tmp_path, command, binaries, mode)
    assert len(done.exchanges) == TURNS
    trace = check_one_trace(done)
    assert (trace.role, trace.branch_reason) == ("main", None)
    assert not prefix_merging(done.session).excluded


@pytest.mark.parametrize("mode", MODES)
async def test_opencode(tmp_path: Path, mode: Mode) -> None:
    """Besides its turns it asks for a title, which doesn't train."""
    done = await play(tmp_path, ["opencode", "run", TASK], NODE, mode)
    assert len(done.exchanges) == TURNS + 1
    check_one_trace(done, asides=1)
    assert {excluded.reason for excluded in prefix_merging(done.session).excluded} == {"role_auxiliary"}
    assert Counter(path.role for path in done.session.paths) == {"main": TURNS, "auxiliary": 1}


# Harnesses of which some drop thinking


@pytest.mark.parametrize(
    ("command", "binaries", "last"),
    [
        (["gemini", "-p", TASK], NODE, LAST),
        (["mini", "--yolo", "--exit-immediately", "-t", TASK], PYTHON, SUBMIT),
    ],
    ids=["gemini", "mini"],
)
async def test_a_tree_stays_small(tmp_path: Path, command: list[str], binaries: Path, last: Turn) -> None:
    """Where thinking is dropped, each turn stands in the tree twice: as it was sampled, and as the harness has it.

    The bound leaves out the first prompt, which would hide anything.
    """
    done = await play(tmp_path, command, binaries, "auto", last=last)
    assert len(done.exchanges) == TURNS
    assert not prefix_merging(done.session).excluded
    first, final = done.session.paths[0], done.session.paths[-1]
    context = not_the_models(final.prompt) - not_the_models(first.prompt)
    sampled = sum(len(path.sampled) for path in done.session.paths)
    tree = prefix_tree([done.session])
    assert tree.tokens.unique - len(first.prompt) <= 2.2 * (sampled + context)
    for turn, exchange in zip(done.turns, done.exchanges[1:], strict=False):
        # What was dropped has a reason, and where there was nothing to drop, it goes on. mini-swe-agent drops nothing.
        dropped = "reasoning" in turn and command[0] == "gemini"
        assert exchange.branch_reason == ("thinking_dropped_by_harness" if dropped else None)
        assert exchange.continuation == "recorded"


def not_the_models(prompt: Any) -> int:
    """Tokens of a prompt that stand in no assistant turn (of ChatML)."""
    tokenizer = Tokenizer.load(QWEN3)
    opens, closes = tokenizer.added_tokens["<|im_start|>"], tokenizer.added_tokens["<|im_end|>"]
    (assistant,) = tokenizer.encode("assistant")
    count, inside = 0, False
    for index, token in enumerate(prompt.tolist()):
        if token == opens and index + 1 < len(prompt):
            inside = int(prompt[index + 1]) == assistant
        count += not inside
        inside = inside and token != closes
    return count


@pytest.mark.parametrize(
    ("command", "binaries", "last"),
    [
        (["gemini", "-p", TASK], NODE, LAST),
        (["mini", "--yolo", "--exit-immediately", "-t", TASK], PYTHON, SUBMIT),
    ],
    ids=["gemini", "mini"],
)
async def test_one_trace_of_what_was_sampled(tmp_path: Path, command: list[str], binaries: Path, last: Turn) -> None:
    done = await play(tmp_path, command, binaries, "sampled", last=last)
    assert len(done.exchanges) == TURNS
    check_one_trace(done)
