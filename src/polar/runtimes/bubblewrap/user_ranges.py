"""User ids outside for what runs inside, a range for each sandbox.

The kernel counts inotify instances, message queues, pending signals, pipes, epoll entries and more by user id. Were all
sandboxes root outside, one could use up what its neighbours and the machine's root need.

A range is locked, by a byte in a file that all nodes of the machine share, and has a user namespace whose ids it is.
The namespace belongs to the first of them, too: what is counted within a namespace is also counted for its owner. Both
are kept for the next sandbox, until the node ends.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from pathlib import Path

from msgspec import Struct

from polar.runtimes.base import SandboxError
from polar.runtimes.spawner.client import Spawner

RANGE_SIZE = 65536  # ids in a range, as in an image
FIRST_ID = 0x7000_0000  # above what systemd gives to containers
_RANGE_COUNT = 0xFFE  # below what systemd keeps for foreign images
_LOCK_FILE = Path("/run/polar.uids")
_FLOCK_FORMAT = "hhqqi4x"  # struct flock of 64 bits: type, whence, start, length, process


class UserRange(Struct, frozen=True):
    first_id: int  # id, of a user and of a group
    namespace_fd: int  # a descriptor


class UserRanges:
    """Those that this process holds."""

    def __init__(self, spawner: Spawner, locks: Path = _LOCK_FILE) -> None:
        if not _can_map_ranges():
            raise SandboxError("this process runs in a user namespace that has too few of them")
        self._spawner = spawner
        self._file = os.open(locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._locked: set[int] = set()
        self._free: list[UserRange] = []

    async def acquire(self) -> UserRange:
        """One that nobody else has."""
        if self._free:
            return self._free.pop()
        number = self._lock_any()
        first = FIRST_ID + number * RANGE_SIZE
        try:
            return UserRange(first, await self._create_namespace(first))
        except BaseException:  # a cancellation too
            self._unlock(number)
            raise

    def release(self, user_range: UserRange) -> None:
        if self._file >= 0:
            self._free.append(user_range)
        else:
            os.close(user_range.namespace_fd)

    def _lock_any(self) -> int:
        start = secrets.randbelow(_RANGE_COUNT)
        for number in ((start + step) % _RANGE_COUNT for step in range(_RANGE_COUNT)):
            if number not in self._locked and self._lock(number, fcntl.F_WRLCK):
                self._locked.add(number)
                return number
        raise SandboxError(f"All {_RANGE_COUNT} ranges of user ids of this machine are in use.")

    def _unlock(self, number: int) -> None:
        self._locked.discard(number)
        if self._file >= 0:
            self._lock(number, fcntl.F_UNLCK)

    def _lock(self, number: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK_FORMAT, kind, os.SEEK_SET, number, 1, 0))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    async def _create_namespace(self, first: int) -> int:
        job = {"job": "user_namespace", "into": None, "tasks": (), "first": first}
        held, holding = os.pipe2(os.O_CLOEXEC)
        try:  # the process stays until `holding` is closed
            try:
                spawned = await self._spawner.spawn(job, (held,))
            finally:
                os.close(held)
            with contextlib.closing(spawned):
                await spawned.wait_for_pidfd()
                if spawned.pid is None:
                    raise SandboxError(f"No user namespace can be made: {spawned.error or 'the spawner is gone'}.")
                return _map_ids(Path(f"/proc/{spawned.pid}"), first)
        except OSError as error:
            raise SandboxError(f"A user namespace can't be given its ids: {error}.") from error
        finally:
            os.close(holding)

    def close(self) -> None:
        """The locks fall with the file."""
        for users in self._free:
            os.close(users.namespace_fd)
        self._free.clear()
        os.close(self._file)
        self._file = -1


def _map_ids(process: Path, first: int) -> int:
    """To the user namespace of a process; a descriptor of it."""
    for name in ("uid_map", "gid_map"):
        (process / name).write_text(f"0 {first} {RANGE_SIZE}")
    return os.open(process / "ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _can_map_ranges() -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, length = (int(word) for word in line.split())
        if inside <= FIRST_ID and inside + length >= FIRST_ID + _RANGE_COUNT * RANGE_SIZE:
            return True
    return False
