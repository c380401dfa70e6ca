"""polar run, as its users run it: real sandboxes of the kind `local`, a real gateway, the scripted engine."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import polar as package
from polar.errors import ConfigError
from polar.harnesses.cache import Marker, seal
from polar.records.result import SessionResult
from polar.records.task import TaskRequest
from tests.integration.test_cli import AGENT, POLAR, polar
from tests.selection import leave_to_slow

ASK = f"{sys.executable} agent.py && echo hello > out.txt"


def task(command: str = ASK, **changes: Any) -> dict[str, Any]:
    known = {
        "instruction": "Write hello into out.txt.",
        "runtime": {
            "backend": "local",
            "prepare": [{"type": "upload_file", "content": AGENT, "target": "agent.py"}],
        },
        "agent": {"harness": "shell", "custom_shell": {"command": command}},
        "evaluator": {"strategy": "command", "config": {"command": "grep -q hello out.txt"}},
    }
    return known | changes


def write(folder: Path, **tasks: dict[str, Any]) -> None:
    for name, fields in tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))


def left(folder: Path) -> list[Path]:
    """What is on disk of runtimes and of sessions that run."""
    return [path for below in ("runtimes", "node") for path in (folder / ".polar" / below).glob("*/*")]


def test_a_summary_of_tasks_and_what_each_session_left(tmp_path: Path) -> None:
    write(tmp_path, good=task(), bad=task(f"{sys.executable} agent.py; exit 3", num_samples=2))
    done = polar("run", "good.json", "bad.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr  # a failed attempt is a reward of 0, and nobody's fault
    rows = {
        cells[0]: cells[1:4]
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) > 4
    }
    assert rows == {"good": ["1", "1", "1/1"], "bad": ["2", "0", "0/2"]}
    assert "3 sessions in" in done.stdout
    assert "mean reward 0.333, 1 of 3 solved" in done.stdout
    assert "the scripted engine answered" in done.stdout
    assert "3/3  " in done.stderr
    assert "good #0: reward 1, 1 turn" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "--data" not in done.stdout  # it is the usual one
    shown = done.stdout.split("polar show ")[1].split()[0]
    folder = tmp_path / ".polar" / "sessions" / shown
    assert {path.name for path in folder.iterdir()} >= {"agent.log", "verdict.json", "timing.json", "workspace.diff"}
    assert left(tmp_path) == []


def test_show_tells_the_verdict_and_the_seconds(tmp_path: Path) -> None:
    write(tmp_path, good=task())
    assert polar("run", "good.json", folder=tmp_path).returncode == 0
    said = polar("show", folder=tmp_path).stdout
    assert "task good, sample 0: reward 1" in said
    assert "the harness ended with 0 after" in said
    assert "seconds: queued" in said
    assert "workspace.diff" in said
    whole = json.loads(polar("show", "--json", folder=tmp_path).stdout)
    assert (whole["verdict"]["reward"], whole["verdict"]["turns"]) == (1.0, 1)
    assert set(whole["timing"]["seconds"]) >= {"init", "run", "postrun"}


def test_json_is_a_result_a_line_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, good=task(num_samples=3), bad=task("exit 0"))
    done = polar("run", "--json", ".", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    results = [SessionResult.model_validate_json(line) for line in done.stdout.splitlines()]
    assert sorted((one.task_id, one.metadata["sample"]) for one in results) == [
        ("bad", 0),
        ("good", 0),
        ("good", 1),
        ("good", 2),
    ]
    for one in results:
        assert one.status == "COMPLETED"
        assert one.trajectory is not None
        rewards = [trace.reward for trace in one.trajectory.traces]
        assert rewards == ([1.0] if one.task_id == "good" else [])
        assert set(one.metadata["timing"]["stages"]) >= {"init", "run", "postrun"}


@pytest.mark.slow
def test_the_command_line_wins_over_the_task(tmp_path: Path) -> None:
    told = task('echo "$OPENAI_MODEL" > /dev/stderr', evaluator=None, timeout_seconds=0.01)
    told["runtime"]["backend"] = "docker"
    write(tmp_path, quick=told)
    options = ("--backend", "local", "--samples", "2", "--model", "some-model", "--timeout", "600", "--workers", "1")
    done = polar("run", "quick.json", *options, "--data", "kept", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    sessions = list((tmp_path / "kept" / "sessions").iterdir())
    assert len(sessions) == 2
    for folder in sessions:
        assert (folder / "agent.log").read_text() == "some-model\n"
        assert json.loads((folder / "verdict.json").read_text())["outcome"]["ended"] == "finished"
    assert "--data kept" in done.stdout


@pytest.mark.slow
def test_a_shorter_time_on_the_command_line_wins_over_the_task(tmp_path: Path) -> None:
    write(tmp_path, slow=task("exec sleep 600", evaluator=None, timeout_seconds=500))
    done = polar("run", "slow.json", "--timeout", "0.3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / ".polar" / "sessions").iterdir()
    assert json.loads((folder / "verdict.json").read_text())["outcome"]["ended"] == "timeout"
    assert "No agent called the gateway" not in done.stdout  # perhaps they were about to


@pytest.mark.slow
def test_agents_that_ask_nothing_and_end_well_are_wondered_at(tmp_path: Path) -> None:
    write(tmp_path, mute=task("true"), broken=task("exit 3"))
    assert "No agent called the gateway" in polar("run", "mute.json", folder=tmp_path).stdout
    assert "No agent called the gateway" not in polar("run", "broken.json", folder=tmp_path).stdout
    write(tmp_path, asks=task())
    assert "No agent called the gateway" not in polar("run", "mute.json", "asks.json", folder=tmp_path).stdout


def test_why_a_reward_is_0_is_said(tmp_path: Path) -> None:
    graded = {"strategy": "command", "config": {"command": "exit 1", "reward_file": "r.txt"}}
    write(tmp_path, zero=task(evaluator=graded))
    done = polar("run", "zero.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero #0: reward 0 (There is no number in r.txt.), 1 turn" in done.stderr
    assert "1 session: There is no number in r.txt." in done.stdout
    shown = polar("show", folder=tmp_path).stdout
    assert "why: There is no number in r.txt." in shown


@pytest.mark.slow
def test_who_chose_a_play_is_not_told_who_answered(tmp_path: Path) -> None:
    (tmp_path / "play.toml").write_text('[[turns]]\ntext = "Hello."\n')
    write(tmp_path, good=task())
    options = json.dumps({"play": "play.toml"})
    done = polar("run", "good.json", folder=tmp_path, POLAR_ENGINE__OPTIONS=options)
    assert done.returncode == 0, done.stderr
    assert "scripted" not in done.stdout


@pytest.mark.slow
def test_another_engine_is_named_on_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, good=task())
    done = polar("run", "good.json", "--engine", "http://127.0.0.1:1", folder=tmp_path)
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    leave_to_slow(
        [
            ((), "Missing argument 'TASK...'"),
            (("nothing.toml",), "nothing.toml: there is no such file or folder"),
            (("broken.toml",), "broken.toml: this is not valid TOML"),
            (("good.json", "misspelt.json"), "misspelt.json: timeout_second: there is no such field"),
            (("good.json", "good.json"), "every task needs its own task_id"),
            (("good.json", "--harness", "nobody"), "no 'nobody'; known: aider"),
            (("good.json", "--harness", "pi@9.9.9"), "polar harness install pi@9.9.9"),
            (("good.json", "--backend", "nowhere"), "no 'nowhere'; known: bubblewrap"),
            (("good.json", "--samples", "0"), "--samples"),
            (("good.json", "--engine", "foo"), "is no address"),
            (("good.json", "--data", "/proc/x"), "--data"),
        ],
        but=[
            (("nothing.toml",), "nothing.toml: there is no such file or folder"),
            (("good.json", "misspelt.json"), "misspelt.json: timeout_second: there is no such field"),
            (("good.json", "--engine", "foo"), "is no address"),
        ],
    ),
)
def test_nothing_runs_before_all_is_in_order(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    write(tmp_path, good=task(), misspelt=task(timeout_second=1))
    (tmp_path / "broken.toml").write_text("instruction = ")
    done = polar("run", *arguments, folder=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".polar" / "sessions").exists()


def test_a_failure_of_the_platform_is_exit_status_1_with_what_to_do(tmp_path: Path) -> None:
    broken = task(num_samples=2)
    broken["runtime"]["prepare"] = [{"type": "exec", "command": "echo no such package; exit 9"}]
    write(tmp_path, good=task(), broken=broken)
    done = polar("run", ".", folder=tmp_path)
    assert done.returncode == 1
    assert "polar: 2 of 3 sessions ended without a reward" in done.stderr
    assert "prepare_failed 2" in done.stderr
    assert "a step of runtime.prepare failed" in done.stderr
    assert "no such package" in done.stderr
    assert "mean reward 1, 1 of 1 solved" in done.stdout  # they don't count as 0
    assert left(tmp_path) == []


def test_a_harness_that_is_not_there_is_said(tmp_path: Path) -> None:
    write(tmp_path, good=task())
    done = polar("run", "good.json", "--harness", "goose", folder=tmp_path, POLAR_NODE__HARNESS_CACHE="empty", PATH="")
    assert done.returncode == 1
    assert "polar harness install goose" in done.stderr


@pytest.mark.slow
def test_a_limit_that_the_task_masks_is_no_failure(tmp_path: Path) -> None:
    write(tmp_path, slow=task("sleep 60", timeout_seconds=0.2, on_timeout="mask"))
    done = polar("run", "slow.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "timeout 1" in done.stdout


def start(folder: Path, **streams: Any) -> "subprocess.Popen[str]":
    """A run of two sessions whose agents go on forever, and don't end when they are asked to."""
    command = f"trap '' TERM INT; sh -c 'trap \"\" TERM; echo $$ > {folder}/$$.pid; exec sleep 600' & wait; wait"
    write(folder, endless=task(command, num_samples=2))
    process = subprocess.Popen([*POLAR, "run", "endless.json"], cwd=folder, text=True, **streams)
    deadline = time.monotonic() + 300
    while len(pids(folder)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("*.pid") if (text := path.read_text().strip())]


