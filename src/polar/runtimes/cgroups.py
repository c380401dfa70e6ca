"""Limits, and a way to kill everything at once, on cgroup v1, v2 and both together.

A runtime's groups are made below the group that the node itself is in, so that whatever limits the node limits them
too, and their names carry the runtime's id. One hierarchy is used for killing (v2 where it is mounted, since
`cgroup.kill` takes a whole group at once); there each command has a group of its own within its runtime's. A limit
needs its controller's hierarchy; one that can't be kept here is named in `Cgroups.missing`.
"""

import asyncio
import contextlib
import errno
import functools
import os
import signal
import time
from pathlib import Path
from typing import Literal

from msgspec import Struct

from polar.runtimes.base import Limits, SandboxError

Controller = Literal["memory", "pids", "cpu"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "pids", "cpu")
LIMIT_NAMES: dict[Controller, str] = {"memory": "memory limit", "pids": "process limit", "cpu": "CPU limit"}
_CPU_PERIOD_US = 100_000
_REMOVAL_SECONDS = 10.0


def make_cgroup_name(id: str) -> str:
    return f"polar-{id}"


class CgroupEntry(Struct, frozen=True):
    """How a new process gets into a group: started in `unified_folder` (v2), and its own id
    written to each of `tasks_files` (v1)."""

    unified_folder: str | None
    tasks_files: tuple[str, ...]


class CgroupHierarchies:
    """The groups of this process that others can be made in."""

    def __init__(self, unified: Path | None, delegated: frozenset[Controller], v1: dict[str, Path]) -> None:
        self._unified = unified
        self._delegated = delegated
        self._v1 = v1
        self._kill_hierarchy = unified or next((v1[name] for name in ("pids", "memory", "freezer") if name in v1), None)

    @classmethod
    @functools.cache
    def detect(cls) -> "CgroupHierarchies":
        """Looked for once: on v2 the process may move for it, and would not find again where it came from."""
        unified, v1 = find_own_cgroups(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
        if unified is not None and not (_is_writable(unified) and (unified / "cgroup.procs").exists()):
            unified = None
        delegated = frozenset[Controller]() if unified is None else _delegate(unified)
        return cls(unified, delegated, {name: folder for name, folder in v1.items() if _is_writable(folder)})

    @property
    def missing_controllers(self) -> tuple[Controller, ...]:
        """Controllers whose limits can't be kept."""
        return tuple(name for name in CONTROLLERS if name not in self._delegated and name not in self._v1)

    @property
    def missing_limits(self) -> list[str]:
        """The same for people."""
        return [LIMIT_NAMES[name] for name in self.missing_controllers]

    @property
    def parents(self) -> list[Path]:
        """All that groups are made in, the one for killing first."""
        found = [] if self._kill_hierarchy is None else [self._kill_hierarchy]
        return [*found, *(folder for name, folder in self._v1.items() if name in CONTROLLERS and folder not in found)]

    def build_cgroup(self, id: str, limits: Limits, *, own_processes: int) -> "Cgroup | None":
        """A group with these limits, not made yet; None where nothing can be made. So many processes in it are ours."""
        if self._kill_hierarchy is None:
            return None
        files: dict[Path, dict[str, str]] = {self._kill_hierarchy / make_cgroup_name(id): {}}
        for name, values in build_limit_files(limits, own_processes, self._delegated).items():
            if name not in self.missing_controllers:
                folder = self._kill_hierarchy if name in self._delegated else self._v1[name]
                files.setdefault(folder / make_cgroup_name(id), {}).update(values)
        return Cgroup(files, unified=self._unified is not None)


class Cgroup:
    """A runtime's groups, the one for killing first; or a command's."""

    def __init__(self, files: dict[Path, dict[str, str]], *, unified: bool) -> None:
        self.folders = tuple(files)
        self._files = files
        self._unified = unified
        self._child_count = 0
        self._oom_file: str | None = None  # the file that counts those killed for want of memory, once it is known

    def create(self) -> None:
        try:
            for folder, values in self._files.items():
                folder.mkdir()
                for file, value in values.items():
                    _write_value(folder / file, value)
        except OSError as error:
            raise SandboxError(f"The cgroup {self.folders[0].name} can't be made: {error}.") from error

    @classmethod
    def from_folders(cls, folders: tuple[Path, ...]) -> "Cgroup":
        """As another process made it, which may be in part or not at all; the one for killing first."""
        return cls({folder: {} for folder in folders}, unified=(folders[0] / "cgroup.kill").exists())

    def create_child(self) -> "Cgroup":
        """A group within this one, for a command. Limits stay this one's."""
        self._child_count += 1
        first, *others = self.folders
        folder = first / f"c{self._child_count}"
        folder.mkdir()
        return Cgroup({path: {} for path in (folder, *others)}, unified=self._unified)

    @property
    def entry(self) -> CgroupEntry:
        first, *others = (str(folder) for folder in self.folders)
        if self._unified:
            return CgroupEntry(first, tuple(f"{folder}/tasks" for folder in others))
        return CgroupEntry(None, tuple(f"{folder}/tasks" for folder in (first, *others)))

    def count_oom_kills(self) -> int:
        """How many processes were killed for want of memory so far. A command's group does not count for itself."""
        if self._oom_file is not None:
            return _read_oom_kills(self._oom_file) or 0
        for file in (f"{folder}/{name}" for folder in self.folders for name in ("memory.events", "memory.oom_control")):
            if (count := _read_oom_kills(file)) is not None:
                self._oom_file = file
                return count
        return 0

    async def kill(self) -> None:
        """Kills everything in the group and below, and waits until it is gone."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        pause = 0.0005
        folder = self.folders[0]
        while pids := self._kill_once(folder):
            if time.monotonic() > deadline:
                raise SandboxError(f"Processes {pids} of {folder.name} don't die.")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)

    def _kill_once(self, folder: Path) -> list[int]:
        try:
            pids = [
                int(line) for group in _list_cgroups(folder) for line in (group / "cgroup.procs").read_text().split()
            ]
        except FileNotFoundError:
            return []
        if not pids:
            return []
        if (folder / "cgroup.kill").exists():
            _write_value(folder / "cgroup.kill", "1")
            return pids
        if (folder / "pids.max").exists():
            _write_value(folder / "pids.max", "0")  # so that nothing forks faster than it is killed
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    async def remove(self) -> None:
        """Kills what is in it and removes it."""
        await self.kill()
        for folder in self.folders:
            await _remove(folder)

    def remove_if_empty(self) -> None:
        """Removes a command's group; where daemons of the command are in it, it stays until its runtime is removed."""
        with contextlib.suppress(OSError):
            self.folders[0].rmdir()


def _read_oom_kills(file: str) -> int | None:
    """Of processes killed for want of memory; None where the file does not say."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _, found, count = os.read(fd, 4096).partition(b"oom_kill ")
    except OSError:  # the group was removed just now
        return None
    finally:
        os.close(fd)
    return int(count.split()[0]) if found else None


def _list_cgroups(folder: Path) -> list[Path]:
    """The group and those below, from the top."""
    return [Path(found) for found, _, _ in os.walk(folder)]


async def _remove(folder: Path) -> None:
    """Also what is below: a group whose last process has just ended stays busy for a moment."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    pause = 0.0005
    while True:
        try:
            for group in reversed(_list_cgroups(folder)):
                group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise SandboxError(f"The cgroup {folder} can't be removed: {error}.") from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)
        else:
            return


