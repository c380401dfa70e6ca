"""Cheating agents: each fools a naive grader, and none earns more than an honest failure here.

Those that are known to get through are listed with the others, as failures that are expected, and say why.
"""

import asyncio
import http.server
import secrets
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polar.config import load
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.plugins import load as load_plugin
from polar.records.task import TaskRequest
from polar.runtimes.base import Limits, RuntimeBackend, RuntimeSpec
from tests.attack.cheats import CHEATS, CHECK, HONEST_FAILURE, HONEST_WORK, SCORED, WORKSPACE, Cheat, Scene, own_tests
from tests.attack.cheats_of_tests import (
    BOUNDARY_CHEATS,
    HARBOR,
    HARBOR_CHEATS,
    NEW_TEST,
    PYTEST,
    PYTEST_WORKSPACE,
    TEST_PATCH,
    TESTS_CHEATS,
    pytest_in_a_file,
)

pytestmark = pytest.mark.runtimes

ALL = [*CHEATS, *TESTS_CHEATS, *HARBOR_CHEATS]
GRADERS = (
    *("check", "scored", "tests", "all_tests", "pytest", "all_pytest", "junit", "swebench", "harbor"),
    *("isolated_tests", "isolated_pytest"),
)
HONEST = [
    Cheat(f"honest {what}, {grader}", script, own_tests, grader)
    for grader in GRADERS
    for what, script in (("work", HONEST_WORK), ("failure", HONEST_FAILURE))
]
WITH_PYTEST = ("pytest", "all_pytest", "junit", "swebench", "isolated_pytest")
ADD = "tests/test_calc.py::test_add"