def alive(folder: Path) -> list[int]:
    return [pid for pid in pids(folder) if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_cancels_and_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert len(alive(tmp_path)) == 2
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert "sessions are cancelled and torn down" in errors
    assert "2 of 2 sessions were cancelled" in errors
    assert "Traceback" not in errors
    assert output == ""
    assert alive(tmp_path) == []
    assert left(tmp_path) == []
    shown = json.loads(polar("show", "--json", folder=tmp_path).stdout)
    assert (shown["session"]["status"], shown["session"]["reason"]) == ("ended", "cancelled")


@pytest.mark.slow
def test_two_interrupts_leave_at_once_and_the_next_run_tidies_up(tmp_path: Path) -> None:
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    process.communicate(timeout=300)
    assert process.returncode == 130
    write(tmp_path, good=task())
    assert polar("run", "good.json", folder=tmp_path).returncode == 0
    assert alive(tmp_path) == []
    assert left(tmp_path) == []


def test_who_stops_reading_stops_the_run(tmp_path: Path) -> None:
    write(tmp_path, good=task(num_samples=2), slow=task("sleep 600"))
    command = [*POLAR, "run", ".", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(300) == 1
    assert "Traceback" not in errors
    assert left(tmp_path) == []


def test_a_terminal_gets_a_picture_and_is_left_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, good=task(num_samples=2))
    ours, its = pty.openpty()
    command = [*POLAR, "run", "good.json", "--json"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=its, env=environment)
    os.close(its)
    drawn = b""
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # how a terminal ends
            break
        drawn += read
    os.close(ours)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert len([SessionResult.model_validate_json(line) for line in output.splitlines()]) == 2
    assert "━".encode() in drawn
    assert b"of 2 done" in drawn
    assert drawn.count(b"\x1b[?25l") == drawn.count(b"\x1b[?25h") == 1
    assert b"2 sessions in" in drawn.rpartition(b"\x1b[?25h")[2]


def test_doctor_knows_runtimes_and_harnesses(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "pi" / "1.0.0"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "pi").write_text("#!/bin/sh\n")
    (folder / "bin" / "pi").chmod(0o755)
    seal(folder, Marker("pi", "1.0.0", "a-package", "pi", 0))
    variables = {"POLAR_NODE__HARNESS_CACHE": "cache", "POLAR_NODE__RUNTIMES": '["bubblewrap"]', "PATH": "/nowhere"}

    def found() -> dict[str, dict[str, Any]]:
        told = json.loads(polar("doctor", "--json", folder=tmp_path, **variables).stdout)
        return {row["check"]: row for row in told["runtimes"] + told["harnesses"]}

    rows = found()
    assert rows["local"]["seen"] == "works, but is not allowed"
    assert rows["bubblewrap"]["ok"] is False
    assert "install" in rows["bubblewrap"]["follows"]
    assert (rows["pi"]["ok"], rows["pi"]["seen"]) == (True, "installed: 1.0.0")
    assert rows["codex"]["ok"] is False
    assert "polar harness install codex" in rows["codex"]["follows"]
    (folder / "bin" / "pi").write_text("")
    damaged = found()["pi"]
    assert damaged["ok"] is False
    assert "polar harness install pi@1.0.0" in damaged["follows"]


# From Python


def test_run_from_python_takes_files_fields_and_requests(tmp_path: Path) -> None:
    write(tmp_path, file=task())
    fields = task("exit 0") | {"task_id": "fields"}
    request = TaskRequest.model_validate(task() | {"task_id": "request"})
    results = package.run([str(tmp_path / "file.json"), fields, request], samples=2, data=tmp_path / "data")
    assert [(one.task_id, one.metadata["sample"]) for one in results] == [
        ("file", 0),
        ("file", 1),
        ("fields", 0),
        ("fields", 1),
        ("request", 0),
        ("request", 1),
    ]
    assert [len(one.trajectory.traces) for one in results if one.trajectory] == [1, 1, 0, 0, 1, 1]
    assert all(isinstance(one, SessionResult) for one in results)
    assert len(package.run(tmp_path / "file.json", data=tmp_path / "data")) == 1


def test_run_from_python_takes_what_the_command_line_takes(tmp_path: Path) -> None:
    told = task('echo "$OPENAI_MODEL"', evaluator=None, timeout_seconds=0.01)
    told["runtime"]["backend"] = "docker"
    write(tmp_path, file=told)
    tasks = [tmp_path / "file.json", told | {"task_id": "fields"}]
    data = tmp_path / "data"
    results = package.run(tasks, data=data, backend="local", timeout=600, model="some-model")
    assert len(results) == 2
    for one in results:
        folder = data / "sessions" / one.session_id
        assert (folder / "agent.log").read_text() == "some-model\n"
        assert json.loads((folder / "verdict.json").read_text())["outcome"]["ended"] == "finished"
    with pytest.raises(ConfigError, match="image"):
        package.run(tasks, data=data, backend="local", image="debian")


def test_run_from_python_says_what_can_not_be(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with pytest.raises(ConfigError, match="Task x: instruction: it is missing"):
        package.run({"task_id": "x"}, data=data)
    with pytest.raises(ConfigError, match="two tasks 'x'"):
        package.run([task() | {"task_id": "x"}, task() | {"task_id": "x"}], data=data)
    with pytest.raises(ConfigError, match="is no address"):
        package.run(task() | {"task_id": "x"}, engine="foo", data=data)
    assert not data.exists()


async def test_run_from_python_inside_an_event_loop_names_the_way(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"polar\.node\.local\.LocalRollout"):
        package.run(task() | {"task_id": "x"}, data=tmp_path)


def test_importing_the_package_is_light() -> None:
    heavy = {"torch", "aiohttp", "uvicorn", "fastapi", "pydantic", "numpy", "rich", "click"}
    code = f"import sys, polar; print(sorted({heavy!r} & set(sys.modules))); polar.run; polar.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]"
    assert "has no attribute 'nothing'" in done.stderr
