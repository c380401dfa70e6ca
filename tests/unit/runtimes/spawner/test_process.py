"""The spawner outlives whatever is wrong with one job: every sandbox of the node dies with it."""

import asyncio
import errno
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.runtimes.spawner import client as spawner_client
from polar.runtimes.spawner import process as spawner
from polar.runtimes.spawner.client import SpawnedJob, Spawner

LIMIT_SECONDS = 60.0  # for what takes milliseconds
SLEEP = ["sleep", "1000"]
# Sends SIGTERM to a supervisor right before the named call, with no bytecode of Python between the two.
SIGNAL_BEFORE_CALL = """
import ctypes, functools, operator, os, signal, sys
sys.path.append(sys.argv[1])
from polar.runtimes.spawner import process as spawner
raise_sigterm = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGTERM)
module, name, main = {module}, {name!r}, os.getpid()
call = getattr(module, name)
def signal_before_call(*arguments):
    if os.getpid() == main:
        return call(*arguments)
    setattr(module, name, call)
    return tuple(map(operator.call, (raise_sigterm, functools.partial(call, *arguments))))[1]
setattr(module, name, signal_before_call)
spawner.main()
"""
# The first thread ends by itself, the process does not.
END_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
print("ending", flush=True)
ctypes.CDLL(None).syscall({exit}, 0)
"""


@pytest.fixture
async def running() -> AsyncIterator[Spawner]:
    running = Spawner()
    running.start()
    yield running
    running.close()


async def start(running: Spawner, argv: list[str], output: Path | str = os.devnull) -> SpawnedJob:
    job = {"job": "local", "into": None, "tasks": (), "argv": argv, "env": {"PATH": os.defpath}, "cwd": "/"}
    stdin, stdout = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT)
    try:
        return await running.spawn(job, (stdin, stdout))
    finally:
        os.close(stdin)
        os.close(stdout)


async def end(spawned: SpawnedJob) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        await spawned.kill_all()
    spawned.close()


@pytest.mark.parametrize("job", [{"job": "local"}, {"job": "none", "into": None, "tasks": ()}, {}])
async def test_a_job_that_is_none_is_told_so(running: Spawner, job: dict[str, object]) -> None:
    process = running.process
    asked = await running.spawn(job, ())
    await asked.gone
    assert asked.error is not None
    assert asked.error.startswith("KeyError")
    after = await start(running, ["sh", "-c", "exit 7"])
    await after.gone
    assert (after.error, after.exit_code) == (None, 7)
    assert running.process is process
    after.close()


@pytest.mark.parametrize("job", [{"job": "kill_inside"}, {"job": "sandbox"}])
def test_only_a_command_fails_as_in_a_shell_where_there_is_no_room(job: dict[str, object]) -> None:
    told, status = os.pipe()
    spawner._report_fork_failure(job, status, [], OSError(errno.EAGAIN, "no room"))
    os.close(status)
    assert os.read(told, 1000) == b'{"error": "fork: no room"}\n'
    os.close(told)


@pytest.mark.parametrize(("module", "name"), [("os", "waitpid"), ("signal", "sigwaitinfo")])
async def test_a_supervisor_takes_a_signal_that_arrives_just_before_it_waits(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setattr(spawner_client, "_SPAWNER_CODE", SIGNAL_BEFORE_CALL.format(module=module, name=name))
    running = Spawner()
    try:
        spawned = await start(running, SLEEP)
        async with asyncio.timeout(LIMIT_SECONDS):
            await spawned.gone
        assert (spawned.error, spawned.exit_code) == (None, None)
        spawned.close()
    finally:
        running.close()


async def kill_at_random_moments(running: Spawner, kills: int) -> None:
    moments = random.Random(kills)
    for _ in range(kills):
        spawned = await start(running, SLEEP)
        await spawned.wait_for_pidfd()
        await asyncio.sleep(moments.uniform(0, 0.004))
        await end(spawned)


async def test_a_supervisor_ends_whenever_it_is_killed(running: Spawner) -> None:
    await asyncio.gather(*(kill_at_random_moments(running, 60 + worker) for worker in range(3)))


async def test_a_process_whose_first_thread_has_ended_is_killed(running: Spawner, tmp_path: Path) -> None:
    exit_of_thread = {"x86_64": 60}.get(os.uname().machine, 93)
    output = tmp_path / "output"
    spawned = await start(running, [sys.executable, "-c", END_FIRST_THREAD.format(exit=exit_of_thread)], output)
    async with asyncio.timeout(LIMIT_SECONDS):
        while not output.read_text():  # noqa: ASYNC110  a file has no event
            await asyncio.sleep(0.01)
    await end(spawned)


async def test_a_command_starts_with_no_signal_blocked_or_ignored(running: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "output"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGTERM))
    quitting = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a shell does for what it starts in the background
    try:
        running.close()
        running.start()
    finally:
        signal.signal(signal.SIGQUIT, quitting)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    spawned = await start(running, ["cat", "/proc/self/status"], output)
    async with asyncio.timeout(LIMIT_SECONDS):
        await spawned.gone
    spawned.close()
    lines = (line.split(":", 1) for line in output.read_text().splitlines())
    of_libc = 1 << 31 | 1 << 32  # signals 32 and 33, which no program can set
    names = ("SigBlk", "SigIgn", "SigPnd", "ShdPnd")
    masks = {name: int(value, 16) & ~of_libc for name, value in lines if name in names}
    assert masks == {"SigBlk": 0, "SigIgn": 0, "SigPnd": 0, "ShdPnd": 0}
