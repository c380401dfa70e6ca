"""Rows of SWE-bench's schema as tasks: what an agent is given, what it is graded by, and what it never sees."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

import polar.config
from polar.bridges.settings import BridgeSettings
from polar.cli.tasks import command
from polar.errors import ConfigError
from polar.evaluators import load_evaluator
from polar.records.task import Exec, TaskRequest
from polar.tasks import read, swe_bench
from polar.tasks.swe_bench import SweBenchOptions
from polar.testing.grading import WorkFactory
from polar.train import settings as training
from polar.train.service_process import build_service_settings
from tests.selection import leave_to_slow
from tests.swe import ROOT, UNITTEST, example

made_up = example()
REPO, _, UNITTEST_COMMAND = UNITTEST.partition("=")
INSTANCES = [instance.instance_id for instance in [*made_up.VERIFIED, *made_up.GYM]]
ROW: dict[str, Any] = {
    "instance_id": "Owner__name-1",
    "repo": "owner/name",
    "base_commit": "0123456789abcdef0123456789abcdef01234567",
    "patch": "diff --git a/SOLUTION b/SOLUTION\n",
    "test_patch": "diff --git a/tests/forms/test_a.py b/tests/forms/test_a.py\n--- /dev/null\n"
    "+++ b/tests/forms/test_a.py\n@@ -0,0 +1 @@\n+pass\n",
    "problem_statement": "It is {broken}.",
    "hints_text": "A HINT",
    "created_at": "2025-01-01T00:00:00Z",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/forms/test_a.py::test_a"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "0123456789abcdef0123456789abcdef01234567",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made-up")


@pytest.fixture(scope="module")
def patches(folder: Path) -> dict[str, Any]:
    """The repositories and rows are there as well."""
    return {one.instance.instance_id: one for one in made_up.write_rows(folder)}


@pytest.fixture(scope="module")
def tasks(folder: Path, patches: dict[str, Any]) -> dict[str, TaskRequest]:
    rows = [row for name in ("verified", "gym") for row in swe_bench.read_rows(folder / f"{name}.jsonl")]
    options = SweBenchOptions(
        repositories=folder / "repositories",
        backend="local",
        python=sys.executable,
        commands={REPO: UNITTEST_COMMAND},
    )
    return {task.task_id: task for task in swe_bench.make_tasks(rows, options).tasks}


def made(row: dict[str, Any] | None = None, **options: Any) -> TaskRequest:
    (task,) = swe_bench.make_tasks([("rows: row 1", ROW | (row or {}))], SweBenchOptions(**options)).tasks
    return task


@pytest.mark.parametrize("name", leave_to_slow(INSTANCES, but=list(INSTANCES)[::4]))
async def test_patches_earn_what_they_should(
    place: WorkFactory, tasks: dict[str, TaskRequest], patches: dict[str, Any], name: str
) -> None:
    task = tasks[name]
    assert task.evaluator is not None
    for patch, reward in ((patches[name].right, 1.0), (patches[name].wrong, 0.0)):
        work = await place.create_work(
            f"git apply - <<'END'\n{patch}END",
            runtime=task.runtime.model_dump(),
            evaluator=task.evaluator.model_dump(),
        )
        verdict = await load_evaluator(task.evaluator).evaluate(work)
        assert verdict.reward == reward, (verdict.detail, (work.logs / "swebench.log").read_text())


def test_the_history_ends_at_the_base_commit(
    folder: Path, tasks: dict[str, TaskRequest], patches: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever leads to later commits in a clone: branches, tags, remotes, stashes, what was checked out."""
    task = tasks["made-up__slugs-12"]
    clone, work = folder / "repositories" / "made-up__slugs", tmp_path / "work"
    shutil.copytree(clone, work)
    later = made_up.git(work, "rev-parse", "HEAD").strip()
    for words in (
        ("tag", "v2"),
        ("branch", "release"),
        ("remote", "add", "origin", str(clone)),
        ("fetch", "-q", "origin"),
        ("pack-refs", "--all"),
    ):
        made_up.git(work, *words)
    (work / "left-over.pyc").write_text("")
    for step in task.runtime.prepare:
        if isinstance(step, Exec):
            assert isinstance(step.command, str)
            subprocess.run(["sh", "-c", step.command], cwd=work, env=os.environ | step.env, check=True)
    base = task.metadata["base_commit"]
    assert made_up.git(work, "rev-parse", "HEAD").strip() == base
    assert made_up.git(work, "log", "--all", "--format=%s").split("\n") == ["The beginning", ""]
    assert made_up.git(work, "status", "--porcelain", "--ignored") == ""
    known = made_up.git(work, "cat-file", "--batch-all-objects", "--batch-check")
    assert base in known
    assert later not in known
    assert patches["made-up__slugs-12"].right not in made_up.git(work, "log", "-p", "--all")


def test_the_agent_is_told_the_issue_alone() -> None:
    task = made()
    assert "It is {broken}." in task.instruction
    whole = task.model_dump_json()
    assert "SOLUTION" not in whole
    assert "A HINT" not in whole
    assert "test_a" not in task.instruction + task.runtime.model_dump_json()
    assert made(instruction="Fix: {problem_statement}").instruction == "Fix: It is {broken}."


def test_images_are_called_as_the_sets_do() -> None:
    assert made().runtime.image == "swebench/sweb.eval.x86_64.owner_1776_name-1:latest"
    assert (
        made(image=swe_bench.IMAGE_TEMPLATES["swe-gym"]).runtime.image
        == "xingyaoww/sweb.eval.x86_64.owner_s_name-1:latest"
    )
    assert made({"docker_image": "a/b:c"}, image="{docker_image}").runtime.image == "a/b:c"
    with pytest.raises(ConfigError, match=r"row 1: The image '\{other\}' names a field that the row hasn't: 'other'"):
        made(image="{other}")
    assert made().runtime.workdir == "/testbed"


