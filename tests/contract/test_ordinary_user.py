"""The suites of sandboxes, run by root as an ordinary user: in a process that gives up all rights first."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.testing import leftovers
from tests.contract import ordinary_user

CONTRACT = "tests/contract/test_bubblewrap.py"
PODMAN = "tests/contract/test_podman.py"
WALLS = "tests/attack/test_sandbox_walls.py"
OWN_USERS = "used_up or another_user"  # what sandboxes that share a user id can't keep
OWN = "tests/unit/runtimes/bubblewrap/test_unprivileged.py"
EXAMPLES = "tests/harnesses/test_examples.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """The user's, which pytest's own, below one of root's, can't be."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user: run the suites themselves")
    folder = Path(tempfile.mkdtemp(prefix="polar-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def run_suite(folder: Path, *arguments: str, options: tuple[str, ...] = (), mark: str = "runtimes") -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, "--basetemp", str(folder / "tmp" / "pytest")]
    secret = secrets.token_hex(8)
    argv = [sys.executable, *words, *arguments]
    ran = subprocess.run(
        ordinary_user.command(folder, argv, *options),
        env=os.environ | {"POLAR_TEST_RUN": secret},
        capture_output=True,
        text=True,
    )
    for file in (folder / "run").rglob("pause.pid"):  # podman's own, which keeps its user namespace
        os.kill(int(file.read_text()), signal.SIGKILL)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    assert leftovers.list_processes(secret, children=False) == []


@pytest.mark.runtimes
def test_the_contract_with_delegated_cgroups(folder: Path) -> None:
    run_suite(folder, CONTRACT, "tests/unit/runtimes/bubblewrap/test_backend.py", OWN, options=("--groups",))


@pytest.mark.runtimes
def test_what_cgroups_are_for_without_them(folder: Path) -> None:
    run_suite(folder, CONTRACT, "-k", "time_out or cancelled or stop or killed or outlives or restarted or many")


@pytest.mark.runtimes
def test_the_walls_but_those_of_user_ids(folder: Path) -> None:
    run_suite(folder, WALLS, "-k", f"not ({OWN_USERS})", options=("--groups",))


@pytest.mark.containers
def test_the_contract_of_podman(folder: Path) -> None:
    run_suite(folder, PODMAN, options=("--ids",), mark="containers")


@pytest.mark.harnesses
@pytest.mark.parametrize("harness", ["pi", "codex", "claude_code"])
def test_harnesses_solve_the_examples(folder: Path, harness: str) -> None:
    run_suite(folder, EXAMPLES, "-k", f"bubblewrap and {harness}", mark="harnesses")
