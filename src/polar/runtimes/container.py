"""A runtime that is one container. Its first process is a shell that sleeps and reaps; commands are started beside it.

The container's network is loopback alone. The gateway's port is listened on in there, by us (relay.py): no bridge,
firewall rule or name server is involved, and nothing else can be reached. Files are reached from outside, through the
container's root (inside.py, files.py), also when it is stopped.
"""

import asyncio
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from polar.runtimes import container_command, files, processes
from polar.runtimes.base import Completed, FileState, SandboxError, Spec, Spoiled
from polar.runtimes.container_cli import CallError, Cli
from polar.runtimes.inside import Inside
from polar.runtimes.namespace_worker import NamespaceWorkers
from polar.runtimes.relay import PORT, Relay

INIT = "while :; do sleep 86400 & wait; done"

_CANT_START = 126  # as shells say it
_DYING_SECONDS = 2.0  # a container takes no more commands a moment before its first process has ended


class Container:
    def __init__(
        self,
        cli: Cli,
        container: str,
        id: str,
        spec: Spec,
        *,
        user: str,
        gateway: str,
        removed: Callable[[str], object],
        workers: NamespaceWorkers | None,
    ) -> None:
        self.id = id
        self.spec = spec
        self._cli = cli
        self._container = container  # the engine's name for it
        self._user = user  # that commands run as
        self._owner: files.Owner | None = None  # the same by number, once its files can be read
        self._relay = Relay(gateway)
        self._removed = removed
        self._workers = workers  # of a node without root
        self._inside: Inside | None = None  # from the start until it is removed
        self._copies = files.Copies()
        self._stopped = False
        self._stops = 0  # how often: a command that was running then has no exit code
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        async with self._changing:
            if self._stopped:
                raise SandboxError(f"Runtime {self.id} is stopped.")
            await self._cli.call("start", self._container)
            self._inside = await self._entered()
            await asyncio.to_thread(self._make_folders, self._inside)
            await self._listen(self._inside)

    async def _entered(self) -> Inside:
        inside = await Inside.of(int(await self._state("Pid")), self._container, name_of(self.id), self._workers)
        self._copies.worker = inside.worker
        return inside

    async def _listen(self, inside: Inside) -> None:
        if self.spec.network != "none":
            await self._relay.serve(await inside.listen())

    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{PORT}"

    def path(self, inside: str) -> str:
        return inside

    async def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        output: Path | None = None,
        max_output: int = 64 * 1024 * 1024,
    ) -> Completed:
        inside = self._opened()
        if self._stopped:
            raise SandboxError(f"Runtime {self.id} is stopped.")
        killed, refused, stops = inside.out_of_memory(), inside.forks_refused(), self._stops
        try:
            completed = await container_command.run(
                self._cli,
                self._container,
                inside,
                argv,
                env={"HOME": self.spec.home, **self.spec.env, **(env or {})},
                cwd=cwd or self.spec.workdir,
                stdin=stdin,
                timeout=timeout,
                output=output,
                max_output=max_output,
            )
        except SandboxError:
            if self._stops > stops:
                return Completed(None, 0.0)
            if inside.out_of_memory() > killed:  # what else runs inside has left no room to start it
                return Completed(None, 0.0, out_of_memory=True)
            if inside.forks_refused() > refused:
                return Completed(_CANT_START, 0.0)
            if await inside.ends(_DYING_SECONDS):
                return await self._end_of_all(Completed(None, 0.0))
            raise
        if self._stops > stops:
            return msgspec.structs.replace(completed, exit_code=None)
        if inside.ended():
            return await self._end_of_all(completed)
        return processes.with_memory(completed, inside.out_of_memory() > killed)

    async def _end_of_all(self, completed: Completed) -> Completed:
        """The first process is gone, and not by us: what runs inside can bring that about (by its limits, or by writing
        to its memory), so it is held to have. An engine that is gone too, or no longer has the container, is not."""
        if await self._state("OOMKilled") == "true":  # the group's own count is gone with it
            return msgspec.structs.replace(completed, exit_code=None, out_of_memory=True)
        return msgspec.structs.replace(completed, exit_code=128 + signal.SIGKILL)

    async def put(self, source: Path | bytes, inside: str) -> None:
        """What is made for it belongs to the user that commands run as."""
        await self._copies.put(self._opened().root, source, inside, self._owner)

    async def get(self, inside: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        await self._copies.get(self._opened().root, inside, destination, max_bytes, all_links)

    async def delete(self, paths: list[str]) -> None:
        await self._copies.delete(self._opened().root, paths)

    async def entries(self, inside: str, *, without: Collection[str] = ()) -> dict[str, FileState]:
        return await self._copies.entries(self._opened().root, inside, without)

    async def stop(self) -> None:
        async with self._changing:
            await self._stop()

    async def _stop(self) -> None:
        self._stopped = True
        self._stops += 1
        await self._relay.close()
        try:
            await self._cli.call("kill", self._container)
        except CallError as error:
            if not error.says("not running", "can only kill running", "no such container"):
                raise
        if self._inside is not None:
            await self._inside.end()

    async def restart(self) -> None:
        async with self._changing:
            if self._inside is None or not self._stopped:
                raise SandboxError(f"Runtime {self.id} can't be restarted: it is not stopped, or not there.")
            await self._let_go()
            await self._cli.call("wait", self._container)  # until the engine knows what we know
            try:
                await self._cli.call("start", self._container)
            except CallError as error:
                if error.says("/bin/sh", "not a directory"):
                    raise Spoiled(f"The container can't be started over its files as they stand: {error}") from error
                raise
            try:
                self._inside = await self._entered()
            except SandboxError as error:
                if await self._state("Running") == "true":
                    raise
                raise Spoiled("The container ended as it was started over its files as they stand.") from error
            await self._listen(self._inside)
            self._stopped = False

    async def _let_go(self) -> None:
        opened, self._inside = self._inside, None
        await self._copies.done()
        if opened is not None:
            opened.close()

    async def remove(self) -> None:
        async with self._changing:
            await self._stop()
            await self._let_go()
            await discard(self._cli, self._container)
        self._removed(self.id)

    def _opened(self) -> Inside:
        if self._inside is None:
            raise SandboxError(f"Runtime {self.id} is not there: it was not started, or is removed.")
        return self._inside

    def _make_folders(self, inside: Inside) -> None:
        try:
            self._owner = inside.call(files.owner_named, self._user)
            inside.call(files.make_folders, (self.spec.workdir, self.spec.home), self._owner)
        except (OSError, ValueError) as error:
            raise SandboxError(f"The folders of user {self._user} can't be made in the container: {error}.") from error

    async def _state(self, field: str) -> str:
        return await self._cli.call("inspect", "--format", f"{{{{.State.{field}}}}}", self._container)


def name_of(id: str) -> str:
    """A container's name, and the last argument of its first process."""
    return f"polar-{id}"


async def discard(cli: Cli, container: str) -> None:
    """Kills and removes it, with its volumes. One that is gone is fine."""
    try:
        await cli.call("rm", "--force", "--volumes", container)
    except CallError as error:
        if not error.says("no such container", "already in progress"):
            raise
