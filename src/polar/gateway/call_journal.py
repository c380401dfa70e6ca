"""A file with the calls that a gateway is answering, so that a killed process's calls are recorded as `interrupted`.

    Generation --start--> journal file --(the process is killed)--> read_journal --> Store.record_interrupted

A line of the file is a call that has started, or the id of a call that ended and must not be recorded.

The journal is a file, not a table of the store: a line costs microseconds, while a row costs a transaction, which is
more than a short call's own record. The kernel has the line when `start` returns, so it survives kill -9. Nothing is
written when a call is recorded: the store skips calls whose exchange it has.
"""

import errno
import logging
import os
from pathlib import Path

import msgspec

from polar.records.exchange import StartedCall

log = logging.getLogger(__name__)

MAX_JOURNAL_BYTES = 256 * 1024
"""Size at which the journal is rewritten with the running calls only. If those take more, the limit grows."""

_encoder = msgspec.json.Encoder()


class CallJournal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: dict[str, StartedCall] = {}
        self._fd = _open_for_appending(path)
        self._size_bytes = 0
        self._limit_bytes = MAX_JOURNAL_BYTES
        self._failed = False

    @property
    def running(self) -> list[StartedCall]:
        return list(self._running.values())

    def start(self, call: StartedCall) -> None:
        self._running[call.exchange_id] = call
        self._write(call)

    def mark_recorded(self, exchange_id: str) -> None:
        self._running.pop(exchange_id, None)

    def drop(self, exchange_id: str) -> None:
        """Removes a call that has ended and must not be recorded."""
        if self._running.pop(exchange_id, None) is not None:
            self._write(exchange_id)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, entry: StartedCall | str) -> None:
        line = _encoder.encode(entry) + b"\n"
        try:
            if self._size_bytes + len(line) > self._limit_bytes:
                self._rewrite()
            # A full disk may have cut the last line: start a new one.
            _write_all(self._fd, b"\n" + line if self._failed else line)
        except OSError as error:
            if not self._failed:
                log.warning("If this process is killed, calls under way will not be listed as interrupted: %s", error)
            self._failed = True
            return
        self._failed = False
        self._size_bytes += len(line)

    def _rewrite(self) -> None:
        """Writes the running calls to a new file and renames it: a process killed here leaves the old journal or the
        new one."""
        lines = b"".join(_encoder.encode(call) + b"\n" for call in self._running.values())
        unfinished = self._path.with_suffix(".partial")
        fd = _open_for_appending(unfinished)
        try:
            os.ftruncate(fd, 0)
            _write_all(fd, lines)
            unfinished.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        self._size_bytes = len(lines)
        self._limit_bytes = max(MAX_JOURNAL_BYTES, 2 * len(lines))


def _open_for_appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, data: bytes) -> None:
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_journal(path: Path) -> list[StartedCall]:
    """Reads the calls that were running when the journal's process ended. The store may have recorded some of them."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    calls: dict[str, StartedCall] = {}
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=StartedCall | str)
        except msgspec.DecodeError:  # a line cut by the end of the process or by a full disk
            continue
        if isinstance(entry, StartedCall):
            calls[entry.exchange_id] = entry
        else:
            calls.pop(entry, None)
    return list(calls.values())
