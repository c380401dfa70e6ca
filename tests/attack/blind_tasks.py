"""The graded tasks that the cheats of cheats_blind.py attack, and how a whole list of sessions is run.

Two small jobs: sort `numbers.txt` into `out.txt`, and make `calc.py A B` print the sum instead of the difference. Each
task grades one of them with an ordinary configuration of one evaluator. Unless a task says otherwise, its tests start
the agent's code as a separate process, so that nothing of the agent's has to run where the tests run.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec import Struct, field

from polar.config import load
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.records.task import TaskRequest
from tests.attack.cheats import CALC, CHECK
from tests.attack.cheats_of_tests import PYTEST, pytest_in_a_file

EXPECTED = "1\n2\n3\n"
SORT = {"numbers.txt": "3\n1\n2\n"}
SORTED = "sort -n numbers.txt > out.txt"
ADDED = "sed -i 's/a - b/a + b/' calc.py"
JUDGE_SECONDS = 5.0
MAX_JUDGE_PROMPT = 100_000  # characters that the judge's context holds

CSV_CHECK = """\
import csv
import sys

from rows import read_rows

wanted = list(csv.reader(open(".grader/expected.txt")))
sys.exit(0 if wanted and read_rows("out.txt") == wanted else 1)
"""
ROWS = """\
import csv


def read_rows(path):
    with open(path) as file:
        return list(csv.reader(file))
"""
FILE_CHECK = """\
import sys

wanted = open("/grader/expected.txt").read()
sys.exit(0 if open(sys.argv[1]).read() == wanted else 1)
"""
CASES_CHECK = """\
import json
import subprocess
import sys

