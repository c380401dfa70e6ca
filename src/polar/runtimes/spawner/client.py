"""The node's side of the spawner: starting a process there, following it, and keeping what it writes."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

import polar
from polar.runtimes.base import CommandResult, SandboxError
from polar.runtimes.socket_process import SocketProcess
from polar.runtimes.spawner.process import JOB_IN_FILE, MAX_MESSAGE_BYTES, UNPRIVILEGED

_SPAWNER_CODE = "import sys; sys.path.append(sys.argv[1]); from polar.runtimes.spawner.process import main; main()"
_CHUNK_BYTES = 1 << 16


class Spawner:
    """The process of `process.py`, started when it is first needed, and anew if it is gone."""

    def __init__(self, *, unprivileged: bool = False) -> None:
        package = str(Path(polar.__file__).parent.parent)
        arguments = (UNPRIVILEGED,) if unprivileged else ()
        argv = [sys.executable, "-I", "-S", "-c", _SPAWNER_CODE, package, *arguments]
        self._process = SocketProcess(argv, env={"PATH": os.defpath}, cwd="/")

    def start(self) -> None:
        self._process.connect()

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """The one that runs; what an earlier one had started is dead with it."""
        return self._process.running

    async def spawn(self, job: dict[str, Any], fds: Sequence[int]) -> "SpawnedJob":
        """Asks for a job. The descriptors are lent, and may be closed once this has returned."""
        message = msgspec.json.encode(job)
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as lent:
            try:
                read, write = os.pipe2(os.O_CLOEXEC)
                kept.callback(os.close, read)
                lent.callback(os.close, write)
                os.set_blocking(read, False)
                passed_fds = [write, *fds]
                if len(message) > MAX_MESSAGE_BYTES:
                    passed_fds.append(_create_memfd(lent, message))
                    message = JOB_IN_FILE
                socket.send_fds(self._process.connect(), [message], passed_fds)
            except OSError as error:
                raise SandboxError(f"The spawner can't be reached: {error}.") from error
            kept.pop_all()
        return SpawnedJob(read)

    def close(self) -> None:
        """Ends the spawner, and with it everything that it started."""
        self._process.close()


def _create_memfd(held: contextlib.ExitStack, content: bytes) -> int:
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


class SpawnedJob:
    """A job that was asked for, as its status pipe tells."""

    def __init__(self, status: int) -> None:
        self._status_fd = status
        self._loop = asyncio.get_running_loop()
        self._partial_line = b""
        self._pidfd: int | None = None
        self.pid: int | None = None  # known once it is named; it may be another's where the process has ended
        self._pid_known: asyncio.Future[None] = self._loop.create_future()
        self.exit_code: int | None = None
        self.error: str | None = None
        self.is_corrupted = False
        self.has_replaced_program = False
        self.ended: asyncio.Future[None] = self._loop.create_future()  # with an exit code, an error, or killed
        self.gone: asyncio.Future[None] = self._loop.create_future()  # the pipe is closed
        self._loop.add_reader(status, self._read_status)

    def _read_status(self) -> None:
        data = os.read(self._status_fd, _CHUNK_BYTES)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            status = msgspec.json.decode(line, type=_Status)
            if status.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._pidfd = os.pidfd_open(status.pid)
                    self.pid = status.pid
                _resolve(self._pid_known)
            self.error = status.error if status.error is not None else self.error
            self.is_corrupted |= status.spoiled
            self.has_replaced_program |= status.replaced
            if status.exit is not None:
                self.exit_code = status.exit
            if status.exit is not None or status.error is not None:
                _resolve(self.ended)
        if not data:
            self._stop_following()

    def _stop_following(self) -> None:
        if self._status_fd >= 0:
            self._loop.remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1
        for future in (self._pid_known, self.ended, self.gone):
            _resolve(future)

    def close(self) -> None:
        """No longer follows it."""
        self._stop_following()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    async def kill_all(self) -> None:
        """Has a supervisor kill everything below it, and waits until that is done."""
        # alive, or dead with its number not given to another: the descriptor sees to it
        process = await self.wait_for_pidfd()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGTERM)
        await self.gone

    async def wait_for_pidfd(self) -> int | None:
        """A descriptor on the process to signal, which stays this one's; None where it is gone."""
        await self._pid_known
        return self._pidfd


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class _OutputSink:
    """Takes what a command writes, as it comes, and keeps the first `max_bytes`. The rest is read and dropped, so that
    a talkative command is neither held up nor killed; so is what can't be written (`error`)."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self.is_truncated = False
        self.error: OSError | None = None  # why something was not kept
        self._remaining_bytes = max_bytes
        self._file: IO[bytes] | None = None if path is None else path.open("wb", buffering=0)
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._loop.add_reader(self._read_fd, self._read_chunk)

    def _read_chunk(self) -> int:
        data = os.read(self._read_fd, _CHUNK_BYTES)
        if not data:
            self._loop.remove_reader(self._read_fd)
        kept = data[: self._remaining_bytes]
        self._remaining_bytes -= len(kept)
        self.is_truncated |= len(kept) < len(data)
        self._write(kept)
        return len(data)

    def _write(self, data: bytes) -> None:
        """After the first failure no more is kept: a log with a gap would be misread."""
        while data and self._file is not None and self.error is None:
            try:
                data = data[self._file.write(data) :]
            except OSError as error:
                self.error = error

    def close_write_end(self) -> None:
        os.close(self.write_fd)
        self.write_fd = -1

    def close(self) -> None:
        """Takes what the command left in the pipe. A daemon that still writes to it is no reason to wait."""
        self._loop.remove_reader(self._read_fd)
        remaining = fcntl.fcntl(self._read_fd, fcntl.F_GETPIPE_SZ)
        try:
            with contextlib.suppress(BlockingIOError):
                while remaining > 0 and (size := self._read_chunk()):
                    remaining -= size
        finally:
            os.close(self._read_fd)
            if self.write_fd >= 0:
                os.close(self.write_fd)
            if self._file is not None:
                self._file.close()


async def run_command(
    spawner: Spawner,
    job: dict[str, Any],
    fds: Sequence[int],
    *,
    stdin: bytes,
    timeout: float | None,
    output: Path | None,
    max_output: int,
    kill: Callable[[SpawnedJob], Awaitable[None]],
    follow: Callable[[SpawnedJob], None] = lambda _: None,
) -> CommandResult:
    """Runs a command to its end; at the time-out, and when this is cancelled, `kill` ends it with what it started."""
    started_at = time.monotonic()
    sink = _OutputSink(output, max_output)
    timed_out = False
    try:
        with contextlib.ExitStack() as lent:
            spawned = await spawner.spawn(job, (_create_memfd(lent, stdin), sink.write_fd, *fds))
        sink.close_write_end()
        follow(spawned)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(spawned.ended)
        except TimeoutError:
            timed_out = spawned.exit_code is None
            await kill(spawned)
        except asyncio.CancelledError:
            await asyncio.shield(kill(spawned))
            raise
    finally:
        sink.close()
    if spawned.error is not None:
        raise SandboxError(f"The command could not be started: {spawned.error}.")
    if sink.error is not None:  # whoever reads the output would take it for all that the command wrote
        raise SandboxError(f"The command's output can't be written to {output}: {sink.error.strerror}.")
    return CommandResult(
        None if timed_out else spawned.exit_code,
        time.monotonic() - started_at,
        timed_out,
        output_truncated=sink.is_truncated,
    )


def mark_out_of_memory(completed: CommandResult, ran_out: bool) -> CommandResult:
    """A command that failed while a process of it was killed for want of memory ran out of it."""
    if not ran_out or completed.timed_out or completed.exit_code == 0:
        return completed
    killed = completed.exit_code in (None, 128 + signal.SIGKILL)
    code = None if killed else completed.exit_code
    return msgspec.structs.replace(completed, exit_code=code, out_of_memory=True)
