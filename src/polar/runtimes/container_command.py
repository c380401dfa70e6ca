"""A command in a container, from its `exec` to its end.

The engine's client is only a pair of pipes: killing it leaves the command running inside. So what it starts first is a
shell that tells its process id and waits; that process is put into a cgroup of its own, hears what to run, and becomes
it. Environment and arguments come that way too: everyone on the machine can read the client's own arguments, and
everyone who may inspect a container its settings.

A daemon that keeps a command's output open is not waited for, but Docker takes two seconds to find out.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import time
from pathlib import Path

from polar.runtimes.base import CommandResult
from polar.runtimes.cgroups import Cgroup
from polar.runtimes.container_cli import CALL_TIMEOUT_SECONDS, CliProcess, ContainerCli, ContainerCliError
from polar.runtimes.running_container import ContainerProcesses, RunningContainer, cgroup_contains

# Standard error carries nothing of the command, so that the engine's own complaints are told from it. What is read is
# run at a line with the mark ($0), not if it ends before. Shells read a pipe byte by byte: the rest is the command's.
WAIT_SCRIPT = """echo "$0 $$" >&2
s=; while IFS= read -r l; do
[ "$l" = "$0" ] && { eval "$s"; exit; }
s="$s$l
"; done; exit 1"""

_KILL_GRACE_SECONDS = 10.0  # the client of a killed command ends by itself, or is ended
_CHUNK_BYTES = 1 << 16


async def run(
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
