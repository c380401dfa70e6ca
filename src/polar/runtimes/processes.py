"""The node's side of the spawner: starting a process there, following it, and keeping what it writes."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

import polar
from polar.runtimes.base import Completed, SandboxError
from polar.runtimes.spawner import IN_FILE, MESSAGE, UNPRIVILEGED

_CODE = "import sys; sys.path.append(sys.argv[1]); from polar.runtimes.spawner import main; main()"
_CHUNK = 1 << 16


class Spawner:
    """The process of `spawner.py`, started when it is first needed, and anew if it is gone."""

    def __init__(self, *, unprivileged: bool = False) -> None:
        self._arguments = (UNPRIVILEGED,) if unprivileged else ()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        self._connected()

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """The one that runs; what an earlier one had started is dead with it."""
        return self._process if self._process is not None and self._process.poll() is None else None

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._socket is None or self._process is None or self._process.poll() is not None:
                self.close()
                ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                package = str(Path(polar.__file__).parent.parent)
                argv = [sys.executable, "-I", "-S", "-c", _CODE, package, *self._arguments]
                environment = {"PATH": os.defpath}
                with its:
                    self._process = subprocess.Popen(
                        argv,
                        stdin=its.fileno(),
                        stdout=subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,
                        cwd="/",
                    )
                self._socket = ours
            return self._socket

    async def spawn(self, job: dict[str, Any], fds: Sequence[int]) -> "Spawned":
        """Asks for a job. The descriptors are lent, and may be closed once this has returned."""
        told = msgspec.json.encode(job)
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as lent:
            try:
                read, write = os.pipe2(os.O_CLOEXEC)
                kept.callback(os.close, read)
                lent.callback(os.close, write)
                os.set_blocking(read, False)
                given = [write, *fds]
                if len(told) > MESSAGE:
                    given.append(_file(lent, told))
                    told = IN_FILE
                socket.send_fds(self._connected(), [told], given)
            except OSError as error:
                raise SandboxError(f"The spawner can't be reached: {error}.") from error
            kept.pop_all()
        return Spawned(read)

    def close(self) -> None:
        """Ends the spawner, and with it everything that it started."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None


def _file(held: contextlib.ExitStack, content: bytes) -> int:
    """An open file with this content, for as long as it is held."""
    fd = os.memfd_create("polar")
    held.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _Status(msgspec.Struct):
    pid: int | None = None
    replaced: bool = False
    error: str | None = None
    spoiled: bool = False
    exit: int | None = None


class Spawned:
    """A job that was asked for, as its status pipe tells."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._loop = asyncio.get_running_loop()
        self._lines = b""
        self._process: int | None = None
        self.pid: int | None = None  # known once it is named; it may be another's where the process has ended
        self._named: asyncio.Future[None] = self._loop.create_future()
        self.code: int | None = None
        self.error: str | None = None
        self.spoiled = False
        self.replaced = False
        self.ended: asyncio.Future[None] = self._loop.create_future()  # with an exit code, an error, or killed
        self.gone: asyncio.Future[None] = self._loop.create_future()  # the pipe is closed
        self._loop.add_reader(status, self._read)

    def _read(self) -> None:
        data = os.read(self._status, _CHUNK)
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            told = msgspec.json.decode(line, type=_Status)
            if told.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process = os.pidfd_open(told.pid)
                    self.pid = told.pid
                _done(self._named)
            self.error = told.error if told.error is not None else self.error
            self.spoiled |= told.spoiled
            self.replaced |= told.replaced
            if told.exit is not None:
                self.code = told.exit
            if told.exit is not None or told.error is not None:
                _done(self.ended)
        if not data:
            self._no_more()

    def _no_more(self) -> None:
        if self._status >= 0:
            self._loop.remove_reader(self._status)
            os.close(self._status)
            self._status = -1
        for future in (self._named, self.ended, self.gone):
            _done(future)

    def close(self) -> None:
        """No longer follows it."""
        self._no_more()
        if self._process is not None:
            os.close(self._process)
            self._process = None

    async def end_all(self) -> None:
        """Has a supervisor kill everything below it, and waits until that is done."""
        process = await self.process()  # alive, or dead with its number not given to another: the descriptor sees to it
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGTERM)
        await self.gone

    async def process(self) -> int | None:
        """A descriptor on the process to signal, which stays this one's; None where it is gone."""
        await self._named
        return self._process


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class _Output:
    """Takes what a command writes, as it comes, and keeps the first `most` bytes. The rest is read and dropped, so that
    a talkative command is neither held up nor killed."""

    def __init__(self, path: Path | None, most: int) -> None:
        self.cut = False
        self._left = most
        self._file: IO[bytes] | None = None if path is None else path.open("wb", buffering=0)
        self._loop = asyncio.get_running_loop()
        self._read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._loop.add_reader(self._read, self._take)

    def _take(self) -> int:
        data = os.read(self._read, _CHUNK)
        if not data:
            self._loop.remove_reader(self._read)
        kept = data[: self._left]
        self._left -= len(kept)
        self.cut |= len(kept) < len(data)
        if self._file is not None and kept:
            self._file.write(kept)
        return len(data)

    def started(self) -> None:
        os.close(self.write)
        self.write = -1

    def close(self) -> None:
        """Takes what the command left in the pipe. A daemon that still writes to it is no reason to wait."""
        self._loop.remove_reader(self._read)
        left = fcntl.fcntl(self._read, fcntl.F_GETPIPE_SZ)
        try:
            with contextlib.suppress(BlockingIOError):
                while left > 0 and (taken := self._take()):
                    left -= taken
        finally:
            os.close(self._read)
            if self.write >= 0:
                os.close(self.write)
            if self._file is not None:
                self._file.close()


async def run(
    spawner: Spawner,
    job: dict[str, Any],
    fds: Sequence[int],
    *,
    stdin: bytes,
    timeout: float | None,
    output: Path | None,
    max_output: int,
    kill: Callable[[Spawned], Awaitable[None]],
    follow: Callable[[Spawned], None] = lambda _: None,
) -> Completed:
    """Runs a command to its end; at the time-out, and when this is cancelled, `kill` ends it with what it started."""
    began = time.monotonic()
    taken = _Output(output, max_output)
    timed_out = False
    try:
        with contextlib.ExitStack() as lent:
            spawned = await spawner.spawn(job, (_file(lent, stdin), taken.write, *fds))
        taken.started()
        follow(spawned)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(spawned.ended)
        except TimeoutError:
            timed_out = spawned.code is None
            await kill(spawned)
        except asyncio.CancelledError:
            await asyncio.shield(kill(spawned))
            raise
    finally:
        taken.close()
    if spawned.error is not None:
        raise SandboxError(f"The command could not be started: {spawned.error}.")
    return Completed(None if timed_out else spawned.code, time.monotonic() - began, timed_out, output_cut=taken.cut)


def with_memory(completed: Completed, ran_out: bool) -> Completed:
    """A command that failed while a process of it was killed for want of memory ran out of it."""
    if not ran_out or completed.timed_out or completed.exit_code == 0:
        return completed
    killed = completed.exit_code in (None, 128 + signal.SIGKILL)
    code = None if killed else completed.exit_code
    return msgspec.structs.replace(completed, exit_code=code, out_of_memory=True)
