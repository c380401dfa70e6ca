"""What differs between two folder trees of this machine.

Both are plain copies that nobody changes meanwhile, with content that is trusted in nothing: links are compared as
links, never followed, and what is neither a file, a link nor a folder is not there. Folders count only by what is in
them, and of a file's mode only whether it can be executed, as in git.
"""

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

SKIPPED_NAMES = frozenset({".git", "__pycache__", ".pytest_cache"})
_CHUNK_BYTES = 1 << 18

GitMode = Literal["100644", "100755", "120000"]
"""As git writes them: a file, one that can be executed, a link."""

LINK_MODE: GitMode = "120000"


class FolderEntry(Struct, frozen=True):
    mode: GitMode
    size: int


class FileChange(Struct, frozen=True):
    """One file or link that is there on one side only, or differs. One that became the other is gone and added."""

    path: str  # below the top; what is no UTF-8 in it as os.fsdecode gives it
    before: FolderEntry | None
    after: FolderEntry | None

    @property
    def kind(self) -> Literal["added", "changed", "deleted"]:
        if self.before is None:
            return "added"
        return "deleted" if self.after is None else "changed"


def find_changes(before: Path, after: Path, *, skipped: Collection[str] = SKIPPED_NAMES) -> list[FileChange]:
    """In the order of their paths, what is gone before what took its place. Entries whose name is among `skipped` are
    left out, wherever they are."""
    old, new = dict(list_entries(before, skipped)), dict(list_entries(after, skipped))
    found = []
    for path in sorted(old.keys() | new.keys()):
        was, now = old.get(path), new.get(path)
        if was is not None and now is not None and (was.mode == LINK_MODE) != (now.mode == LINK_MODE):
            found += [FileChange(path, was, None), FileChange(path, None, now)]
        elif was is None or now is None or was != now or not _has_same_content(before / path, after / path, was):
            found.append(FileChange(path, was, now))
    return found


def list_entries(top: Path, skipped: Collection[str] = SKIPPED_NAMES) -> Iterator[tuple[str, FolderEntry]]:
    """Every file and link below `top`."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(top / folder) as listed:
            for entry in listed:
                if entry.name in skipped:
                    continue
                path = folder + entry.name
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(path + "/")
                elif stat.S_ISLNK(found.st_mode):
                    yield path, FolderEntry(LINK_MODE, found.st_size)
                elif stat.S_ISREG(found.st_mode):
                    yield path, FolderEntry("100755" if found.st_mode & 0o100 else "100644", found.st_size)


def read_content(file: Path, mode: GitMode) -> bytes:
    """What git holds of it: a link's is where it leads."""
    if mode == LINK_MODE:
        return os.fsencode(os.readlink(file))
    with open(_open_no_follow(file), "rb") as opened:
        return opened.read()


def _has_same_content(one: Path, other: Path, entry: FolderEntry) -> bool:
    """Whether two entries of the same mode and size have the same content. Times tell nothing: they can be set."""
    if entry.mode == LINK_MODE:
        return os.readlink(one) == os.readlink(other)
    if entry.size == 0:
        return True
    with open(_open_no_follow(one), "rb", 0) as first, open(_open_no_follow(other), "rb", 0) as second:
        while data := first.read(_CHUNK_BYTES):
            if data != second.read(_CHUNK_BYTES):
                return False
    return True


def _open_no_follow(file: Path) -> int:
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
