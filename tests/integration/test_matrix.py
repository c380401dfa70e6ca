"""polar matrix, as its users run it: real sandboxes of the kind `local`, the scripted engine, an agent of our own; over
the made-up instances of examples/swe."""

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_cli import POLAR
from tests.swe import ROOT, UNITTEST

pytestmark = pytest.mark.slow

# Asks with one tool, a shell, and runs what is called, until nothing is. All but the first agent wait for a file `go`.
AGENT = """
import json, os, pathlib, subprocess, time, urllib.request
folder = pathlib.Path(__file__).parent
try:
    (folder / "first").mkdir()
except FileExistsError:
    while not (folder / "go").exists():
        time.sleep(0.05)
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tool = {"type": "function", "function": {"name": "bash", "parameters": parameters}}
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
while True:
    body = {"model": "m", "messages": messages, "tools": [tool]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        said = json.load(reply)["choices"][0]["message"]
    messages.append(said)
    for call in said.get("tool_calls") or []:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if not said.get("tool_calls"):
        break
"""
SCRIPTED = {"right": 1.0, "mixed": 0.5, "wrong": 0.0}
SESSIONS = 2 * len(SCRIPTED)


def polar(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*POLAR, *arguments], capture_output=True, text=True, cwd=folder, timeout=300, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Made as examples/swe/README.md says, but for the agent."""
    made = [sys.executable, str(ROOT / "examples" / "swe" / "made_up.py"), str(tmp_path / "swe"), "--harness", "shell"]
    subprocess.run(made, check=True, capture_output=True)
    folder = tmp_path / "swe"
    done = polar(
        *("tasks", "swe", "verified.jsonl", "-o", "tasks.jsonl", "--repositories", "repositories"),
        *("--backend", "local", "--python", sys.executable, "--test-command", UNITTEST),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "go").touch()
    agent = {"harness": "shell", "custom_shell": {"command": f"{sys.executable} {tmp_path / 'agent.py'}"}}
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task | {"agent": agent}) + "\n" for task in tasks))
    return folder


def passed(matrix: dict[str, Any]) -> dict[str, float]:
    return {cell["model"]: cell["pass_at_1"] for cell in matrix["cells"]}


def sessions(folder: Path) -> dict[str, float | None]:
    """Rewards of all sessions of all models."""
    found = {}
    for database in (folder / "matrix").glob("*/polar.db"):
        opened = contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True))
        with opened as connection, contextlib.suppress(sqlite3.OperationalError):  # no table yet
            found.update(connection.execute("SELECT session_id, reward FROM sessions").fetchall())
    return found


def graded(folder: Path) -> set[str]:
    return {session for session, reward in sessions(folder).items() if reward is not None}


def test_pass_at_1_comes_out_as_scripted_whatever_is_killed(folder: Path) -> None:
    errors, go = folder / "errors", folder.parent / "go"
    go.unlink()
    with errors.open("wb") as file:
        first = subprocess.Popen([*POLAR, "matrix", "matrix.toml"], cwd=folder, stderr=file)
    try:
        while not graded(folder) and first.poll() is None:
            time.sleep(0.1)
        assert first.poll() is None, errors.read_text()
    finally:
        first.kill()
        first.wait()
    go.touch()
    before = graded(folder)
    assert 0 < len(before) < SESSIONS
    done = polar("matrix", "matrix.toml", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    matrix = json.loads(done.stdout)
    assert passed(matrix) == SCRIPTED
    assert matrix["complete"]
    assert json.loads((folder / "matrix" / "matrix.json").read_text()) == matrix
    after = sessions(folder)
    assert len(graded(folder)) == SESSIONS  # so none of those that had ended was run again
    assert before < graded(folder)
    again = polar("matrix", "matrix.toml", folder=folder)
    assert again.returncode == 0, again.stderr
    assert "50.0% ± 50.0 (1/2)" in again.stdout
    assert sessions(folder) == after


def test_what_the_platform_fails_is_no_result(folder: Path) -> None:
    settings = '[models.gone]\nkind = "vllm"\nurls = ["http://127.0.0.1:9"]\n'
    (folder / "gone.toml").write_text(f'tasks = ["tasks.jsonl"]\nharnesses = ["shell"]\nattempts = 1\n{settings}')
    assert polar("matrix", "gone.toml", folder=folder).returncode == 1
    assert not graded(folder)
    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    tasks[0]["runtime"]["prepare"].append({"type": "exec", "command": "false"})
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks[:2]))
    right = (folder / "matrix.toml").read_text().partition("[models.mixed]")[0]
    (folder / "right.toml").write_text(right)
    done = polar("matrix", "right.toml", "--json", folder=folder)
    assert done.returncode == 1
    assert "right in shell: 1 of 2 sessions without a reward (prepare_failed 1)" in done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["pass_at_1"], cell["graded"], cell["asked"]) == (1.0, 1, 2)
    (folder / "tasks.jsonl").write_text(json.dumps(tasks[1]) + "\n")
    before = len(sessions(folder))
    assert polar("matrix", "right.toml", folder=folder).returncode == 0
    assert len(sessions(folder)) == before
    (folder / "tasks.jsonl").write_text(json.dumps(tasks[1] | {"timeout_seconds": 99}) + "\n")
    assert polar("matrix", "right.toml", folder=folder).returncode == 0
    assert len(sessions(folder)) == before + 1  # it is another task now
