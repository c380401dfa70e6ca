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

from polar.runtimes import emptying
from polar.runtimes.base import SandboxError
from polar.runtimes.cgroups import Cgroups, Group, group_name

_CGROUPS = "cgroups"
_ENDING = "ending"
_MAKING_SECONDS = 60.0  # that an owner may take to make and lock its folder


class State:
    """The folder of this process."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.folder = self.root / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock: int | None = None

    def lock(self) -> None:
        """Holds the folder's lock from now on, also where nothing is kept in it."""
        self._own()

    def runtime(self, id: str) -> Path:
        """A new runtime's folder."""
        self._own()
        folder = self.folder / "runtimes" / id
        try:
            folder.mkdir()
        except FileExistsError:
            raise SandboxError(f"There is a runtime {id} already.") from None
        return folder

    def shared(self, name: str) -> Path:
        self._own()
        return self.folder / name

    def note(self, cgroups: Cgroups) -> None:
        """Before the first group is made, so that none is without a note of it."""
        self.shared(_CGROUPS).write_text("".join(f"{folder}\n" for folder in cgroups.parents))

    def mark_ending(self) -> None:
        """Tells the next process that this one was told to end, should it be killed before it has."""
        if self._lock is not None:  # else it leaves nothing to be found
            (self.folder / _ENDING).touch()

    def _own(self) -> None:
        if self._lock is None:
            making = self.root / f".{self.folder.name}"  # another's sweep must not find it without its lock
            (making / "runtimes").mkdir(parents=True, mode=0o700)
            lock = _locked(making)
            if lock is None:
                raise SandboxError(f"{making} can't be locked.")
            making.rename(self.folder)
            self._lock = lock

    def left(self) -> Iterator["Left"]:
        """What owners left that are no more. Each is held while it is looked at."""
        for folder in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if folder == self.folder or _being_made(folder) or (lock := _locked(folder)) is None:
                continue
            try:
                yield Left(folder)
            finally:
                os.close(lock)

    def close(self) -> None:
        if self._lock is not None:
            remove_tree(self.folder)
            os.close(self._lock)
            self._lock = None


class Left:
    """An owner that is no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def runtimes(self) -> list[Path]:
        below = self.folder / "runtimes"
        return sorted(below.iterdir()) if below.is_dir() else []

    @property
    def was_ending(self) -> bool:
        return (self.folder / _ENDING).exists()

    def group(self, id: str) -> Group | None:
        """The groups that a runtime may have had."""
        try:
            parents = (self.folder / _CGROUPS).read_text().splitlines()
        except FileNotFoundError:
            return None
        return Group.left(tuple(Path(parent, group_name(id)) for parent in parents)) if parents else None

    def remove(self) -> None:
        remove_tree(self.folder)


def _being_made(folder: Path) -> bool:
    try:
        return folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _MAKING_SECONDS
    except FileNotFoundError:  # made by now
        return True


def _locked(folder: Path) -> int | None:
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
                emptying.remove(folder.name, above)
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
