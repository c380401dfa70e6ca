"""Copies files in and out of a runtime's root, from outside, while processes inside may be changing them.

Nothing inside is trusted. Folders are opened one below another and held open; the last part of a path is never
followed if it is a link; a link on the way is resolved as inside. Only plain files, folders and links are copied, and a
link only if no chain of links can lead out of the copy: it may climb (`..`) at its start, through real folders, but not
above the top. With `all_links`, links are copied unchanged and none is followed.
"""

import asyncio
import contextlib
import errno
import functools
import os
import posixpath
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from polar.runtimes import linux
from polar.runtimes.base import FileState, TransferTooLargeError

_ENTRY_COST_BYTES = 512  # charged for each entry besides its content: a million empty files are not free
_MAX_ENTRIES = 1_000_000  # in one listing
_MAX_DEPTH = 200  # nested folders, each of which is held open
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20
_LAST_FIELD_INDEX = 3  # fields before the last one that is read: a name, a password, a number, and the group of a user

_Result = TypeVar("_Result")

Owner = tuple[int, int]
"""A user id and a group id. Without an owner, new entries belong to this process's user."""


class NamespaceCaller(Protocol):
    """Calls a function by name, on an open descriptor, in another user namespace."""

    def call(self, operation: str, subject: int, *arguments: object) -> Any: ...


class FileTransfers:
    """The running transfers of a runtime. They run in threads, which continue after a cancellation: the root must stay
    open until `wait_until_idle` returns. A node without root delegates them to a worker."""

    def __init__(self) -> None:
        self.worker: NamespaceCaller | None = None
        self._running: set[asyncio.Future[Any]] = set()

    async def put(self, root: int, source: Path | bytes, path: str, owner: "Owner | None" = None) -> None:
        await self._run(put, root, source, path, owner)

    async def get(self, root: int, path: str, destination: Path, max_bytes: int, all_links: bool) -> None:
        await self._run(get, root, path, destination, max_bytes, all_links)

    async def delete(self, root: int, paths: list[str]) -> None:
        await self._run(delete, root, paths)

    async def list_entries(self, root: int, path: str, exclude: Collection[str]) -> dict[str, FileState]:
        return await self._run(list_entries, root, path, exclude)

    async def _run(self, operation: Callable[..., _Result], *arguments: Any) -> _Result:
        work = operation if self.worker is None else functools.partial(self.worker.call, operation.__name__)
        running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        self._running.add(running)
        running.add_done_callback(self._forget_transfer)
        return await asyncio.shield(running)

    def _forget_transfer(self, transfer: "asyncio.Future[Any]") -> None:
        self._running.discard(transfer)
        if not transfer.cancelled():
            transfer.exception()  # told to its caller, where there still is one

    async def wait_until_idle(self) -> None:
        if self._running:
            await asyncio.wait(set(self._running))


def put(root: int, source: Path | bytes, path: str, owner: Owner | None = None) -> None:
    """Writes a file, a folder or bytes. An entry in the way of a file is removed; folders are merged. New entries
    belong to the owner; existing folders keep theirs."""
    parent, name = _split_path(path)
    with _create_folders(root, parent, owner) as folder:
        if isinstance(source, bytes):
            with _new_file(folder, name, 0o644, owner) as target:
                _write(target, source)
        elif name == ".":
            _put_children(source, folder, owner)
        else:
            _put_entry(source, folder, name, owner)


def make_folders(root: int, folders: tuple[str, ...], owner: Owner | None) -> None:
    """Makes missing folders with their parents."""
    for folder in folders:
        with _create_folders(root, folder, owner):
            pass


def resolve_owner(root: int, user: str) -> Owner:
    """Resolves an image's USER (`NAME` or `NUMBER`, perhaps with `:GROUP`) like container engines, by the image's own
    files. An unknown number has the group 0."""
    name, _, group = user.partition(":")
    users, groups = _read_colon_file(root, "/etc/passwd"), _read_colon_file(root, "/etc/group")
    user_entry = next((entry for entry in users if name in (entry[0], entry[2])), [name, "", name, "0"])
    group_id = next((entry[2] for entry in groups if group in (entry[0], entry[2])), group) if group else user_entry[3]
    return int(user_entry[2]), int(group_id)


