"""A running container as the machine sees it: its root, its network, its groups, and which of the machine's processes
are its own.

Engines tell the id of a container's first process; everything else follows from that. The root and the mount namespace
are held open, so that the files can still be read, those of volumes too, when every process is dead.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from polar.runtimes.base import SandboxError
from polar.runtimes.cgroups import Cgroup
from polar.runtimes.namespace_worker import NamespaceWorker, NamespaceWorkers
from polar.runtimes.relay import listen_in_namespace

_KILL_HIERARCHIES = ("", "freezer", "pids")  # v2's one hierarchy first: it kills a group at once
_FIRST_PROCESS_TIMEOUT_SECONDS = 5.0
_DEATH_TIMEOUT_SECONDS = 30.0
_KILLING_PAUSE_SECONDS = 0.02
_EXEC_PROCESSES = 24  # threads that the engine has inside for a moment, to start one command

_Result = TypeVar("_Result")


class RunningContainer:
    @classmethod
    async def attach(cls, init_pid: int, container: str, name: str, workers: NamespaceWorkers | None = None) -> Self:
        """`name` is the last argument of the first process, which has it a moment after the engine says that it runs.
        An engine elsewhere, or in another pid namespace than ours, would give us the number of somebody else's. A node
        without root works in the container's user namespace, through `workers`."""
        deadline = time.monotonic() + _FIRST_PROCESS_TIMEOUT_SECONDS
        while _read_last_argument(init_pid) != name.encode():
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"Process {init_pid} is not the first of container {name}: it ended at once, or the engine runs on "
                    "another machine or in another pid namespace than Polar."
                )
            await asyncio.sleep(0.005)
        return cls(init_pid, container, workers)

    def __init__(self, init_pid: int, container: str, workers: NamespaceWorkers | None) -> None:
        self._descriptors = contextlib.ExitStack()
        self.worker: NamespaceWorker | None = None
        try:
            self._open(init_pid, container, workers)
        except OSError as error:
            self.close()
            raise SandboxError(f"The container can't be entered: {error}.") from error
        except BaseException:
            self.close()
            raise

    def _open(self, init_pid: int, container: str, workers: NamespaceWorkers | None) -> None:
        self._init_pidfd = self._keep_open(os.pidfd_open(init_pid))
        proc = Path(f"/proc/{init_pid}")
        if workers is not None:
            self.worker = workers.get_for_process(init_pid)
        elif (proc / "uid_map").read_text().split()[:2] != ["0", "0"]:
            raise SandboxError("The engine maps users of containers to others (userns-remap), which Polar can't use.")
        self._pid_namespace = (proc / "ns/pid").stat().st_ino
        self._keep_open(os.open(proc / "ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        self.root = self._keep_open(os.open(proc / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._cgroup_folders = _find_cgroups(proc, container)
        killing = next((self._cgroup_folders[name] for name in _KILL_HIERARCHIES if name in self._cgroup_folders), None)
        if killing is None and workers is None:
            raise SandboxError(
                "The container has no cgroup that Polar sees: it needs the machine's own /sys/fs/cgroup."
            )
        if workers is not None and killing is not None and not os.access(killing, os.W_OK):
            killing = None
        self._init_pid = init_pid
        self._cgroup = (
            None if killing is None else Cgroup.from_folders((killing, self._cgroup_folders.get("memory", killing)))
        )
        self._pids_folder = self._cgroup_folders.get("pids", killing)
        self._process_limit = None if self._pids_folder is None else _read_or_none(self._pids_folder / "pids.max")
        self._starting_commands = 0

    def _keep_open(self, fd: int) -> int:
        self._descriptors.callback(os.close, fd)
        return fd

    def close(self) -> None:
        self._descriptors.close()

    def call(self, operation: Callable[..., _Result], *arguments: Any) -> _Result:
        """Runs a function of `files` on the root, where its files can be opened."""
        if self.worker is None:
            return operation(self.root, *arguments)
        result: _Result = self.worker.call(operation.__name__, self.root, *arguments)
        return result

    async def listen(self) -> socket.socket:
        return await listen_in_namespace(self._init_pidfd, self.worker)

    def count_oom_kills(self) -> int:
        """How many processes were killed for want of memory so far."""
        return 0 if self._cgroup is None else self._cgroup.count_oom_kills()

    def has_ended(self) -> bool:
        """Whether the first process is gone, and with it all others: the kernel sees to that."""
        poll = select.poll()
        poll.register(self._init_pidfd, select.POLLIN)
        return bool(poll.poll(0))

    async def wait_until_ended(self) -> None:
        """Waits until it is, which after a kill is a matter of milliseconds."""
        if not await self.wait_for_end(_DEATH_TIMEOUT_SECONDS):
            raise SandboxError("The processes of a killed container don't die.")

    async def wait_for_end(self, seconds: float) -> bool:
        """Whether it is within this time."""
        first = os.dup(self._init_pidfd)  # of this call alone: a loop tells one of a descriptor's followers only
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(first, ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(first)
            os.close(first)
        return True

    def count_refused_forks(self) -> int:
        """How often a new process was more than the container may have."""
        events = None if self._pids_folder is None else _read_or_none(self._pids_folder / "pids.events")
        return int((events or "max 0").split()[1])

    @contextlib.contextmanager
    def allow_engine_processes(self) -> Iterator[None]:
        """While a command is started, the engine may have some processes more than what runs inside. Otherwise whoever
        fills the container with processes would make us fail."""
        self._starting_commands += 1
        self._limit_processes()
        try:
            yield
        finally:
            self._starting_commands -= 1
            self._limit_processes()

    def _limit_processes(self) -> None:
        if self._pids_folder is not None and self._process_limit not in (None, "max"):
            with contextlib.suppress(OSError):  # the container is gone, and its groups with it
                most = int(self._process_limit) + self._starting_commands * _EXEC_PROCESSES
                (self._pids_folder / "pids.max").write_text(str(most))

    def create_cgroup(self) -> "Cgroup | ContainerProcesses":
        """For a command. Where there are no cgroups, what ends a command ends all that runs inside."""
        if self._cgroup is None:
            return ContainerProcesses(self._init_pid, self._pid_namespace)
        try:
            return self._cgroup.create_child()
        except OSError as error:
            raise SandboxError(f"A command can't have a group of its own: {error}.") from error

    def move_process(self, pid: int, cgroup: "Cgroup | ContainerProcesses") -> int:
        """Puts the process that has the id `pid` inside into a group; its id on the machine."""
        for entry in _list_processes(self._pid_namespace):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
                if _read_namespace_pid(entry) == pid:
                    if isinstance(cgroup, Cgroup):
                        (cgroup.folders[0] / "cgroup.procs").write_text(entry)
                    return int(entry)
        raise SandboxError(f"The container has no process {pid}.")


class ContainerProcesses:
    """All processes of a container but its first: what a command's group is where there are no cgroups."""

    def __init__(self, init_pid: int, namespace: int) -> None:
        self._init_pid = init_pid
        self._pid_namespace = namespace

    async def kill(self) -> None:
        """Ends once there is nothing but the first process and the sleep that it starts again and again."""
        deadline = time.monotonic() + _DEATH_TIMEOUT_SECONDS
        while found := self._list_pids():
            for entry in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(entry), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SandboxError(f"Processes {', '.join(found)} of a container don't die.")
            await asyncio.sleep(_KILLING_PAUSE_SECONDS)
            if len(left := self._list_pids()) == 1 and _read_parent(left[0]) == self._init_pid and left[0] not in found:
                return

    def contains(self, pid: int) -> bool:
        return str(pid) in self._list_pids()

    def remove_if_empty(self) -> None:
        pass

    def _list_pids(self) -> list[str]:
        return [
            entry
            for entry in _list_processes(self._pid_namespace)
            if int(entry) != self._init_pid and _read_parent(entry)
        ]


def _list_processes(namespace: int) -> list[str]:
    """Those of a pid namespace, by their ids on the machine."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
            if os.stat(f"/proc/{entry}/ns/pid").st_ino == namespace:
                found.append(entry)
    return found


def _read_parent(pid: str) -> int | None:
    """The parent of a process that lives."""
    stat = _read_or_none(Path("/proc", pid, "stat"))
    fields = [] if stat is None else stat.rpartition(")")[2].split()
    return int(fields[1]) if fields and fields[0] != "Z" else None


def _read_last_argument(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").rpartition(b"\0")[2]
    except OSError:
        return b""


def cgroup_contains(cgroup: Cgroup | ContainerProcesses, pid: int) -> bool:
    if isinstance(cgroup, ContainerProcesses):
        return cgroup.contains(pid)
    return str(pid) in (_read_or_none(cgroup.folders[0] / "cgroup.procs") or "").split()


def _read_or_none(file: Path) -> str | None:
    """None where the container is gone, and its groups with it, or where the controller is not there."""
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _read_namespace_pid(pid: str) -> int:
    """A process's id in the namespace that it is in."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in status if line.startswith("NSpid:"))


def _find_cgroups(first: Path, container: str) -> dict[str, Path]:
    """The groups that the engine made for a container, by controller; v2's has no name."""
    mounts = _find_cgroup_mounts()
    found: dict[str, Path] = {}
    for line in (first / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        before, id, after = path.partition(container)
        if id:  # else it is one that the container shares with others
            own = (before + id + after.partition("/")[0]).lstrip("/")  # limits are here, also where the engine nests
            found |= {name: mounts[name] / own for name in controllers.split(",") if name in mounts}
    return found


def _find_cgroup_mounts() -> dict[str, Path]:
    """Where each hierarchy is mounted."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        at = Path(before.split(" ")[4])
        if kind == "cgroup2":
            found[""] = at
        elif kind == "cgroup":
            found |= dict.fromkeys(options.split(","), at)
    return found
