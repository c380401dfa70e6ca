"""What a kind keeps on disk, so that the next process finds what a crash left.

    STATE/OWNER/lock           held for as long as the process that made it lives
    STATE/OWNER/cgroups        the groups that those of its runtimes are made in, one a line
    STATE/OWNER/ending         the owner was told to end
    STATE/OWNER/runtimes/ID/   a runtime's folder
    STATE/OWNER/...            what its runtimes share
    STATE/.OWNER/              the same, before it is locked

A lock falls with its process, however that ends: an owner whose lock can be had is gone, and all that it left may go.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from polar.runtimes.base import SandboxError
from polar.runtimes.cgroups import Cgroup, CgroupHierarchies, make_cgroup_name
from polar.runtimes.files import remove_folder

_CGROUPS_FILE = "cgroups"
_ENDING_FILE = "ending"
_LOCK_GRACE_SECONDS = 60.0  # that an owner may take to make and lock its folder


class StateFolder:
    """The folder of this process."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.folder = self.root / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Holds the folder's lock from now on, also where nothing is kept in it."""
        self._ensure_locked()

    def create_runtime_folder(self, id: str) -> Path:
        """A new runtime's folder."""
        self._ensure_locked()
        folder = self.folder / "runtimes" / id
        try:
            folder.mkdir()
        except FileExistsError:
            raise SandboxError(f"There is a runtime {id} already.") from None
        return folder

    def get_shared_path(self, name: str) -> Path:
        self._ensure_locked()
        return self.folder / name

    def record_cgroups(self, cgroups: CgroupHierarchies) -> None:
        """Before the first group is made, so that none is without a note of it."""
        self.get_shared_path(_CGROUPS_FILE).write_text("".join(f"{folder}\n" for folder in cgroups.parents))

    def mark_ending(self) -> None:
        """Tells the next process that this one was told to end, should it be killed before it has."""
        if self._lock_fd is not None:  # else it leaves nothing to be found
            (self.folder / _ENDING_FILE).touch()

    def _ensure_locked(self) -> None:
        if self._lock_fd is None:
            making = self.root / f".{self.folder.name}"  # another's sweep must not find it without its lock
            (making / "runtimes").mkdir(parents=True, mode=0o700)
            lock = _try_lock(making)
            if lock is None:
                raise SandboxError(f"{making} can't be locked.")
            making.rename(self.folder)
            self._lock_fd = lock

    def iter_abandoned(self) -> Iterator["AbandonedState"]:
        """What owners left that are no more. Each is held while it is looked at."""
        for folder in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if folder == self.folder or _is_being_created(folder) or (lock := _try_lock(folder)) is None:
                continue
            try:
                yield AbandonedState(folder)
            finally:
                os.close(lock)

    def close(self) -> None:
        if self._lock_fd is not None:
            remove_tree(self.folder)
            os.close(self._lock_fd)
            self._lock_fd = None


class AbandonedState:
    """An owner that is no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def runtime_folders(self) -> list[Path]:
        below = self.folder / "runtimes"
        return sorted(below.iterdir()) if below.is_dir() else []

    @property
    def was_ending(self) -> bool:
        return (self.folder / _ENDING_FILE).exists()

    def find_cgroup(self, id: str) -> Cgroup | None:
        """The groups that a runtime may have had."""
        try:
            parents = (self.folder / _CGROUPS_FILE).read_text().splitlines()
        except FileNotFoundError:
            return None
        return Cgroup.from_folders(tuple(Path(parent, make_cgroup_name(id)) for parent in parents)) if parents else None

    def remove(self) -> None:
        remove_tree(self.folder)


def _is_being_created(folder: Path) -> bool:
    try:
        return folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _LOCK_GRACE_SECONDS
    except FileNotFoundError:  # made by now
        return True


def _try_lock(folder: Path) -> int | None:
    """The lock of an owner's folder, unless its process lives."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def remove_tree(folder: Path) -> None:
    """Whatever what ran inside made of it; what is gone already is fine."""
    try:
        above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for may_fail in (True, True, False):
            try:
                remove_folder(folder.name, above)
            except FileNotFoundError:
                if not folder.exists():
                    return
            except OSError as error:
                if not may_fail:
                    raise SandboxError(f"{folder} can't be removed: {error}.") from error
            else:
                return
    finally:
        os.close(above)
    raise SandboxError(f"{folder} can't be removed.")