def _read_colon_file(root: int, path: str) -> list[list[str]]:
    try:
        opened = linux.open_below(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return []
    with open(opened, encoding="utf-8", errors="replace") as file:
        entries = [line.rstrip("\n").split(":") for line in file]
    return [entry for entry in entries if len(entry) > _LAST_FIELD_INDEX]


def get(root: int, path: str, destination: Path, max_bytes: int, all_links: bool = False) -> None:
    """Copies a file or a folder to `destination`, atomically."""
    parent, name = _split_path(path)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.parent / f".polar-get-{secrets.token_hex(6)}"
    try:
        with _close_after(linux.open_below(root, parent, os.O_PATH | os.O_DIRECTORY)) as folder:
            _TreeCopy(path, max_bytes, all_links).copy_entry(folder, name, partial, PurePosixPath())
        if not os.path.lexists(partial) or partial.is_symlink():
            raise FileNotFoundError(2, "No file or folder", path)
        if destination.is_dir() and not destination.is_symlink():
            shutil.rmtree(destination)
        os.replace(partial, destination)
    finally:
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def delete(root: int, paths: list[str]) -> None:
    """Removes the entries at the paths. Links on the way are resolved as inside."""
    for path in paths:
        parent, name = _split_path(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _open_folder_inside(root, parent) as folder:
            _remove_entry(folder, name)


def list_entries(root: int, base_path: str, exclude: Collection[str] = ()) -> dict[str, FileState]:
    """The files, folders and links at and below a path, by absolute path."""
    excluded = frozenset(exclude)
    entries: dict[str, FileState] = {}
    top = posixpath.normpath(base_path)

    def visit(path: str, name: str, folder: int, depth: int) -> None:
        if path in excluded:
            return
        try:
            state = _read_state(name, folder)
            if state is None:
                return
            entries[path] = state
            if len(entries) > _MAX_ENTRIES:
                raise TransferTooLargeError(f"{base_path} holds more than {_MAX_ENTRIES} files.")
            if state.kind != "folder":
                return
            if depth > _MAX_DEPTH:
                raise TransferTooLargeError(f"{base_path} has more than {_MAX_DEPTH} folders below one another.")
            opened = os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        with _close_after(opened):
            for entry in os.listdir(opened):
                visit(posixpath.join(path, entry), entry, opened, depth + 1)

    parent, name = _split_path(top)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _open_folder_inside(root, parent) as folder:
        visit(top, name, folder, 0)
    return entries


@contextlib.contextmanager
def _open_folder_inside(root: int, path: str) -> Iterator[int]:
    with _close_after(linux.open_below(root, path, os.O_PATH | os.O_DIRECTORY)) as folder:
        yield folder


def _read_state(name: str, folder: int) -> FileState | None:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return FileState("folder", mode)
    if stat.S_ISLNK(status.st_mode):
        return FileState("link", 0, target=os.readlink(name, dir_fd=folder))
    if stat.S_ISREG(status.st_mode):
        return FileState("file", mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return None


class _TreeCopy:
    """One `get`, with its remaining allowance of bytes."""

    def __init__(self, path: str, max_bytes: int, all_links: bool) -> None:
        self._path = path
        self._all_links = all_links
        self._max_bytes = max_bytes
        self._remaining_bytes = max_bytes

    def copy_entry(self, folder: int, name: str, target: Path, relative_path: PurePosixPath) -> None:
        """Copies the entry `name` of an open folder; `relative_path` is its path below the top."""
        self._charge(_ENTRY_COST_BYTES)
        if len(relative_path.parts) > _MAX_DEPTH:
            raise TransferTooLargeError(f"{self._path} has more than {_MAX_DEPTH} folders below one another.")
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink(name, dir_fd=folder)
            if self._all_links or stays_below(relative_path, link):
                target.symlink_to(link)
        elif stat.S_ISDIR(status.st_mode):
            target.mkdir()
            with _close_after(os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=folder)) as opened:
                for entry in os.listdir(opened):
                    # The entry has vanished or changed its kind meanwhile.
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        self.copy_entry(opened, entry, target / entry, relative_path / entry)
        elif stat.S_ISREG(status.st_mode):
            # A pipe or a device may have replaced it: opening must not block, and the open file is checked again.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with _close_after(os.open(name, flags, dir_fd=folder)) as source:
                if stat.S_ISREG(os.fstat(source).st_mode):
                    self._copy_file(source, target)

    def _copy_file(self, source: int, target: Path) -> None:
        status = os.fstat(source)
        if status.st_size > self._remaining_bytes:
            self._charge(status.st_size)  # before a byte is read: a file of holes says how long it is
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 0) as file:
            while data := os.read(source, _CHUNK_BYTES):
                self._charge(len(data))
                _write(file.fileno(), data)
            os.fchmod(file.fileno(), (status.st_mode & 0o777) | 0o600)
            os.utime(file.fileno(), ns=(status.st_mtime_ns, status.st_mtime_ns))

    def _charge(self, size: int) -> None:
        self._remaining_bytes -= size
        if self._remaining_bytes < 0:
            raise TransferTooLargeError(f"{self._path} is larger than {self._max_bytes} bytes.")


def stays_below(link_path: PurePosixPath, target: str) -> bool:
    """Whether a link that stands at `link_path`, below the top of what is copied, can't lead above that top."""
    parts = PurePosixPath(target).parts
    climbs = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and ".." not in parts[climbs:] and climbs < len(link_path.parts)


def _put_entry(source: Path, folder: int, name: str, owner: Owner | None) -> None:
    found = source.lstat()
    if stat.S_ISLNK(found.st_mode):
        _remove_entry(folder, name)
        os.symlink(os.readlink(source), name, dir_fd=folder)
        if owner is not None:
            os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)
    elif stat.S_ISDIR(found.st_mode):
        with _close_after(_open_or_create_folder(folder, name, owner)) as opened:
            os.fchmod(opened, found.st_mode & 0o777 | 0o700)
            _put_children(source, opened, owner)
    elif stat.S_ISREG(found.st_mode):
        with _new_file(folder, name, found.st_mode & 0o777, owner) as target, source.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                _write(target, data)
            os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))


