"""The dry runs of examples/swe and examples/terminal_bench, through four real harnesses in sandboxes: made-up instances
with the public fields of SWE-bench and SWE-Gym, with right and wrong patches, and Harbor's tasks. pass@1 comes out as
scripted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.run import POLAR, ROOT
from tests.harnesses.test_examples import INSTALLED, available
from tests.swe import UNITTEST, pytest_folder

HARNESSES = ["codex", "claude_code", "qwen_code", "pi"]
SCRIPTED = {"right": 1.0, "mixed": 0.5, "wrong": 0.0}


def run(*command: str | Path, folder: Path) -> str:
    variables = {"POLAR_NODE__HARNESS_CACHE": str(INSTALLED), "POLAR_NODE__RUN_WORKERS": "4"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.harnesses
def test_pass_at_1_comes_out_as_scripted(tmp_path: Path) -> None:
    available("bubblewrap", tmp_path)
    folder = tmp_path / "swe"
    run(sys.executable, ROOT / "examples" / "swe" / "made_up.py", folder, "--harness", *HARNESSES, folder=tmp_path)
    prepare = ["tasks", "swe", "verified.jsonl", "gym.jsonl", "-o", "tasks.jsonl", "--repositories", "repositories"]
    pytest_here = pytest_folder(tmp_path / "pytest")
    run(POLAR, *prepare, "--pytest", pytest_here, "--test-command", UNITTEST, folder=folder)
    matrix: dict[str, Any] = json.loads(run(POLAR, "matrix", "matrix.toml", "--json", folder=folder))
    found = {(cell["model"], cell["harness"]): cell["pass_at_1"] for cell in matrix["cells"]}
    assert found == {(model, harness): rate for model, rate in SCRIPTED.items() for harness in HARNESSES}
    assert {(cell["graded"], cell["asked"]) for cell in matrix["cells"]} == {(4, 4)}
    for model in SCRIPTED:
        run(POLAR, "verify", "--data", folder / "matrix" / model, folder=folder)


@pytest.mark.harnesses
def test_harbor_tasks_over_harnesses(tmp_path: Path) -> None:
    available("bubblewrap", tmp_path)
    lines = [f"tasks = {json.dumps([str(ROOT / 'examples' / 'harbor')])}", f"harnesses = {json.dumps(HARNESSES)}"]
    lines += ['backend = "bubblewrap"']
    for model in ("right", "wrong"):
        play = json.dumps(str(ROOT / "examples" / "plays" / f"{model}.toml"))
        lines += [f"[models.{model}]", 'kind = "scripted"', f"options = {{ play = {play} }}"]
    (tmp_path / "matrix.toml").write_text("\n".join(lines))
    matrix: dict[str, Any] = json.loads(run(POLAR, "matrix", "matrix.toml", "--json", folder=tmp_path))
    found = {(cell["model"], cell["harness"]): cell["pass_at_1"] for cell in matrix["cells"]}
    assert found == {(model, harness): SCRIPTED[model] for model in ("right", "wrong") for harness in HARNESSES}
