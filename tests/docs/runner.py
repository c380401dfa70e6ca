"""Runs the blocks of a page as a reader would: one after the other, in one folder, with what earlier ones exported.

    shell [slow]   by bash; a command with & goes on until the page ends
    python         as a program
    output         lines that the block before printed, in this order and without others between
    file NAME      is written to that file
    settings       a polar.toml that is read          train      a file of `polar train`
    task           fields of a task                    bridge     settings of a bridge
    matrix         settings of `polar matrix`          data       JSON or YAML, which is parsed
    usage          what a command takes: each option that is named is there (as in every other block)
    by TEST        that test runs it

Nothing of a reader's machine is touched: ports are free ones, HOME is a new folder, the engine is scripted.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from polar import config
from polar.bridges.settings import load_settings
from polar.matrix.matrix_run import MatrixSettings
from polar.records.task import TaskRequest
from polar.train.settings import TrainSettings
from tests.docs.blocks import ROOT, Block

PATIENCE_SECONDS = 300
_PORTS = {"8080": "POLAR_SERVER__PORT", "8100": "POLAR_GATEWAY__PORT"}
_SESSION_ID = re.compile(r"\bs[0-9a-f]{20}\b")


class Page:
    """The folder, the variables and the programs of a page whose blocks are run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "home").mkdir()
        self._ports = {port: _find_free_port() for port in _PORTS}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "COLUMNS": "80",
            "TERM": "dumb",
        }
        self._environment |= {name: str(self._ports[port]) for port, name in _PORTS.items()}
        self._groups: list[int] = []
        self._output = ""

    def run(self, block: Block) -> None:
        runners: dict[str, Callable[[Block], None]] = {
            "shell": self._run_shell,
            "python": self._run_python,
            "output": self._compare,
            "file": lambda block: _write(self._folder / block.argument, block.text),
        }
        runners.get(block.kind, read_document)(block)

    def close(self) -> None:
        for group in self._groups:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(group, number)
                except ProcessLookupError:
                    break
                deadline = time.monotonic() + PATIENCE_SECONDS
                while time.monotonic() < deadline and _is_alive(group):
                    time.sleep(0.05)

    def _run_shell(self, block: Block) -> None:
        variables = self._folder / ".variables"
        script = f"set -e\n{self._wait_for_servers(self._with_free_ports(block.text))}\nexport -p > {variables}\n"
        if variables.exists():
            script = f". {variables}\n{script}"
        self._run(block, ["bash", "-c", script])

    def _wait_for_servers(self, text: str) -> str:
        """A reader sees that a server is up before they type the next line."""
        server = f"127.0.0.1/{self._ports['8080']}"
        wait = f"until (exec 3<>/dev/tcp/{server}) 2> /dev/null; do kill -0 $!; sleep 0.1; done"
        return re.sub(r"^(polar up\b[^#\n]*&.*)$", rf"\1\n{wait}", text, flags=re.MULTILINE)

    def _run_python(self, block: Block) -> None:
        _write(self._folder / "block.py", self._with_free_ports(block.text))
        variables = self._folder / ".variables"
        load = f". {variables}; " if variables.exists() else ""
        self._run(block, ["bash", "-c", f"{load}exec python block.py"])

    def _run(self, block: Block, command: list[str]) -> None:
        printed = self._folder / ".printed"
        with printed.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._groups.append(process.pid)
            status = process.wait(PATIENCE_SECONDS)
        self._output = printed.read_text(errors="replace")
        assert status == 0, f"{block} ended with {status}:\n{self._output}"

    def _with_free_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = re.sub(rf"(127\.0\.0\.1|localhost):{port}\b", rf"\1:{free}", text)
        return text

    def _compare(self, block: Block) -> None:
        printed, expected = _normalize(self._output), _normalize(block.text)
        assert any(printed[start : start + len(expected)] == expected for start in range(len(printed))), (
            f"{block} is not what the block before printed:\n{self._output}"
        )


def read_document(block: Block) -> None:
    """Settings and the like, by what Polar reads them with."""
    match block.kind:
        case "settings":
            config.Settings.model_validate(tomllib.loads(block.text))
        case "task":
            TaskRequest.model_validate({"task_id": "t", "instruction": "Do it."} | tomllib.loads(block.text))
        case "train":
            TrainSettings.model_validate(tomllib.loads(block.text))
        case "bridge":
            load_settings(_parse(block))
        case "matrix":
            MatrixSettings.model_validate(tomllib.loads(block.text))
        case "data":
            assert _parse(block) is not None
        case "usage" | "by":
            pass
        case _:
            raise AssertionError(f"{block}: there is no kind {block.kind!r}")


def _parse(block: Block) -> Any:
    return tomllib.loads(block.text) if block.language == "toml" else yaml.safe_load(block.text)


def _normalize(text: str) -> list[str]:
    return [_SESSION_ID.sub("SESSION", line.rstrip()) for line in text.rstrip("\n").splitlines()]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
