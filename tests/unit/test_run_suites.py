"""`make test-all` and `make test-repeat`: what is counted, what is kept, and what is run again."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOL = ROOT / "tools" / "run_suites.py"
JUNIT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><error message="no"/></testcase>
<testcase name="d"><skipped message="no bwrap here"/></testcase>
<testcase name="e"><skipped message="no bwrap here"/></testcase>
</testsuite></testsuites>"""
RUN_TO_END = """
import sys
sys.path.insert(0, sys.argv[1])
import run_suites
run_suites.SUITES = {"test": ("test", lambda: None)}
run_suites.RESULTS = run_suites.Path(sys.argv[2])
run_suites.main(["all"])
"""
START_AND_BE_KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import run_suites
with run_suites.start_busy_loops(2):
    print(*(open(f"/proc/self/task/{os.getpid()}/children").read().split()), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, with a make that writes what each suite's result is to be."""
    specification = importlib.util.spec_from_file_location("run_suites", TOOL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "run_suites", module)
    specification.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"
    make.write_text(
        f"#!/bin/sh\necho $1 >> {tmp_path}/made\n"
        "case $1 in test-slow) echo no network; exit 2;;\n"
        'test-simulation) echo "12 schedules in 1.0 s, 0 with problems";;\n'
        f"*) cp {tmp_path}/junit ${{2#*=--junitxml=}};; esac\n"
    )
    make.chmod(0o755)
    (tmp_path / "junit").write_text(JUNIT)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(module, "find_npm_problem", lambda: None)
    return module


def made(tmp_path: Path) -> list[str]:
    return (tmp_path / "made").read_text().split()


def test_results_are_counted_kept_and_shown(suites: ModuleType, tmp_path: Path) -> None:
    for _ in range(2):
        records = suites.run_all(tmp_path, ["test", "simulation"], again=False)
        assert [(one.passed, one.failed, one.skipped) for one in records] == [(1, 2, {"no bwrap here": 2}), (12, 0, {})]
        assert [one.is_good for one in records] == [False, True]
    assert made(tmp_path) == ["test", "test-simulation"]
    assert "2: no bwrap here" in suites.format_table(records)
    suites.run_all(tmp_path, ["test"], again=True)
    assert made(tmp_path) == ["test", "test-simulation", "test"]


def test_a_suite_that_cant_be_set_up_is_no_success_and_says_why(suites: ModuleType, tmp_path: Path) -> None:
    (record,) = suites.run_all(tmp_path, ["slow"], again=False)
    assert not record.is_good
    assert record.not_run == "make test-slow failed: no network"
    suites.run_all(tmp_path, ["slow"], again=False)
    assert made(tmp_path) == ["test-slow", "test-slow"]


def test_repeated_runs_continue_where_they_were_stopped(suites: ModuleType, tmp_path: Path) -> None:
    suites.run_repeatedly(tmp_path, 2)
    records = suites.run_repeatedly(tmp_path, 3)
    assert [one.suite for one in records] == ["run 0 (idle)", "run 1 (busy)", "run 2 (idle)"]
    assert len(made(tmp_path)) == 3


def test_busy_loops_end_with_the_process_that_started_them() -> None:
    command = [sys.executable, "-c", START_AND_BE_KILLED, str(TOOL.parent)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -9
    assert len(killed.stdout.split()) == 2  # the loops have the pipe as well: its end is theirs


def test_a_suite_ends_with_the_run_that_is_told_to_end(suites: ModuleType, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    make = tmp_path / "bin" / "make"
    make.write_text(f"#!/bin/sh\ntrap 'touch {ended}; exit 1' TERM\ntouch {begun}\nsleep 1000 & wait\n")
    with subprocess.Popen([sys.executable, "-c", RUN_TO_END, str(TOOL.parent), str(tmp_path / "results")]) as running:
        while not begun.exists():
            assert running.poll() is None
            time.sleep(0.01)
        running.terminate()
        assert running.wait(300) == 128 + signal.SIGTERM
    assert ended.exists()
    assert not list((tmp_path / "results").glob("*/test.json"))


def test_every_marked_test_belongs_to_a_target() -> None:
    """A target that named folders would leave out tests that are marked elsewhere."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = sorted(marker.partition(":")[0] for marker in options["markers"])
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^\t\$\(PYTEST\)(.*)$", makefile, re.MULTILINE)
    selected = [re.fullmatch(r"(?: -n \d)?(?: --dist \w+)? -m (\w+)", command) for command in commands]
    assert sorted(match[1] for match in selected if match is not None) == markers
    (others,) = re.findall(r"^OTHER_SUITES := (.*)$", makefile, re.MULTILINE)
    assert sorted(others.split(" or ")) == markers  # what `make test` leaves out
