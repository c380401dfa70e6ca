"""A container engine's command line: the part that Docker and podman have in common."""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, Process

from polar.runtimes.base import SandboxError

CALL_SECONDS = 120.0


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

    async def call(self, *arguments: str, seconds: float = CALL_SECONDS) -> str:
        """Calls the engine; what it printed. A call is never broken off half-way: what a cancelled one made would be
        there without our knowing."""
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
            process.kill()
            await process.wait()
            raise SandboxError(f"{self.name} {arguments[0]} took longer than {seconds:g} seconds.") from None
        if process.returncode:
            raise CallError(f"{self.name} {arguments[0]}", said.decode(errors="replace").strip())
        return out.decode(errors="replace").strip()

    async def open(self, *arguments: str, stdin: int = PIPE, stdout: int = PIPE) -> Process:
        """Starts a call whose streams the caller follows."""
        command = (*self._command, *arguments)
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=stdout, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            raise SandboxError(f"{self.name} can't be started: {error}.") from error
