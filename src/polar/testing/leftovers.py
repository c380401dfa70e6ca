"""What is on the machine because of a test: processes, mounts, cgroups, loop devices, descriptors, folders.

Others use the machine too, so what is a test's own is recognized by its names: a mark in the environment of what
commands start, the state folder in mounts and arguments, ids in the names of cgroups.
"""

import os
from pathlib import Path


def list_processes(mark: str, *, children: bool = True) -> list[str]:
    """Those that carry the mark in their environment or arguments, and children of this process."""
    found = []
    wanted = mark.encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc", name)
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            own = children and int(fields[1]) == os.getpid()
            ours = own or wanted in (folder / "environ").read_bytes() or wanted in command
        except OSError:
            continue
        if ours and int(name) != os.getpid() and fields[0] != "Z":
            found.append(f"{name} {command.replace(bytes(1), b' ').decode(errors='replace').strip()}")
    return found


def list_all(state: Path, ids: list[str], mark: str) -> dict[str, list[str]]:
    """By kind of thing; all empty when nothing is left."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    backing = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return {
        "processes": list_processes(mark),
        "mounts": [line for line in mounts if str(state) in line or any(id in line for id in ids)],
        "cgroups": [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if any(id in folder for id in ids)],
        "loop devices": [path for path in backing if str(state) in path],
        "folders": [str(path) for path in state.rglob("*") if any(id in str(path) for id in ids)],
    }


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