def test_how_tests_are_run() -> None:
    def words(task: TaskRequest) -> list[str]:
        assert task.evaluator is not None
        found: list[str] = task.evaluator.config["test_command"]
        return found

    python = "/opt/miniconda3/envs/testbed/bin/python"
    assert words(made()) == [python, "-m", "pytest", "{files}"]
    assert words(made({"repo": "django/django"}))[1:] == [
        "tests/runtests.py",
        "--verbosity",
        "2",
        "--parallel",
        "1",
        "forms.test_a",
    ]
    given = made(python="python3.9", commands={"owner/name": "{python} -m pytest -p no:randomly {files}"})
    assert words(given) == ["python3.9", "-m", "pytest", "-p", "no:randomly", "{files}"]


def test_a_pytest_of_its_own(tmp_path: Path) -> None:
    """For images that have none; the agent doesn't get it."""
    task = made(pytest=tmp_path)
    (step,) = task.runtime.eval_prepare
    assert task.evaluator is not None
    assert step.model_dump()["target"] == task.evaluator.env["PYTHONPATH"]
    assert task.runtime.prepare == made().runtime.prepare


def test_parquet_is_read_as_json_is(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"instance_id": "owner__name-2", "FAIL_TO_PASS": '["tests/forms/test_a.py::test_b"]'}]
    listed = [row | {"FAIL_TO_PASS": json.loads(row["FAIL_TO_PASS"]), "PASS_TO_PASS": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "text.parquet")
    pq.write_table(pa.Table.from_pylist(listed), tmp_path / "lists.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(listed))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [
        swe_bench.make_tasks(swe_bench.read_rows(tmp_path / name), SweBenchOptions()).tasks
        for name in ("text.parquet", "lists.parquet", "rows.json", "rows.jsonl")
    ]
    assert [len(tasks) for tasks in found] == [2] * 4
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"base_commit": "; rm -rf /"}, "base_commit: "),
        ({"test_patch": None}, "test_patch: "),
        ({"FAIL_TO_PASS": "no JSON"}, "FAIL_TO_PASS: "),
        ({"FAIL_TO_PASS": "[" * 100_000}, "FAIL_TO_PASS: it is nested too deeply"),
    ],
)
def test_a_row_that_is_not_of_the_schema(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"rows: row 1: {said}"):
        made(row)


@pytest.mark.parametrize("image", ["{owner.x}", "{owner[x]}", "{owner", "{0}", "{version!x}"])
def test_an_image_that_can_not_be_filled_in(image: str) -> None:
    with pytest.raises(ConfigError, match=r"row 1: The image '.*' (can't be filled in|names a field)"):
        made(image=image)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "3", "a.json: this is no list of rows"),
        ("a.json", '{"a": {}}', "a.json: this is no list of rows"),
        ("a.json", "[" * 100_000, "a.json: it is nested too deeply"),
        ("a.jsonl", "{}\n" + "[" * 100_000, "a.jsonl: line 2: it is nested too deeply"),
        ("a.jsonl", "{}\n3", "a.jsonl: row 2: this is no table of fields"),
    ],
    ids=range(5),
)
def test_a_file_that_holds_no_rows(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(swe_bench.read_rows(tmp_path / name))


def test_what_can_not_be_graded_is_left_out_and_named() -> None:
    rows = [ROW, ROW | {"instance_id": "a__b-1", "FAIL_TO_PASS": []}, ROW | {"instance_id": "a__b-2", "test_patch": ""}]
    found = swe_bench.make_tasks([(f"row {number}", row) for number, row in enumerate(rows)], SweBenchOptions())
    assert [task.task_id for task in found.tasks] == ["Owner__name-1"]
    assert found.left_out == {"no FAIL_TO_PASS": ["a__b-1"], "no test_patch": ["a__b-2"]}
    with pytest.raises(ConfigError, match="already that of row 0"):
        swe_bench.make_tasks([("row 0", ROW), ("row 1", ROW)], SweBenchOptions())


def test_the_command_writes_what_polar_run_reads(folder: Path, patches: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "tasks.jsonl"
    arguments = [str(folder / "verified.jsonl"), str(folder / "gym.jsonl"), "-o", str(output), "--json"]
    arguments += ["--repositories", str(folder / "repositories"), "--harness", "pi", "--harness", "codex"]
    done = CliRunner().invoke(command, ["swe", *arguments, "--samples", "4", "--turns", "50"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"tasks": 8, "left_out": {}, "output": str(output)}
    tasks = read([output])
    assert {task.task_id for task in tasks} == {
        f"{name}.{harness}" for name in INSTANCES for harness in ("pi", "codex")
    }
    assert {(task.runtime.backend, task.num_samples, task.budget.turns) for task in tasks} == {("bubblewrap", 4, 50)}


def test_a_clone_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no clone of owner/name at .*owner__name: git clone it there"):
        made(repositories=tmp_path)


def test_the_settings_of_the_recipes_are_settings() -> None:
    recipe = ROOT / "examples" / "swe"
    reference = training.load_settings(recipe / "grpo.toml")
    service, _ = build_service_settings(reference, Path("model"))
    assert (service.engine.kind, len(service.engine.urls)) == ("vllm", 7)
    assert polar.config.load(recipe / "slime-service.toml", {}).engine.kind == "sglang"
    bridge = BridgeSettings.model_validate(yaml.safe_load((recipe / "slime.yaml").read_text())["polar"])
    assert bridge.tasks == reference.tasks.train
