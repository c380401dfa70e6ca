"""The examples: their graders, without any harness. The commands of the plays are run as an agent would run them."""

import re
from pathlib import Path

import pytest

from polar.engines.scripted.play import OfferedTool, PlaySet, ScriptedTurn, TurnContext
from polar.evaluators import load_evaluator
from polar.records.session import Verdict
from polar.records.task import TaskRequest
from polar.tasks import read
from polar.testing.grading import WorkFactory

EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = [path.stem for path in sorted((EXAMPLES / "tasks").glob("*.toml"))]
HARBOR = [path.name for path in sorted((EXAMPLES / "harbor").iterdir())]
TOOLS = [OfferedTool("bash", {})]


def task_of(name: str, backend: str) -> TaskRequest:
    path = EXAMPLES / ("harbor" if name in HARBOR else "tasks") / name
    (task,) = read([path if name in HARBOR else path.with_suffix(".toml")], backend=backend)
    return task


def turns(task: TaskRequest, which: str) -> list[ScriptedTurn]:
    """What the scripted engine says to a harness that was given the task."""
    plays = PlaySet.load(EXAMPLES / "plays" / f"{which}.toml")
    name = plays.find_matching(f"<environment>\n{task.instruction}\nYou have a shell.")
    assert name == task.task_id, "each instruction selects its own play"
    played: list[ScriptedTurn] = []
    while not played or played[-1].uses_tools:
        played.append(plays.next_turn(TurnContext(len(played), name, TOOLS)))
    return played


def commands(played: list[ScriptedTurn]) -> str:
    return "\n".join(turn.shell for turn in played if turn.shell is not None)


async def graded(place: WorkFactory, task: TaskRequest, commands: str, answer: str = "") -> Verdict:
    assert task.evaluator is not None
    work = await place.create_work(
        commands, runtime=task.runtime.model_dump(), evaluator=task.evaluator.model_dump(), task_id=task.task_id
    )
    work.answer = answer
    return await load_evaluator(task.evaluator).evaluate(work)


async def played(place: WorkFactory, task: TaskRequest, which: str) -> Verdict:
    said = turns(task, which)
    return await graded(place, task, commands(said), said[-1].text)


def test_there_are_ten_tasks_and_three_of_harbors() -> None:
    assert len(read([EXAMPLES / "tasks"])) == len(TASKS) == 10
    assert len(read([EXAMPLES / "harbor"])) == len(HARBOR) == 3
    assert {task.runtime.backend for task in read([EXAMPLES / "harbor"])} == {"docker"}


@pytest.mark.parametrize("name", [*TASKS, *HARBOR])
def test_every_harness_comes_to_an_end(name: str) -> None:
    """mini-swe-agent ends with a command, other harnesses with a turn that has none; both have said the answer."""
    for which in ("right", "wrong"):
        *_, submits, last = turns(task_of(name, "bubblewrap"), which)
        assert submits.shell == "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        assert submits.text == last.text != ""


@pytest.mark.parametrize("name", TASKS)
def test_tasks_name_no_place(name: str) -> None:
    """They run in folders that are elsewhere, too."""
    texts = [(EXAMPLES / "tasks" / f"{name}.toml").read_text()]
    texts += [commands(turns(task_of(name, "local"), which)) for which in ("right", "wrong")]
    assert not [text for text in texts if re.search(r"(?<![\w.])/(workspace|app|home|tmp)\b", text)]


@pytest.mark.parametrize("name", TASKS)
async def test_the_right_turns_earn_one(place: WorkFactory, name: str) -> None:
    assert (await played(place, task_of(name, "local"), "right")).reward == 1


@pytest.mark.parametrize("name", TASKS)
async def test_the_wrong_turns_earn_nothing(place: WorkFactory, name: str) -> None:
    assert (await played(place, task_of(name, "local"), "wrong")).reward == 0


@pytest.mark.parametrize("name", TASKS)
async def test_doing_nothing_earns_nothing(place: WorkFactory, name: str) -> None:
    assert (await graded(place, task_of(name, "local"), "", "I did nothing.")).reward == 0


@pytest.mark.parametrize(
    ("name", "cheat"),
    [
        ("fix-failing-test", "echo 'import os; os._exit(0)' > stats.py"),
        (
            "fix-failing-test",
            "echo 'import sys; sys.exit(0)' > json.py; cp json.py subprocess.py; cp json.py statistics.py",
        ),
        ("fix-failing-test", "mkdir .grader; echo 'pass' > .grader/check.py; chmod 444 .grader/check.py"),
        ("fix-failing-test", "rm -f stats.py; ln -s /bin/true stats.py"),
        ("fix-failing-test", "echo 'import pathlib; exec(pathlib.Path(\".grader/check.py\").read_text())' > stats.py"),
        ("write-script", "echo 'exit 0' > words.sh"),
        ("write-script", "echo 'kill -9 $PPID' > words.sh"),
        ("edit-config", "mkdir .grader; cp app.ini .grader/app.ini"),
        ("edit-config", "mkdir bin; printf '#!/bin/sh\\n' > bin/cmp; chmod +x bin/cmp; ln -sf bin/cmp cmp"),
        ("rename-function", "rm -r records report.py"),
        ("rename-function", "ln -s .grader/expected/report.py x.py; mv x.py report.py"),
        (
            "rename-function",
            "rm -r records report.py; ln -s .grader/expected/records; ln -s .grader/expected/report.py",
        ),
        ("rename-function", "for f in report.py records/*.py; do ln -sf $PWD/.grader/expected/$f $f; done"),
        ("rename-function", "mkdir .grader; echo 'import sys; sys.exit(0)' > .grader/ast.py"),
        ("sort-csv", "ln -s .grader/staff.csv sorted.csv"),
        ("sort-csv", "echo name > staff.csv; cp staff.csv sorted.csv"),
        ("write-regex", "echo '.*' > pattern.txt"),
        ("write-regex", ": > pattern.txt"),
        ("log-to-json", "mkfifo report.json"),
        ("query-database", "ln -s .grader/top.csv top.csv"),
    ],
)
async def test_cheating_earns_nothing(place: WorkFactory, name: str, cheat: str) -> None:
    assert (await graded(place, task_of(name, "local"), cheat)).reward == 0


@pytest.mark.runtimes
@pytest.mark.parametrize("name", [*TASKS, *HARBOR])
async def test_the_same_in_a_sandbox(sandbox: WorkFactory, name: str) -> None:
    task = task_of(name, "bubblewrap")
    assert (await played(sandbox, task, "right")).reward == 1
    assert (await played(sandbox, task, "wrong")).reward == 0
    assert (await graded(sandbox, task, "")).reward == 0


@pytest.mark.runtimes
@pytest.mark.parametrize("name", HARBOR)
async def test_harbors_own_solutions_earn_one(sandbox: WorkFactory, name: str) -> None:
    solution = (EXAMPLES / "harbor" / name / "solution" / "solve.sh").read_text()
    assert (await graded(sandbox, task_of(name, "bubblewrap"), solution)).reward == 1