def build_limit_files(
    limits: Limits, own_processes: int, delegated: frozenset[Controller]
) -> dict[Controller, dict[str, str]]:
    """Which controllers the limits need, and what is written to which file."""
    found: dict[Controller, dict[str, str]] = {}
    if (memory := limits.memory_mb) is not None:
        size = str(memory << 20)
        if "memory" in delegated:
            found["memory"] = {"memory.max": size, "memory.swap.max": "0"}
        else:
            found["memory"] = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
    if limits.processes is not None:
        found["pids"] = {"pids.max": str(limits.processes + own_processes)}
    if limits.cpus is not None:
        quota = str(max(1000, round(limits.cpus * _CPU_PERIOD_US)))
        if "cpu" in delegated:
            found["cpu"] = {"cpu.max": f"{quota} {_CPU_PERIOD_US}"}
        else:
            found["cpu"] = {"cpu.cfs_period_us": str(_CPU_PERIOD_US), "cpu.cfs_quota_us": quota}
    return found


_OPTIONAL_FILES = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Files that are there only where the kernel accounts swap."""


def _write_value(file: Path, value: str) -> None:
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)  # never creates
    except FileNotFoundError:
        if file.name not in _OPTIONAL_FILES:
            raise
        return
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def find_own_cgroups(cgroup: str, mountinfo: str) -> tuple[Path | None, dict[str, Path]]:
    """The folders of a process's groups, of v2 and of v1 by controller, by its files of these names in /proc."""
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    unified: Path | None = None
    v1: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, at = before.split(" ")[3:5]
        if kind == "cgroup2" and "" in paths:
            unified = _resolve_mounted(Path(at), root, paths[""])
        elif kind == "cgroup":
            names = [name for name in options.split(",") if name in paths]
            v1 |= {name: _resolve_mounted(Path(at), root, paths[name]) for name in names}
    return unified, v1


def _resolve_mounted(mounted: Path, root: str, path: str) -> Path:
    """Where the group `path` is seen under a mount that shows the hierarchy from `root` on."""
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return mounted / path.lstrip("/")


def _is_writable(folder: Path) -> bool:
    probe = folder / f"polar-probe-{os.getpid()}"
    try:
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError:
        return False
    return True


def _delegate(own: Path) -> frozenset[Controller]:
    """Hands v2's controllers down to the groups below `own`, as far as that works.

    v2 wants processes in leaves only. Where this process is alone in its group (a systemd unit with `Delegate=yes`, a
    container), it moves into a leaf first; where others are there too, they are not ours to move.
    """
    offered = (own / "cgroup.controllers").read_text().split()
    found: set[Controller] = set()
    for name in CONTROLLERS:
        if name in offered and (_enable(own, name) or (_move_to_leaf(own) and _enable(own, name))):
            found.add(name)
    return frozenset(found)


def _enable(own: Path, name: str) -> bool:
    try:
        _write_value(own / "cgroup.subtree_control", f"+{name}")
    except OSError:
        return False
    return True


def _move_to_leaf(own: Path) -> bool:
    if (own / "cgroup.procs").read_text().split() != [str(os.getpid())]:
        return False
    leaf = own / "polar-node"
    try:
        leaf.mkdir(exist_ok=True)
        _write_value(leaf / "cgroup.procs", str(os.getpid()))
    except OSError:
        return False
    return True
