"""Agents that cheat with files (cheats_of_files.py), through a real node: none is rewarded and none excused, while
honest work is paid and nothing is held against it."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polar.config import load
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.plugins import load as load_plugin
from polar.records.task import TaskRequest
from polar.runtimes.base import RuntimeBackend
from tests.attack.cheats_of_files import CHEATS, CHECK, HONEST, JUDGED, KNOWN, UPLOADED, Case
from tests.contract.image import PLAIN, ensure_image

BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.runtimes),
    pytest.param("podman", marks=pytest.mark.containers),
    pytest.param("docker", marks=pytest.mark.containers),
]
_LATE = 1.0  # seconds that a judge may take


def evaluator(case: Case, folder: Path) -> dict[str, Any]:
    """With the tests of a Harbor task in a folder of this machine."""
    made = dict(case.evaluator)
    if made["strategy"] == JUDGED:
        return {"strategy": "judge", "config": {"rubric": "Be right.", "scale": 1, "include": ["report.md"]}}
    if made["strategy"] == "harbor":
        tests = folder / case.name.replace("/", "_")
        tests.mkdir()
        (tests / "test.sh").write_text(made["config"]["tests"])
        (tests / "expected.txt").write_text(KNOWN)
        (tests / "zero").write_text("0")
        made["config"] = made["config"] | {"tests": str(tests)}
    if "files" in made["config"]:
        made["config"] = made["config"] | {"files": [_uploaded(file, folder) for file in made["config"]["files"]]}
    return made


def _uploaded(file: dict[str, str], folder: Path) -> dict[str, str]:
    if file.get("source") != UPLOADED:
        return file
    (folder / "uploaded" / "hidden").mkdir(parents=True, exist_ok=True)
    (folder / "uploaded" / "hidden" / "check.py").write_text(CHECK)
    return file | {"source": str(folder / "uploaded")}


def task(case: Case, backend: str, folder: Path) -> TaskRequest:
    steps = [{"type": "upload_file", "content": text, "target": path} for path, text in case.files.items()]
    runtime = {"backend": backend, **case.runtime, "prepare": [*steps, *case.runtime.get("prepare", [])]}
    if backend != "bubblewrap":
        runtime["image"] = PLAIN
    return TaskRequest.model_validate(
        {
            "task_id": case.name,
            "instruction": "Make add return the sum.",
            "timeout_seconds": 60,
            "runtime": runtime,
            "agent": {"harness": "shell", "custom_shell": {"command": case.script}},
            "evaluator": evaluator(case, folder),
            "suspicious": "keep",
        }
    )


@asynccontextmanager
async def judge() -> AsyncIterator[str]:
    """Breaks, or hangs, over text that says so."""

    async def answer(request: web.Request) -> web.Response:
        asked = json.dumps(await request.json())
        if "HANG" in asked:
            await asyncio.sleep(10 * _LATE)
        if "BREAK" in asked:
            return web.Response(status=500, headers={"Retry-After": "0"})
        scores = {"scores": {"overall": 1}, "explanation": ""}
        return web.json_response({"choices": [{"message": {"content": json.dumps(scores)}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def run_all(data: Path, tasks: list[TaskRequest]) -> dict[str, FinishedSession]:
    async with judge() as url:
        judges = {"default": {"url": url, "model": "judge", "timeout": _LATE}}
        settings = load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}, "judges": judges})
        async with LocalRollout(settings, data) as rollout:
            plans = await rollout.plan(tasks)
            return {finished.task_id: finished async for finished in rollout.run(plans)}


@pytest.fixture(scope="module")
def graded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedSession]:
    """Every agent that is asked for, through one node: they are there at the same time, as in a real run."""
    backend = request.param
    if backend != "bubblewrap":
        kind: RuntimeBackend = load_plugin("runtimes", backend)(tmp_path_factory.mktemp("kind"), "http://127.0.0.1:9")
        if (why := asyncio.run(kind.check_availability())) is not None:
            pytest.skip(f"no {backend} here: {why}")
        ensure_image(backend)
    items = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = [params["case"] for params in items if params.get("graded") == backend]
    folder = tmp_path_factory.mktemp("tests")
    tasks = [task(case, backend, folder) for case in asked if _can_run(case, backend)]
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run_all(tmp_path_factory.mktemp("node") / "data", tasks)).result()


def _can_run(case: Case, backend: str) -> bool:
    """The image of the containers has no perl."""
    return backend == "bubblewrap" or "perl" not in case.name


@pytest.mark.parametrize("graded", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", [*CHEATS, *HONEST], ids=lambda case: case.name)
def test_honest_work_is_paid_and_no_cheat_is(graded: dict[str, FinishedSession], case: Case) -> None:
    if case.name not in graded:
        pytest.skip("there is no perl in the image")
    finished = graded[case.name]
    assert finished.verdict.reason is None, (finished.error, finished.verdict)
    assert finished.verdict.reward == float(case.honest), finished.verdict
    assert not (case.honest and any(one.proven for one in finished.verdict.evidence))
