"""Ray clusters of several machines on this one: each is a `ray start` of its own, with all that it starts below it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds, for what takes two on an idle machine

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A token that another cluster of this user's left behind would be asked for by the head, and not sent by others.
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its clients take loopback for this machine's address, too
    # A dead machine is noticed within two seconds rather than fifteen.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Without a head, its clients end after that many seconds rather than sixty.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}


class Machine:
    """One `ray start`."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        variables = os.environ | RAY | {"PYTHONPATH": str(ROOT)}
        if not any(argument.startswith("--head") for argument in arguments):
            del variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # with it, no machine may be added
        ray_start = [sys.executable, "-m", "tests.cluster.ray_start", "start", "--block", f"--node-name={name}"]
        ray_start += ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*ray_start, "--include-log-monitor=false", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=variables,
                start_new_session=True,
            )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE
        while b"Ray runtime started" not in self._log.read_bytes():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)

    @property
    def pids(self) -> set[int]:
        """All its processes."""
        return below(self._process.pid)

    @property
    def actors(self) -> list[int]:
        """Those that are nodes."""
        return [pid for pid in self.pids if b"NodeActor" in command_line(pid)]

    def kill(self) -> None:
        """As if its power was cut: everything at once."""
        pids = self.pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not any(map(alive, pids)))

    def stop(self) -> None:
        if self._process.poll() is not None:
            return
        pids = self.pids
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Machines:
    """A cluster. Use as a context manager; it starts with `names`, the first of which is Ray's head."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._machines: dict[str, Machine] = {}
        # Ray's sockets are in it, and their paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self.address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> "Machines":
        try:
            for name in self._names:
                self.add(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in reversed(self._machines.values()):
            machine.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, name: str, resources: dict[str, float] | None = None) -> Machine:
        arguments = [f"--resources={json.dumps(resources or {})}"]
        if name != self._names[0]:
            arguments.append(f"--address={self.address}")
        else:
            port = self.address.rpartition(":")[2]
            arguments += ["--head", f"--port={port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
            arguments += ["--min-worker-port=0", "--max-worker-port=0"]
        number = len(list(self.folder.glob("*.log")))
        self._machines[name] = Machine(name, arguments, self.folder / f"{number}-{name}.log")
        return self._machines[name]

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]


def below(pid: int) -> set[int]:
    """A process and all those that it, or one of its own, started."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def command_line(pid: int) -> bytes:
    """Empty where there is no such process (any more)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what or "It took too long."
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
