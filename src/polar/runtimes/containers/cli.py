"""A container engine's command line: the part that Docker and podman have in common."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process

from polar.runtimes.base import SandboxError
from polar.runtimes.spawner.process import find_descendants

CALL_TIMEOUT_SECONDS = 120.0
_TERMINATE_TIMEOUT_SECONDS = 10.0
_CANCEL_GRACE_SECONDS = 20.0  # that a call may still take when nobody wants it any more
_MAX_OUTPUT_BYTES = 16 << 20  # bytes
_WORKING_FOLDER = "/proc"  # podman leaves a file `oom` in the folder it is called in, unless it can't


class ContainerCliError(SandboxError):
    """The engine refused."""

    def __init__(self, what: str, stderr: str) -> None:
        super().__init__(f"{what} failed: {stderr.rstrip('.?') or 'it gave no reason'}.")
        self._message = stderr.lower()

    def mentions(self, *phrases: str) -> bool:
        return any(phrase in self._message for phrase in phrases)


class ContainerCli:
    def __init__(self, *command: str) -> None:
        self.name = command[0]
        self._command = command

    async def call(self, *arguments: str, seconds: float = CALL_TIMEOUT_SECONDS, cancellable: bool = False) -> str:
        """Calls the engine, and returns what it printed. Only a `cancellable` call is broken off half-way: what another
        one made would be there without our knowing."""
        if cancellable:
            return await self._call(arguments, seconds)
        task = asyncio.ensure_future(self._call(arguments, seconds))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _, late = await asyncio.wait([task], timeout=_CANCEL_GRACE_SECONDS)
            if late:  # an engine that hangs: what it makes after all is found by the sweep
                task.cancel()
                await asyncio.wait([task])
            raise

    async def _call(self, arguments: tuple[str, ...], seconds: float) -> str:
        with contextlib.ExitStack() as held:
            out, said = (held.enter_context(os.fdopen(os.memfd_create(self.name), "rb")) for _ in range(2))
            process = await self._start(arguments, DEVNULL, out.fileno(), said.fileno())
            try:
                async with asyncio.timeout(seconds):
                    await process.wait()
            except TimeoutError:
                raise SandboxError(f"{self.name} {arguments[0]} took longer than {seconds:g} seconds.") from None
            finally:
                if process.returncode is None:
                    await _terminate(process)
            printed, complaint = (os.pread(file.fileno(), _MAX_OUTPUT_BYTES, 0) for file in (out, said))
        if process.returncode:
            raise ContainerCliError(
                f"{self.name} {arguments[0]}", (printed + complaint).decode(errors="replace").strip()
            )
        return printed.decode(errors="replace").strip()

    async def start(self, *arguments: str) -> "CliProcess":
        """Starts a call whose streams the caller follows."""
        with contextlib.ExitStack() as theirs:
            streams = []
            for _ in range(2):
                ours, inside = os.pipe2(os.O_CLOEXEC)
                theirs.callback(os.close, inside)
                streams.append((ours, inside))
            try:
                process = await self._start(arguments, PIPE, *(inside for _, inside in streams))
            except BaseException:
                for ours, _ in streams:
                    os.close(ours)
                raise
        (out, closes_out), (said, closes_said) = [await _open_reader(ours) for ours, _ in streams]
        return CliProcess(process, out, said, (closes_out, closes_said))

    async def _start(self, arguments: tuple[str, ...], stdin: int, stdout: int, stderr: int) -> Process:
        """Output goes to descriptors of our own: one that the event loop makes may be a socket, which podman's
        daemons inherit and keep open, so that its end never comes."""
        command = (*self._command, *arguments)
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, cwd=_WORKING_FOLDER
            )
        except OSError as error:
            raise SandboxError(f"{self.name} can't be started: {error}.") from error


class CliProcess:
    """A running call, with its streams."""

    def __init__(
        self,
        process: Process,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
        transports: tuple[asyncio.BaseTransport, ...],
    ) -> None:
        assert process.stdin is not None
        self.stdin = process.stdin
        self.stdout = stdout
        self.stderr = stderr
        self._process = process
        self._transports = transports

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """When nobody reads any more."""
        for transport in self._transports:
            transport.close()


async def _open_reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    return reader, transport


async def _terminate(process: Process) -> None:
    """podman runs the steps of a build below itself, and tidies up if one fails, but not if it is itself ended."""
    below = find_descendants(process.pid)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not below:
        process.terminate()
    try:
        async with asyncio.timeout(_TERMINATE_TIMEOUT_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