class World:
    """What is on the machine besides: a secret file, a server that tells it, and another session with it for a key."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret.txt"
        self.secret.write_text(secrets.token_hex(8) + "\n")
        self.pytest = folder / "pytest.zip"
        pytest_in_a_file(self.pytest)
        self.harbor = folder / "harbor"
        self.harbor.mkdir()
        for name, content in HARBOR.items():
            (self.harbor / name).write_text(content)
        text = self.secret.read_bytes()

        class Tells(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Tells)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.other = subprocess.Popen(
            ["sleep", "600"], env={"OTHER_KEY": text.decode().strip(), "PATH": "/usr/bin:/bin"}
        )

    def script(self, cheat: Cheat) -> str:
        return cheat.script.replace("SECRET", str(self.secret)).replace("PORT", str(self.server.server_port))

    def files(self, cheat: Cheat) -> dict[str, str]:
        """Of the workspace. The tests of a grader that has its own are not there."""
        if cheat.grader in WITH_PYTEST:
            return {"calc.py": WORKSPACE["calc.py"], **PYTEST_WORKSPACE}
        hidden = cheat.grader in ("scored", "harbor")
        return {path: text for path, text in WORKSPACE.items() if not (hidden and path.startswith("tests/"))}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.other.kill()
        self.other.wait()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    try:
        yield made
    finally:
        made.close()


def evaluator(cheat: Cheat, world: World) -> dict[str, Any]:
    script = SCORED if cheat.grader == "scored" else CHECK
    run = {
        "command": "python3 -I /grader/check.py",
        "files": [{"type": "upload_file", "content": script, "target": "/grader/check.py"}],
        "timeout_seconds": 5,
    }
    secret = world.secret.read_text().strip()
    answer = {"file": "answer.txt", "match": "exact"}
    unittest = {"command": "python3 -m unittest -q tests.test_calc", "timeout_seconds": 20}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "check": ("command", run),
        "scored": ("command", run | {"reward_file": "/grader/reward"}),
        "answer": ("answer", answer | {"expected": secret}),
        "choice": ("answer", answer | {"expected": secret[:2]}),
        "tests": ("tests", unittest | {"must_pass": ["tests.test_calc.AddTest.test_add"]}),
        "all_tests": ("tests", unittest),
        "pytest": ("tests", {"must_pass": [ADD], "timeout_seconds": 20}),
        "all_pytest": ("tests", {"timeout_seconds": 20}),
        "isolated_tests": (
            "tests",
            unittest | {"must_pass": ["tests.test_calc.AddTest.test_add"], "isolate": True},
        ),
        "isolated_pytest": ("tests", {"must_pass": [ADD], "timeout_seconds": 20, "isolate": True}),
        "junit": (
            "tests",
            {
                "command": "python3 -m pytest --junitxml=results.xml",
                "results": "junit",
                "result_files": ["results.xml"],
                "must_pass": ["tests.test_calc::test_add"],
            },
        ),
        "swebench": (
            "swebench",
            {"instance_id": "calc-1", "test_patch": TEST_PATCH, "FAIL_TO_PASS": [ADD, f"{NEW_TEST}::test_more"]},
        ),
        "harbor": ("harbor", {"tests": str(world.harbor), "timeout_seconds": 20}),
    }
    strategy, config = configs[cheat.grader]
    return {"strategy": strategy, "config": config}


def task(cheat: Cheat, world: World) -> TaskRequest:
    steps: list[dict[str, Any]] = [
        {"type": "upload_file", "content": text, "target": path} for path, text in world.files(cheat).items()
    ]
    if cheat.grader in WITH_PYTEST:
        steps.append({"type": "upload_file", "source": str(world.pytest), "target": PYTEST})
    return TaskRequest.model_validate(
        {
            "task_id": cheat.name,
            "instruction": "Make calc.py print the sum.",
            "timeout_seconds": 60,
            "runtime": {
                "memory_mb": 256,
                "processes": 64,
                "prepare": steps,
                "env": {"PYTHONPATH": PYTEST} if cheat.grader in WITH_PYTEST else {},
            },
            "agent": {"harness": "shell", "custom_shell": {"command": world.script(cheat)}},
            "evaluator": evaluator(cheat, world),
        }
    )


async def run_all(data: Path, tasks: list[TaskRequest]) -> dict[str, FinishedSession]:
    async with LocalRollout(load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}}), data) as rollout:
        plans = await rollout.plan(tasks)
        return {finished.task_id: finished async for finished in rollout.run(plans)}


@pytest.fixture(scope="module")
def graded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, world: World
) -> dict[str, FinishedSession]:
    """Every agent that is asked for, through one node: they are there at the same time, as in a real run."""
    asked = [item.callspec.params.get("cheat") for item in request.session.items if hasattr(item, "callspec")]
    tasks = [task(cheat, world) for cheat in asked if isinstance(cheat, Cheat)]
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run_all(tmp_path_factory.mktemp("node") / "data", tasks)).result()


@pytest.mark.parametrize("cheat", HONEST, ids=lambda cheat: cheat.name)
def test_honest_work_is_paid_and_an_honest_failure_is_not(graded: dict[str, FinishedSession], cheat: Cheat) -> None:
    finished = graded[cheat.name]
    assert finished.verdict.reward == float(cheat.script == HONEST_WORK), (finished.error, finished.verdict)


def shown(cheat: Cheat) -> Any:
    marks = [] if cheat.known is None else [pytest.mark.xfail(strict=True, reason=cheat.known)]
    return pytest.param(cheat, id=cheat.name, marks=marks)


@pytest.mark.parametrize("cheat", [shown(cheat) for cheat in ALL])
async def test_a_cheat_fools_a_naive_grader_and_not_ours(
    tmp_path: Path, world: World, graded: dict[str, FinishedSession], cheat: Cheat
) -> None:
    fooled = await naive(tmp_path, world, cheat)
    if fooled is not None and fooled != 1:
        pytest.fail(f"It does not even fool a naive grader: {fooled}.")
    finished = graded[cheat.name]
    if finished.verdict.reason is not None:
        pytest.fail(f"It is excused: {finished.verdict.reason} ({finished.error}).")
    assert finished.verdict.reward == 0


@pytest.mark.parametrize("cheat", BOUNDARY_CHEATS, ids=lambda cheat: cheat.name)
def test_code_under_test_does_not_leave_its_process(graded: dict[str, FinishedSession], cheat: Cheat) -> None:
    verdict = graded[cheat.name].verdict
    assert (verdict.reward, verdict.reason) == (0, None)
    assert any(found.proven for found in verdict.evidence) == (cheat.name == "isolated: forged messages")


async def naive(folder: Path, world: World, cheat: Cheat) -> float | None:
    """The cheat runs, and a naive grader judges it in the same place."""
    kind: RuntimeBackend = load_plugin("runtimes", cheat.backend)(folder / "state", "http://127.0.0.1:9")
    try:
        runtime = await kind.create(f"n{secrets.token_hex(6)}", RuntimeSpec(limits=Limits(processes=64)))
        await runtime.start()
        files = world.files(cheat) if cheat.grader in WITH_PYTEST else WORKSPACE
        for path, text in files.items():
            await runtime.put(text.encode(), f"/workspace/{path}")
        if cheat.grader in WITH_PYTEST:
            await runtime.put(world.pytest, PYTEST)
        await runtime.run(["sh", "-c", world.script(cheat)], timeout=30)
        return await cheat.naive(Scene(runtime, folder, world.secret))
    finally:
        await kind.close()
