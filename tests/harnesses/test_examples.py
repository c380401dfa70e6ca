"""The tasks of examples/: real harnesses in each kind of runtime solve them with the right turns, and fail with wrong
ones."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from polar.plugins import load
from polar.records.result import SessionResult
from tests.contract.image import ensure_image
from tests.harnesses.run import POLAR, ROOT

EXAMPLES = ROOT / "examples"
INSTALLED = ROOT / ".cache" / "polar-harnesses"
BACKENDS = [
    pytest.param("local", marks=pytest.mark.harnesses),
    pytest.param("bubblewrap", marks=pytest.mark.harnesses),
    pytest.param("docker", marks=pytest.mark.containers),
    pytest.param("podman", marks=pytest.mark.containers),
]
REWARDS = {"right": 1.0, "wrong": 0.0}


def available(backend: str, tmp_path: Path) -> list[str]:
    """Options of `polar run` for a kind of runtime, which is there."""
    kind = load("runtimes", backend)(tmp_path / "state", "http://127.0.0.1:9")
    if (why := asyncio.run(kind.check_availability())) is not None:
        pytest.skip(f"no {backend} here: {why}")
    image = ["--image", ensure_image(backend)] if backend in ("docker", "podman") else []
    return ["--backend", backend, *image]


def run(tmp_path: Path, play: str, *arguments: str) -> list[dict[str, Any]]:
    """The results that `polar run` prints."""
    variables = {
        "POLAR_ENGINE__KIND": "scripted",
        "POLAR_ENGINE__OPTIONS": json.dumps({"play": str(EXAMPLES / "plays" / f"{play}.toml")}),
        "POLAR_NODE__HARNESS_CACHE": str(INSTALLED),
        "POLAR_NODE__RUN_WORKERS": "4",
    }
    command = [str(POLAR), "run", "--json", "--data", str(tmp_path / "data"), *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("play", REWARDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("harness", ["pi", "codex", "claude_code", "mini_swe_agent"])
def test_ten_tasks(tmp_path: Path, harness: str, backend: str, play: str) -> None:
    options = available(backend, tmp_path)
    results = run(tmp_path, play, str(EXAMPLES / "tasks"), "--harness", harness, *options)
    assert len(results) == 10
    for result in results:
        trajectory = SessionResult.model_validate(result).trajectory
        assert trajectory is not None
        assert trajectory.traces
        assert {trace.reward for trace in trajectory.traces} == {REWARDS[play]}, result["task_id"]
    verified = subprocess.run([str(POLAR), "verify", "--data", str(tmp_path / "data")], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("play", REWARDS)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_three_harbor_tasks(tmp_path: Path, backend: str, play: str) -> None:
    available(backend, tmp_path)
    if backend != "bubblewrap":
        # The Dockerfiles begin with an image that only a registry has: one of ours takes its name.
        subprocess.run([backend, "tag", ensure_image(backend), "docker.io/library/debian:bookworm-slim"], check=True)
    results = run(tmp_path, play, str(EXAMPLES / "harbor"), "--harness", "pi", "--backend", backend)
    assert len(results) == 3
    for result in results:
        assert {trace["reward"] for trace in result["trajectory"]["traces"]} == {REWARDS[play]}, result["task_id"]
