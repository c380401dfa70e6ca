"""A container engine's command line: the part that Docker and podman have in common."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process

from polar.runtimes.base import SandboxError
from polar.runtimes.spawner import descendants

CALL_SECONDS = 120.0
_ENDING_SECONDS = 10.0
_NOWHERE = "/proc"  # podman leaves a file `oom` in the folder it is called in, unless it can't


class CallError(SandboxError):
    """The engine refused."""

    def __init__(self, what: str, said: str) -> None:
        super().__init__(f"{what} failed: {said.rstrip('.?') or 'it gave no reason'}.")
        self._said = said.lower()

    def says(self, *phrases: str) -> bool:
        return any(phrase in self._said for phrase in phrases)


class Cli:
    def __init__(self, *command: str) -> None:
        self.name = command[0]
        self._command = command

    async def call(self, *arguments: str, seconds: float = CALL_SECONDS, breakable: bool = False) -> str:
        """Calls the engine; what it printed. Only a `breakable` call is broken off half-way: what another made, once
        cancelled, would be there without our knowing."""
        if breakable:
            return await self._call(arguments, seconds)
        task = asyncio.ensure_future(self._call(arguments, seconds))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _call(self, arguments: tuple[str, ...], seconds: float) -> str:
        process = await self.open(*arguments, stdin=DEVNULL)
        try:
            out, said = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            raise SandboxError(f"{self.name} {arguments[0]} took longer than {seconds:g} seconds.") from None
        finally:
            if process.returncode is None:
                await _end(process)
        if process.returncode:
            raise CallError(f"{self.name} {arguments[0]}", (out + said).decode(errors="replace").strip())
        return out.decode(errors="replace").strip()

    async def open(self, *arguments: str, stdin: int = PIPE, stdout: int = PIPE) -> Process:
        """Starts a call whose streams the caller follows."""
        command = (*self._command, *arguments)
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=stdout, stderr=PIPE, start_new_session=True, cwd=_NOWHERE
            )
        except OSError as error:
            raise SandboxError(f"{self.name} can't be started: {error}.") from error


async def _end(process: Process) -> None:
    """podman runs the steps of a build below itself, and tidies up if one fails, but not if it is itself ended."""
    below = descendants(process.pid)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not below:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _ENDING_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
