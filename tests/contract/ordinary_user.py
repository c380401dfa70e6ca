"""Runs a command as a user without any right. As root:

    python -m tests.contract.ordinary_user FOLDER [--groups] [--ids] -- COMMAND...

The user is one that no file of the machine knows, with the home FOLDER/home. The interpreter and this repository are
readable for it at their own paths, also where they are below folders that are not: only in the command's own mount
namespace. With --groups it has cgroups of its own, as a service manager delegates them; with --ids a name and
subordinate ids, in files of /etc that only the command sees.
"""

import contextlib
import functools
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from polar.runtimes import linux
from polar.runtimes.cgroups import find_own_cgroups

USER = 48_213
_REPOSITORY = Path(__file__).parents[2]
_BIND, _RECURSIVE = 0x1000, 0x4000


def command(folder: Path, argv: list[str], *options: str) -> list[str]:
    """The arguments of a process that runs `argv` as that user."""
    return [sys.executable, "-m", __name__, str(folder), *options, "--", *argv]


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG") or name.startswith("POLAR_")}
    own = {"HOME": "home", "TMPDIR": "tmp", "XDG_RUNTIME_DIR": "run"}
    return kept | {name: str(folder / below) for name, below in own.items()}


def main() -> None:
    split = sys.argv.index("--")
    folder, argv = Path(sys.argv[1]), sys.argv[split + 1 :]
    for path in (folder, *(folder / name for name in ("home", "tmp", "run"))):
        path.mkdir(exist_ok=True)
        os.chown(path, USER, USER)
    options = sys.argv[2:split]
    nothing: contextlib.AbstractContextManager[list[Path]] = contextlib.nullcontext([])
    with _delegated_groups() if "--groups" in options else nothing as groups:
        become = functools.partial(_become_user, folder, groups, ids="--ids" in options)
        child = subprocess.Popen(argv, env=_environment(folder), preexec_fn=become)
        sys.exit(child.wait())


def _become_user(folder: Path, groups: list[Path], *, ids: bool) -> None:
    for group in groups:
        (group / "cgroup.procs").write_text("0")
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
    _open_ways([Path(sys.prefix), Path(sys.base_prefix), _REPOSITORY, folder])
    if ids:
        _give_ids(folder)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.chdir(_REPOSITORY)


def _give_ids(folder: Path) -> None:
    added = {
        "passwd": f"polar-user:x:{USER}:{USER}::{folder / 'home'}:/bin/sh\n",
        "group": f"polar-user:x:{USER}:\n",
        "subuid": "polar-user:400000:65536\n",
        "subgid": "polar-user:400000:65536\n",
    }
    for name, line in added.items():
        known = Path("/etc", name)
        (folder / name).write_text(known.read_text() + line)
        linux.mount(str(folder / name), str(known), "none", _BIND)


def _open_ways(needed: list[Path]) -> None:
    """Folders that can't be entered are replaced by empty ones, in which only what is needed is found."""
    held = {path: os.open(path, os.O_PATH) for path in needed}
    for closed in {above for path in needed for above in _first_closed(path)}:
        linux.mount("none", str(closed), "tmpfs", 0, "mode=755")
    for path, fd in held.items():
        if not path.exists():
            path.mkdir(parents=True)
        if path.stat().st_ino != os.fstat(fd).st_ino:
            linux.mount(f"/proc/self/fd/{fd}", str(path), "none", _BIND | _RECURSIVE)
        os.close(fd)


def _first_closed(path: Path) -> list[Path]:
    closed = [above for above in reversed(path.parents) if not above.stat().st_mode & 0o001]
    return closed[:1]


@contextlib.contextmanager
def _delegated_groups() -> Iterator[list[Path]]:
    unified, v1 = find_own_cgroups(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    found = {folder for folder in (unified, *v1.values()) if folder is not None}
    name = f"polar-user-{secrets.token_hex(4)}"
    made = []
    try:
        for parent in sorted(folder for folder in found if (folder / "cgroup.procs").exists()):
            group = parent / name
            group.mkdir()
            made.append(group)
            if (group / "cpuset.cpus").exists():
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (group / file).write_text((parent / file).read_text())
            for path in (group, *group.iterdir()):
                os.chown(path, USER, USER)
        yield made
    finally:
        for group in made:
            for below, _, _ in os.walk(group, topdown=False):
                os.rmdir(below)


if __name__ == "__main__":
    main()
