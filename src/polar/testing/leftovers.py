"""Finds what a test left on the machine: processes, mounts, cgroups, loop devices, descriptors and folders.

Other programs use the machine too, so a test's own resources are recognized by name: by a mark in the environment of
the processes, by the state folder in mounts and arguments, and by runtime ids in the names of cgroups.
"""

import os
from pathlib import Path


def list_processes(mark: str, *, children: bool = True) -> list[str]:
    """Processes with the mark in their environment or arguments, and, with `children`, children of this process."""
    processes = []
    encoded_mark = mark.encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc", name)
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            is_child = children and int(fields[1]) == os.getpid()
            is_ours = is_child or encoded_mark in (folder / "environ").read_bytes() or encoded_mark in command
        except OSError:
            continue
        if is_ours and int(name) != os.getpid() and fields[0] != "Z":
            processes.append(f"{name} {command.replace(bytes(1), b' ').decode(errors='replace').strip()}")
    return processes


def list_leftovers(state: Path, ids: list[str], mark: str) -> dict[str, list[str]]:
    """Leftovers by kind. All lists are empty when nothing is left."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    backing = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return {
        "processes": list_processes(mark),
        "mounts": [line for line in mounts if str(state) in line or any(id in line for id in ids)],
        "cgroups": [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if any(id in folder for id in ids)],
        "loop devices": [path for path in backing if str(state) in path],
        "folders": [str(path) for path in state.rglob("*") if any(id in str(path) for id in ids)],
    }


def count_open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
