"""A runtime that is one container. Its first process is a shell that sleeps and reaps; commands are started beside it.

The container's network is loopback alone. The gateway's port is listened on in there, by us (relay.py): no bridge,
firewall rule or name server is involved, and nothing else can be reached. Files are reached from outside, through the
container's root (processes.py, files.py), also when it is stopped.

A command is started with the engine's `exec`, whose client is only a pair of pipes: killing it leaves the command
running inside. So what it starts first is a shell that tells its process id and waits; that process is put into a
cgroup of its own, hears what to run, and becomes it. Environment and arguments come that way too: everyone can read the
client's own arguments, and everyone who may inspect a container its settings.

A daemon that keeps a command's output open is not waited for, but Docker takes two seconds to find out.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from polar.runtimes import files
from polar.runtimes.base import CommandResult, CorruptedRuntimeError, FileState, RuntimeSpec, SandboxError
from polar.runtimes.cgroups import Cgroup
from polar.runtimes.containers.cli import CALL_TIMEOUT_SECONDS, CliProcess, ContainerCli, ContainerCliError
from polar.runtimes.containers.processes import ContainerProcesses, RunningContainer, cgroup_contains
from polar.runtimes.namespace_worker import NamespaceWorkers
from polar.runtimes.relay import GATEWAY_PORT, GatewayRelay
from polar.runtimes.spawner.client import mark_out_of_memory

INIT_SCRIPT = "while :; do sleep 86400 & wait; done"

# Standard error carries nothing of the command, so that the engine's own complaints are told from it. What is read is
# run at a line with the mark ($0), not if it ends before. Shells read a pipe byte by byte: the rest is the command's.
WAIT_SCRIPT = """echo "$0 $$" >&2
s=; while IFS= read -r l; do
[ "$l" = "$0" ] && { eval "$s"; exit; }
s="$s$l
"; done; exit 1"""

_KILL_GRACE_SECONDS = 10.0  # the client of a killed command ends by itself, or is ended
_CHUNK_BYTES = 1 << 16
_EXIT_NOT_EXECUTABLE = 126  # as shells say it
_DEATH_GRACE_SECONDS = 2.0  # a container takes no more commands a moment before its first process has ended