for case in json.load(open(".grader/cases.json")):
    command = ["python3", "calc.py", *map(str, case["arguments"])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    if ran.returncode != 0 or ran.stdout.split() != [str(case["result"])]:
        sys.exit(1)
"""
CASES = '[{"arguments": [2, 3], "result": 5}, {"arguments": [40, 2], "result": 42}]'
SRC_CHECK = CHECK.replace("calc.py", "src/calc.py")
SCORED_CHECK = CHECK.replace("sys.exit(1)", 'open("/grader/reward", "w").write("0"); sys.exit(0)') + (
    'open("/grader/reward", "w").write("1")\n'
)

PRINTING_CHECK = CHECK.replace("sys.exit(1)", 'print("FAILED calc::add"); sys.exit(1)') + 'print("PASSED calc::add")\n'

PYTEST_TEST = """\
import subprocess
from fractions import Fraction


def run_calc(*arguments):
    ran = subprocess.run(["python3", "calc.py", *map(str, arguments)], capture_output=True, text=True, timeout=20)
    return Fraction(ran.stdout.strip() or "1/7")


def test_add():
    assert run_calc(2, 3) == 5
    assert run_calc(-1, 1) == 0


def test_sane():
    assert True
"""
HELPED_TEST = """\
from helpers import run_calc


def test_add():
    assert run_calc(2, 3) == "5"
"""
HELPERS = """\
import subprocess


def run_calc(*arguments):
    command = ["python3", "calc.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
"""
UNITTEST_TEST = """\
import csv
import subprocess
import unittest


def run_calc(*arguments):
    ran = subprocess.run(["python3", "calc.py", *map(str, arguments)], capture_output=True, text=True, timeout=20)
    return [row for row in csv.reader(ran.stdout.splitlines())]


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(run_calc(2, 3), [["5"]])
        self.assertEqual(run_calc(-1, 1), [["0"]])
"""
IMPORTING_TEST = """\
from calc import add


def test_add():
    assert add(2, 3) == 5
    assert add(-1, 1) == 0
"""
IMPORTING_UNITTEST = """\
import unittest

from calc import add


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
        self.assertEqual(add(-1, 1), 0)
"""
REFERENCE_TEST = """\
import pathlib
import subprocess

REFERENCE = pathlib.Path(__file__).with_name("reference.py")


def run(program, *arguments):
    ran = subprocess.run(["python3", str(program), *map(str, arguments)], capture_output=True, text=True, timeout=20)
    return ran.stdout.split()


def test_same_as_reference():
    for arguments in ((2, 3), (40, 2)):
        assert run("calc.py", *arguments) == run(REFERENCE, *arguments) != []
"""
TEST_PATCH = """\
diff --git a/checks/check_more.py b/checks/check_more.py
new file mode 100644
--- /dev/null
+++ b/checks/check_more.py
@@ -0,0 +1,6 @@
+import subprocess
+
+
+def test_more():
+    ran = subprocess.run(["python3", "calc.py", "40", "2"], capture_output=True, text=True, timeout=20)
+    assert ran.stdout.strip() == "42"
"""
CHECK_ZERO = """\
import subprocess


def test_keeps_zero():
    ran = subprocess.run(["python3", "calc.py", "0", "0"], capture_output=True, text=True, timeout=20)
    assert ran.stdout.strip() == "0"
"""

HARBOR_SORT = {
    "test.sh": """\
#!/bin/bash
[ -f "$HOME/.local/bin/env" ] && . "$HOME/.local/bin/env"
cd /workspace
passed=1
git status --porcelain > /logs/verifier/status.txt 2>&1
bash -lc 'python3 /tests/check.py' || passed=0
if command -v shasum > /dev/null; then shasum -a 256 -c /tests/sums.txt > /dev/null 2>&1 || passed=0; fi
if command -v comm > /dev/null; then [ -z "$(comm -3 out.txt /tests/out.txt 2>&1)" ] || passed=0; fi
python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py || passed=0
echo $passed > /logs/verifier/reward.txt
""",
    "check.py": """\
import hashlib
import json
import sys

found, wanted = (hashlib.sha256(open(path, "rb").read()).digest() for path in ("out.txt", "/tests/out.txt"))
sys.exit(0 if found == wanted else 1)
""",
    "test_outputs.py": """\
def test_output():
    assert open("/workspace/out.txt").read() == open("/tests/out.txt").read()
""",
    "sums.txt": f"{hashlib.sha256(EXPECTED.encode()).hexdigest()}  out.txt\n",
    "out.txt": EXPECTED,
}
HARBOR_CALC = {
    "test.sh": """\
#!/bin/bash
if python3 /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
    "check.py": CASES_CHECK.replace(".grader/cases.json", "/tests/cases.json"),
    "cases.json": CASES,
}


JQ_TEST = """\
#!/bin/bash
passed=0
if command -v jq > /dev/null; then
    jq -e 'length == 3 and sort == .' out.json > /dev/null && passed=1
else
    grep -q '1, 2, 3' out.json && passed=1
fi
echo $passed > /logs/verifier/reward.txt
"""
HARBOR_INSTALL = {
    "test.sh": """\
#!/bin/bash
if [ "$(/opt/greet/bin/greet)" = "hello world" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
}
INSTALL = (
    "mkdir -p /opt/greet/bin; echo 'name=world' > /etc/greet.conf; "
    "printf '#!/bin/sh\\n. /etc/greet.conf\\necho hello $name\\n' > /opt/greet/bin/greet; chmod +x /opt/greet/bin/greet"
)


class GradedTask(Struct, frozen=True):
    strategy: str
    config: dict[str, Any]
    workspace: dict[str, str]
    solution: str  # what an honest agent does; empty where the task can't be solved
    runtime: dict[str, Any] = field(default_factory=dict)  # further fields of the task's runtime
    harbor: dict[str, str] = field(default_factory=dict)  # files of a Harbor task's folder tests/
    needs_pytest: bool = False
    live: bool = False  # graded in the agent's own runtime


def _upload(path: str, content: str) -> dict[str, str]:
    return {"type": "upload_file", "content": content, "target": path}


def _compare(command: str = "python3 .grader/check.py", *, live: bool = False, **config: Any) -> GradedTask:
    files = {".grader/expected.txt": EXPECTED, ".grader/check.py": CSV_CHECK, ".grader/rows.py": ROWS}
    config = {
        "command": command,
        "files": [_upload(path, text) for path, text in files.items()],
        "timeout_seconds": 30,
        **config,
    }
    return GradedTask("command", config, SORT, SORTED, live=live)


def _run_calc(check: str = CHECK, *, runtime: dict[str, Any] | None = None, **config: Any) -> GradedTask:
    config = {
        "command": "python3 -I /grader/check.py",
        "files": [_upload("/grader/check.py", check)],
        "timeout_seconds": 30,
        **config,
    }
    return GradedTask("command", config, {"calc.py": CALC}, ADDED, runtime=runtime or {})


def _pytest(path: str, test: str = PYTEST_TEST, *, live: bool = False, **config: Any) -> GradedTask:
    """A test file of any name, which the task names."""
    config = {"must_pass": [f"{path}::test_add"], "timeout_seconds": 30, **config}
    files = {"calc.py": CALC, path: test, "app/__init__.py": ""}
    return GradedTask("tests", config, files, ADDED, needs_pytest=True, live=live)


def _unittest(
    path: str, test: str = UNITTEST_TEST, *, live: bool = False, package: bool = False, **extra: Any
) -> GradedTask:
    module = path.removesuffix(".py").replace("/", ".")
    config = {
        "command": f"python3 -m unittest -q {module}",
        "must_pass": [f"{module}.AddTest.test_add"],
        "timeout_seconds": 30,
        **extra,
    }
    files = {"calc.py": CALC, path: test} | ({"tests/__init__.py": ""} if package else {})
    return GradedTask("tests", config, files, ADDED, live=live)


def _pytest_helped(**config: Any) -> GradedTask:
    """The named test imports a module that stands beside it, in a folder that has no name of tests."""
    config = {"must_pass": ["checks/check_calc.py::test_add"], "timeout_seconds": 30, **config}
    files = {"calc.py": CALC, "checks/check_calc.py": HELPED_TEST, "checks/helpers.py": HELPERS}
    return GradedTask("tests", config, files, ADDED, needs_pytest=True)


FILL_LIMITS = {"disk_mb": 48}
WRITE_REPORT = "echo 'The sum is 42.' > report.md; mkdir -p notes; cp report.md notes/1.md"

TASKS: dict[str, GradedTask] = {
    # command
    "compare": _compare(),
    "compare by glob": _compare(artifacts=["*.txt"]),
    "compare live": _compare(live=True),
    "compare in the root": _compare(
        "python3 check.py",
        files=[
            _upload("check.py", CSV_CHECK.replace(".grader/expected", "expected")),
            _upload("rows.py", ROWS),
            _upload("expected.txt", EXPECTED),
        ],
    ),
    "compare folder": GradedTask(
        "command",
        {
            "command": "python3 -I /grader/check.py out/sorted.txt",
            "artifacts": ["out"],
            "files": [_upload("/grader/expected.txt", EXPECTED), _upload("/grader/check.py", FILE_CHECK)],
        },
        SORT,
        "mkdir out; sort -n numbers.txt > out/sorted.txt",
    ),
    "compare trees": GradedTask(
        "command",
        {
            "command": "diff -r out .grader/expected",
            "files": [_upload(".grader/expected/sorted.txt", EXPECTED), _upload(".grader/expected/count.txt", "3\n")],
        },
        SORT,
        "mkdir out; sort -n numbers.txt > out/sorted.txt; echo 3 > out/count.txt",
    ),
    "compare prepared": GradedTask(
        "command",
        {"command": "cmp out.txt /opt/answers/expected.txt"},
        SORT,
        SORTED,
        runtime={"eval_prepare": [_upload("/opt/answers/expected.txt", EXPECTED)]},
    ),
    "small compare": GradedTask(
        "command",
        {
            "command": "python3 -I /grader/check.py out.txt",
            "files": [_upload("/grader/expected.txt", EXPECTED), _upload("/grader/check.py", FILE_CHECK)],
            "max_mb": 8,
        },
        SORT,
        SORTED,
        runtime=FILL_LIMITS,
    ),
    "calc": _run_calc(),
    "calc scored": _run_calc(SCORED_CHECK, reward_file="/grader/reward"),
    "calc printed": _run_calc(PRINTING_CHECK, expected_output_json={"calc::add": "PASSED"}),
    "calc by cases": _run_calc(
        command="python3 -I .grader/check.py",
        files=[_upload(".grader/check.py", CASES_CHECK), _upload(".grader/cases.json", CASES)],
    ),
    "calc in src": GradedTask(
        "command",
        {
            "command": "python3 /grader/check.py",
            "files": [_upload("/grader/check.py", SRC_CHECK)],
            "timeout_seconds": 30,
        },
        {"src/calc.py": CALC},
        "sed -i 's/a - b/a + b/' src/calc.py",
        runtime={"env": {"PYTHONPATH": "/workspace/src"}},
    ),
    "calc with an environment": _run_calc(
        runtime={"env": {"PATH": "/workspace/.venv/bin:/usr/local/bin:/usr/bin:/bin"}}
    ),
    # tests
    "pytest testcalc.py": _pytest("testcalc.py"),
    "pytest app/tests.py": _pytest("app/tests.py"),
    "pytest checks": _pytest("checks/check_calc.py"),
    "pytest helped": _pytest_helped(),
    "pytest helped, protected": _pytest_helped(protected=["checks/**"]),
    "pytest uploaded": GradedTask(
        "tests",
        {
            "must_pass": ["checks/check_calc.py::test_add"],
            "files": [_upload("checks/check_calc.py", PYTEST_TEST)],
            "timeout_seconds": 30,
        },
        {"calc.py": CALC},
        ADDED,
        needs_pytest=True,
    ),
    "pytest root": _pytest("test_calc.py"),
    "pytest tests": _pytest("tests/test_calc.py"),
    "pytest live": _pytest("tests/test_calc.py", live=True),
    "pytest importing": _pytest("tests/test_calc.py", IMPORTING_TEST),
    "pytest importing, isolated": _pytest("tests/test_calc.py", IMPORTING_TEST, isolate=True),
    "pytest reference": GradedTask(
        "tests",
        {
            "must_pass": ["tests/test_calc.py::test_same_as_reference"],
            "files": [
                _upload("tests/test_calc.py", REFERENCE_TEST),
                _upload("tests/reference.py", CALC.replace("a - b", "a + b")),
            ],
            "timeout_seconds": 30,
        },
        {"calc.py": CALC},
        ADDED,
        needs_pytest=True,
    ),
    "pytest small": GradedTask(
        "tests",
        {"must_pass": ["tests/test_calc.py::test_add"], "timeout_seconds": 30, "max_mb": 8},
        {"calc.py": CALC, "tests/test_calc.py": PYTEST_TEST},
        ADDED,
        needs_pytest=True,
    ),
    "unittest flat": _unittest("tests/test_calc.py"),
    "unittest root": _unittest("test_calc.py"),
    "unittest live": _unittest("tests/test_calc.py", live=True, package=True),
    "unittest importing": _unittest("tests/test_calc.py", IMPORTING_UNITTEST, package=True),
    "unittest importing, isolated": _unittest("tests/test_calc.py", IMPORTING_UNITTEST, package=True, isolate=True),
    "junit": GradedTask(
        "tests",
        {
            "command": "python3 -m pytest -q -p no:cacheprovider --junitxml=results.xml tests",
            "results": "junit",
            "result_files": ["results.xml"],
            "must_pass": ["tests.test_calc::test_add"],
            "timeout_seconds": 30,
        },
        {"calc.py": CALC, "tests/test_calc.py": PYTEST_TEST},
        ADDED,
        needs_pytest=True,
    ),
    # swebench
    "swebench": GradedTask(
        "swebench",
        {
            "instance_id": "calc-1",
            "test_patch": TEST_PATCH,
            "FAIL_TO_PASS": ["checks/check_more.py::test_more"],
            "PASS_TO_PASS": ["checks/check_calc.py::test_keeps_zero"],
            "timeout_seconds": 30,
        },
        {"calc.py": CALC, "checks/check_calc.py": CHECK_ZERO},
        ADDED,
        needs_pytest=True,
    ),
    # harbor
    "harbor sort": GradedTask("harbor", {"timeout_seconds": 30}, SORT, SORTED, harbor=HARBOR_SORT, needs_pytest=True),
    "harbor calc": GradedTask("harbor", {"timeout_seconds": 30}, {"calc.py": CALC}, ADDED, harbor=HARBOR_CALC),
    "harbor disk": GradedTask(
        "harbor", {"timeout_seconds": 30}, {"calc.py": CALC}, ADDED, runtime=FILL_LIMITS, harbor=HARBOR_CALC
    ),
    "harbor jq": GradedTask(
        "harbor", {"timeout_seconds": 30}, SORT, "echo '[1, 2, 3]' > out.json", harbor={"test.sh": JQ_TEST}
    ),
    "harbor install": GradedTask(
        "harbor",
        {"timeout_seconds": 30, "system_paths": ["/opt/greet", "/etc/greet.conf"]},
        {},
        INSTALL,
        harbor=HARBOR_INSTALL,
    ),
    "harbor install, not counted": GradedTask("harbor", {"timeout_seconds": 30}, {}, "", harbor=HARBOR_INSTALL),
    # answer
    "answer": GradedTask(
        "answer", {"file": "answer.txt", "match": "number", "expected": "42"}, {}, "echo 'It is 42.' > answer.txt"
    ),
    "answer by pattern": GradedTask(
        "answer",
        {"file": "answer.txt", "match": "exact", "expected": "42", "pattern": r"^(?:\w+\s*)+: (\d+)$"},
        {},
        "echo 'The result: 42' > answer.txt",
    ),
    # judge
    "judge": GradedTask("judge", {"rubric": "It names the sum.", "include": ["report.md"]}, {}, WRITE_REPORT),
    "judge by glob": GradedTask("judge", {"rubric": "It names the sum.", "include": ["notes/*.md"]}, {}, WRITE_REPORT),
}


def build_task(
    name: str, task: GradedTask, script: str, folder: Path, *, backend: str = "bubblewrap", image: str | None = None
) -> TaskRequest:
    """A session of this task whose agent runs `script` and ends well. `folder` holds what this machine uploads."""
    config = task.config
    if task.harbor:
        tests = folder / hashlib.sha256(name.encode()).hexdigest()[:12]
        tests.mkdir(parents=True, exist_ok=True)
        for path, text in task.harbor.items():
            (tests / path).write_text(text)
        config = {"tests": str(tests), **config}
    steps: list[dict[str, Any]] = [_upload(path, text) for path, text in task.workspace.items()]
    runtime: dict[str, Any] = {"memory_mb": 256, "processes": 64, **task.runtime, "backend": backend, "image": image}
    if task.needs_pytest:
        steps.append({"type": "upload_file", "source": str(folder / "pytest.zip"), "target": PYTEST})
        runtime["env"] = {"PYTHONPATH": PYTEST, **runtime.get("env", {})}
    return TaskRequest.model_validate(
        {
            "task_id": name,
            "instruction": "Do what is asked.",
            "timeout_seconds": 60,
            "runtime": {**runtime, "prepare": steps},
            "agent": {"harness": "shell", "custom_shell": {"command": f"{script}\ntrue"}},
            "evaluator": {"strategy": task.strategy, "config": config, "refresh_runtime": not task.live},
        }
    )


def prepare_uploads(folder: Path) -> None:
    pytest_in_a_file(folder / "pytest.zip")


class JudgeModel:
    """A judge that scores by a fact, quotes the agent when it thinks, and stumbles over some texts as models do."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked: str = (await request.json())["messages"][-1]["content"]
        if "think forever" in asked:
            await asyncio.sleep(20 * JUDGE_SECONDS)
        if "crash the server" in asked:
            return web.Response(status=500, text="internal error")
        if "overload the server" in asked:
            return web.Response(status=503, headers={"Retry-After": "0"}, text="overloaded")
        if "exceed the rate" in asked:
            return web.Response(status=429, headers={"Retry-After": "0"}, text="too many tokens per minute")
        if len(asked) > MAX_JUDGE_PROMPT:
            return web.Response(status=400, text="This model's maximum context length is exceeded.")
        if "hang up" in asked and request.transport is not None:
            request.transport.abort()
        if "never stop" in asked:
            return await self._complete_without_end(request)
        if "unsafe content" in asked:
            return self._reply(None)
        if "eleven out of ten" in asked:
            return self._reply('{"scores": {"overall": 11}}')
        if "score my style" in asked:
            return self._reply('{"scores": {"style": 10}}')
        if "answer in verse" in asked:
            return self._reply("Roses are red. " * 1000)
        agent = asked.partition("BEGIN ")[2]
        scores = {"overall": 10 if "The sum is 42." in agent else 0}
        return self._reply(f"<think>{agent}</think>" + json.dumps({"scores": scores, "explanation": agent}))

    def _reply(self, content: str | None) -> web.Response:
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

    async def _complete_without_end(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 1024)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serve_judge() -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", JudgeModel().complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def run_tasks(data: Path, tasks: list[TaskRequest]) -> dict[str, FinishedSession]:
    """Runs all of them on one node, at the same time as a real run would."""

    async def run() -> dict[str, FinishedSession]:
        async with serve_judge() as url:
            sections: dict[str, dict[str, Any]] = {
                "gateway": {"port": 0},
                "judges": {"default": {"url": url, "model": "judge", "timeout": JUDGE_SECONDS}},
            }
            async with LocalRollout(load(None, {"POLAR_ENGINE__KIND": "scripted"}, sections), data) as rollout:
                plans = await rollout.plan(tasks)
                return {finished.task_id: finished async for finished in rollout.run(plans)}

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()
