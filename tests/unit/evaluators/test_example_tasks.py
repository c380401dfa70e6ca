"""The graders of examples/tasks that run what the agent wrote: over a process boundary, cheats earn nothing."""

import tomllib
from pathlib import Path

import pytest

from polar.plugins import load
from polar.tasks.reader import read
from polar.testing.grading import WorkFactory

EXAMPLES = Path(__file__).parents[3] / "examples"
PLAYS = tomllib.loads((EXAMPLES / "plays/right.toml").read_text())["plays"]
RUN_BY_THEIR_GRADER = ["fix-failing-test", "fix-shell-script", "write-script"]

EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def mean(values): return Equal(0)
median = spread = mean
"""
TRACED = "import sys\nsys.settrace(lambda *_: None)\n" + EQUAL.replace("Equal(0)", "0")
LEAVES = "import os\nos._exit(0)\n"
FORGED = "import atexit\natexit.register(print, '[]')\n" + EQUAL
KILLS = "import os\nos.kill(os.getppid(), 9)\n"
SEARCHES = (
    """
import gc, json
for found in gc.get_objects():
    if isinstance(found, list) and found and isinstance(found[0], list):
        print(json.dumps(found))
"""
    + EQUAL
)
PYTHON_CHEATS = {
    "equal to everything": EQUAL,
    "traces": TRACED,
    "leaves with success": LEAVES,
    "forged output": FORGED,
    "kills its grader": KILLS,
    "searches its memory": SEARCHES,
}


async def reward(place: WorkFactory, name: str, agent: str) -> float | None:
    (task,) = read([EXAMPLES / "tasks" / f"{name}.toml"], backend="local")
    assert task.evaluator is not None
    prepare = [step.model_dump(mode="json") for step in task.runtime.prepare]
    work = await place.create_work(agent, runtime={"prepare": prepare})
    return (await load("evaluators", task.evaluator.strategy)(task.evaluator.config).evaluate(work)).reward


def solution(name: str) -> str:
    return "\n".join(turn["shell"] for turn in PLAYS[name]["turns"] if "shell" in turn)


@pytest.mark.parametrize("name", RUN_BY_THEIR_GRADER)
async def test_honest_work_is_rewarded(place: WorkFactory, name: str) -> None:
    assert await reward(place, name, solution(name)) == 1


@pytest.mark.parametrize("code", PYTHON_CHEATS.values(), ids=PYTHON_CHEATS)
async def test_a_module_earns_nothing_by_cheating(place: WorkFactory, code: str) -> None:
    assert await reward(place, "fix-failing-test", f"cat > stats.py <<'END'\n{code}\nEND") == 0


@pytest.mark.parametrize(("name", "script"), [("fix-shell-script", "backup.sh"), ("write-script", "words.sh")])
async def test_a_script_earns_nothing_by_cheating(place: WorkFactory, name: str, script: str) -> None:
    for line in ("exit 0", "kill -9 $PPID", "cat .grader/* $PPID"):
        assert await reward(place, name, f"echo '{line}' > {script}") == 0