class ContainerRuntime:
    def __init__(
        self,
        cli: ContainerCli,
        container: str,
        id: str,
        spec: RuntimeSpec,
        *,
        user: str,
        gateway: str,
        on_removed: Callable[[str], object],
        workers: NamespaceWorkers | None,
    ) -> None:
        self.id = id
        self.spec = spec
        self._cli = cli
        self._container = container  # the engine's name for it
        self._user = user  # that commands run as
        self._owner: files.Owner | None = None  # the same by number, once its files can be read
        self._relay = GatewayRelay(gateway)
        self._on_removed = on_removed
        self._workers = workers  # of a node without root
        self._running: RunningContainer | None = None  # from the start until it is removed
        self._transfers = files.FileTransfers()
        self._stopped = False
        self._stop_count = 0  # how often: a command that was running then has no exit code
        self._lifecycle_lock = asyncio.Lock()

    async def start(self) -> None:
        async with self._lifecycle_lock:
            if self._stopped:
                raise SandboxError(f"Runtime {self.id} is stopped.")
            await self._cli.call("start", self._container)
            self._running = await self._enter()
            await asyncio.to_thread(self._make_folders, self._running)
            await self._listen(self._running)

    async def _enter(self) -> RunningContainer:
        inside = await RunningContainer.attach(
            int(await self._inspect_state("Pid")), self._container, make_container_name(self.id), self._workers
        )
        self._transfers.worker = inside.worker
        return inside

    async def _listen(self, running: RunningContainer) -> None:
        if self.spec.network != "none":
            await self._relay.serve(await running.listen())

    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{GATEWAY_PORT}"

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
    ) -> CommandResult:
        inside = self._require_running()
        if self._stopped:
            raise SandboxError(f"Runtime {self.id} is stopped.")
        killed, refused, stops = inside.count_oom_kills(), inside.count_refused_forks(), self._stop_count
        try:
            completed = await _run_command(
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
            if self._stop_count > stops:
                return CommandResult(None, 0.0)
            if inside.count_oom_kills() > killed:  # what else runs inside has left no room to start it
                return CommandResult(None, 0.0, out_of_memory=True)
            if inside.count_refused_forks() > refused:
                return CommandResult(_EXIT_NOT_EXECUTABLE, 0.0)
            if await inside.wait_for_end(_DEATH_GRACE_SECONDS):
                return await self._explain_death(CommandResult(None, 0.0))
            raise
        if self._stop_count > stops:
            return msgspec.structs.replace(completed, exit_code=None)
        if inside.has_ended():
            return await self._explain_death(completed)
        return mark_out_of_memory(completed, inside.count_oom_kills() > killed)

    async def _explain_death(self, completed: CommandResult) -> CommandResult:
        """The first process is gone, and not by us: what runs inside can bring that about (by its limits, or by writing
        to its memory), so it is held to have. An engine that is gone too, or no longer has the container, is not."""
        if await self._inspect_state("OOMKilled") == "true":  # the group's own count is gone with it
            return msgspec.structs.replace(completed, exit_code=None, out_of_memory=True)
        return msgspec.structs.replace(completed, exit_code=128 + signal.SIGKILL)

    async def put(self, source: Path | bytes, path: str) -> None:
        """What is made for it belongs to the user that commands run as."""
        await self._transfers.put(self._require_running().root, source, path, self._owner)

    async def get(self, path: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        await self._transfers.get(self._require_running().root, path, destination, max_bytes, all_links)

    async def delete(self, paths: list[str]) -> None:
        await self._transfers.delete(self._require_running().root, paths)

    async def list_entries(self, path: str, *, exclude: Collection[str] = ()) -> dict[str, FileState]:
        return await self._transfers.list_entries(self._require_running().root, path, exclude)

    async def stop(self) -> None:
        async with self._lifecycle_lock:
            await self._stop()

    async def _stop(self) -> None:
        self._stopped = True
        self._stop_count += 1
        await self._relay.close()
        try:
            await self._cli.call("kill", self._container)
        except ContainerCliError as error:
            if not error.mentions("not running", "can only kill running", "no such container"):
                raise
        if self._running is not None:
            await self._running.wait_until_ended()

    async def restart(self) -> None:
        async with self._lifecycle_lock:
            if self._running is None or not self._stopped:
                raise SandboxError(f"Runtime {self.id} can't be restarted: it is not stopped, or not there.")
            await self._release()
            await self._cli.call("wait", self._container)  # until the engine knows what we know
            try:
                await self._cli.call("start", self._container)
            except ContainerCliError as error:
                if error.mentions("/bin/sh", "not a directory"):
                    raise CorruptedRuntimeError(
                        f"The container can't be started over its files as they stand: {error}"
                    ) from error
                raise
            try:
                self._running = await self._enter()
            except SandboxError as error:
                if await self._inspect_state("Running") == "true":
                    raise
                raise CorruptedRuntimeError(
                    "The container ended as it was started over its files as they stand."
                ) from error
            await self._listen(self._running)
            self._stopped = False

    async def _release(self) -> None:
        opened, self._running = self._running, None
        await self._transfers.wait_until_idle()
        if opened is not None:
            opened.close()

    async def remove(self) -> None:
        async with self._lifecycle_lock:
            await self._stop()
            await self._release()
            await remove_container(self._cli, self._container)
        self._on_removed(self.id)

    def _require_running(self) -> RunningContainer:
        if self._running is None:
            raise SandboxError(f"Runtime {self.id} is not there: it was not started, or is removed.")
        return self._running

    def _make_folders(self, running: RunningContainer) -> None:
        try:
            self._owner = running.call(files.resolve_owner, self._user)
            running.call(files.make_folders, (self.spec.workdir, self.spec.home), self._owner)
        except (OSError, ValueError) as error:
            raise SandboxError(f"The folders of user {self._user} can't be made in the container: {error}.") from error

    async def _inspect_state(self, field: str) -> str:
        return await self._cli.call("inspect", "--format", f"{{{{.State.{field}}}}}", self._container)


def make_container_name(id: str) -> str:
    """A container's name, and the last argument of its first process."""
    return f"polar-{id}"


async def remove_container(cli: ContainerCli, container: str) -> None:
    """Kills and removes it, with its volumes. One that is gone is fine."""
    try:
        await cli.call("rm", "--force", "--volumes", container)
    except ContainerCliError as error:
        if not error.mentions("no such container", "already in progress"):
            raise


# Commands.


async def _run_command(
    cli: ContainerCli,
    container: str,
    running: RunningContainer,
    argv: list[str],
    *,
    env: dict[str, str],
    cwd: str,
    stdin: bytes,
    timeout: float | None,
    output: Path | None,
    max_output: int,
) -> CommandResult:
    mark = secrets.token_hex(8)
    client = await cli.start("exec", "--interactive", container, "/bin/sh", "-c", WAIT_SCRIPT, mark)
    group: Cgroup | ContainerProcesses | None = None
    output_task = asyncio.create_task(_save_output(client, output, max_output))
    tasks: list[asyncio.Task[None] | asyncio.Task[bool] | asyncio.Task[bytes]] = [output_task]
    try:
        with running.allow_engine_processes():
            inner_pid = await _read_inner_pid(cli, client, mark)
        group = running.create_cgroup()
        pid = await asyncio.to_thread(running.move_process, inner_pid, group)
        began = time.monotonic()
        tasks.append(asyncio.create_task(_send_stdin(client, build_script(argv, env, cwd, mark) + stdin)))
        tasks.append(stderr_task := asyncio.create_task(client.stderr.read()))
        timed_out = not await _wait_for_exit(client, timeout)
        seconds = time.monotonic() - began
        if timed_out:
            await group.kill()
            if not await _wait_for_exit(client, _KILL_GRACE_SECONDS):
                client.kill()
        cut, said = await output_task, await stderr_task
        if not timed_out and cgroup_contains(group, pid):
            raise ContainerCliError(f"{cli.name} exec", said.decode(errors="replace").strip())
    except BaseException:
        if group is not None:
            await asyncio.shield(group.kill())  # nobody waits for it any more
        raise
    finally:
        if client.returncode is None:
            client.kill()
        for task in tasks:
            task.cancel()
        await asyncio.gather(client.wait(), *tasks, return_exceptions=True)
        client.close()
        if group is not None:
            group.remove_if_empty()
    return CommandResult(None if timed_out else client.returncode, seconds, timed_out, output_truncated=cut)


def build_script(argv: list[str], env: dict[str, str], cwd: str, mark: str) -> bytes:
    """What the waiting shell is told."""
    words = ["env", *(f"{name}={value}" for name, value in env.items()), *argv]
    return os.fsencode(f"exec 2>&1\ncd -- {shlex.quote(cwd)} || exit 126\nexec {shlex.join(words)}\n{mark}\n")


async def _read_inner_pid(cli: ContainerCli, client: CliProcess, mark: str) -> int:
    """Waits for the shell inside; its id there."""
    said = b""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
            async for line in client.stderr:  # engines may warn of this and that before
                if line.startswith(mark.encode()):
                    return int(line.split()[1])
                said += line
    except TimeoutError:
        said += f"it took longer than {CALL_TIMEOUT_SECONDS:g} seconds".encode()
    raise ContainerCliError(f"{cli.name} exec", said.decode(errors="replace").strip())


async def _send_stdin(client: CliProcess, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a command need not read
        client.stdin.write(data)
        await client.stdin.drain()
    client.stdin.close()


async def _save_output(client: CliProcess, output: Path | None, max_bytes: int) -> bool:
    """Keeps the first bytes of what comes. The rest is read and dropped, so that a talkative command is not held up.
    Whether there was a rest."""
    kept, cut = 0, False
    with Path(output or os.devnull).open("wb", buffering=0) as file:  # noqa: ASYNC230 (pages in memory)
        while data := await client.stdout.read(_CHUNK_BYTES):
            cut |= len(data) > max_bytes - kept
            kept += file.write(data[: max_bytes - kept]) or 0
    return cut


async def _wait_for_exit(client: CliProcess, seconds: float | None) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await client.wait()
    except TimeoutError:
        return False
    return True
