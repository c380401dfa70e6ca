"""examples/plugin, built and installed into an environment of its own, as a third party's package would be."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
CONTRACTS_OF_SECONDS = "TestTemplate or one_evaluator or excuses or same_work"


class Environment:
    """An environment with this one's packages and the example, in whose folder commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "plugin"
        shutil.copytree(EXAMPLE, self.folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        self._python = folder / "venv" / "bin" / "python"
        self._run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "packages.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths))
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
        self._run(sys.executable, "-m", "pip", "--python", str(self._python), "install", *options, str(self.folder))

        polar = folder / "venv" / "bin" / "polar"
        polar.write_text(f"#!{self._python}\nfrom polar.cli.main import main\nmain()\n")
        polar.chmod(0o755)

    def run(self, script: str) -> str:
        """A script of the shell's, in which python and polar are this environment's."""
        return self._run("sh", "-e", "-c", script)

    def _run(self, *command: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        path = {"PATH": f"{self._python.parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=self.folder, env=kept | path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("example"))


def readme_script(word: str) -> str:
    """The README's commands in which that word stands."""
    blocks = re.findall(r"```sh\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    (script,) = [block for block in blocks if word in block]
    return str(script)


def test_its_own_tests_pass(environment: Environment) -> None:
    environment.run(f"{readme_script('pytest').strip()} -p no:xdist -k 'not ({CONTRACTS_OF_SECONDS})'")


@pytest.mark.slow
def test_all_of_its_own_tests_pass(environment: Environment) -> None:
    environment.run(f"{readme_script('pytest').strip()} -p no:xdist")


def test_a_task_with_its_harness_runtime_evaluator_and_exporter(environment: Environment) -> None:
    exported = environment.run(readme_script("polar run"))
    rows = [json.loads(line) for line in exported.splitlines() if line.startswith("{")]
    assert len({row["session_id"] for row in rows}) == len(rows) == 2
    assert [(row["reward"], row["advantage"], row["weight"]) for row in rows] == [(1.0, 0.0, 1.0)] * 2