def _put_children(source: Path, folder: int, owner: Owner | None) -> None:
    for entry in source.iterdir():
        _put_entry(entry, folder, entry.name, owner)


def _open_or_create_folder(folder: int, name: str, owner: Owner | None) -> int:
    """The folder of that name, made where there is none; what else has the name is removed."""
    try:
        return os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError:  # a file, a link, a device
        os.unlink(name, dir_fd=folder)
    os.mkdir(name, 0o755, dir_fd=folder)
    made = os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=folder)
    if owner is not None:
        os.fchown(made, *owner)
    return made


@contextlib.contextmanager
def _new_file(folder: int, name: str, mode: int, owner: Owner | None) -> Iterator[int]:
    _remove_entry(folder, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _close_after(os.open(name, flags, 0o600, dir_fd=folder)) as target:
        yield target
        if owner is not None:
            os.fchown(target, *owner)
        os.fchmod(target, mode)


def _remove_entry(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        remove_folder(name, folder)


@contextlib.contextmanager
def _create_folders(root: int, path: str, owner: Owner | None) -> Iterator[int]:
    """A folder inside, with those above it, made where they are missing. A link to a folder counts as one; whatever
    else is in the way is removed: it must not keep a grader's files out."""
    made = PurePosixPath("/")
    with contextlib.ExitStack() as held:
        folder = held.enter_context(_close_after(linux.open_below(root, "/", os.O_RDONLY | os.O_DIRECTORY)))
        for name in PurePosixPath(path).parts[1:]:
            made /= name
            try:
                opened = linux.open_below(root, str(made), os.O_RDONLY | os.O_DIRECTORY)
            except OSError:  # not there, or something else: made anew, in the folder that is open
                opened = _open_or_create_folder(folder, name, owner)
            folder = held.enter_context(_close_after(opened))
        yield folder


def _split_path(path: str) -> tuple[str, str]:
    """The folder and the name of an absolute path; the root itself is `.` of the root."""
    if not path.startswith("/"):
        raise ValueError(f"A path inside must be absolute: {path!r}.")
    parent, name = posixpath.split(posixpath.normpath("/" + path.lstrip("/")))
    return parent, name or "."


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


@contextlib.contextmanager
def _close_after(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


# Folders that are made to be hard to remove: deeper than a stack or a path is long, without permissions. A folder's
# folders are moved up, beside one another, and emptied there in turn, so that nothing gets deep. Links are removed,
# never followed. What is in use, as a mount is, is an OSError.


def remove_folder(name: str, folder: int) -> None:
    """Removes the folder of that name in an open one. Nothing else writes to it meanwhile."""
    opened = _open_folder(name, folder)
    try:
        while entries := os.listdir(opened):
            for entry in entries:
                if _is_folder(entry, opened):
                    _flatten(entry, opened)
                else:
                    os.unlink(entry, dir_fd=opened)
    finally:
        os.close(opened)
    os.rmdir(name, dir_fd=folder)


def _flatten(name: str, folder: int) -> None:
    """Moves the folders in one up beside it, and removes the rest of it and itself."""
    opened = _open_folder(name, folder)
    try:
        for entry in os.listdir(opened):
            if _is_folder(entry, opened):
                _move_up(entry, opened, folder)
            else:
                os.unlink(entry, dir_fd=opened)
    finally:
        os.close(opened)
    os.rmdir(name, dir_fd=folder)


def _move_up(name: str, below: int, folder: int) -> None:
    os.chmod(name, 0o700, dir_fd=below)
    try:
        os.rename(name, secrets.token_hex(12), src_dir_fd=below, dst_dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove_folder(name, below)  # an overlay can't move what its image has, which is not that deep


def _open_folder(name: str, folder: int) -> int:
    os.chmod(name, 0o700, dir_fd=folder)
    return os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=folder)


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
