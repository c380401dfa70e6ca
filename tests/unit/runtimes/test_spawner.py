"""The spawner outlives whatever is wrong with one job: every sandbox of the node dies with it."""

import errno
import os
from collections.abc import AsyncIterator

import pytest

from polar.runtimes import spawner
from polar.runtimes.processes import Spawner


@pytest.fixture
async def running() -> AsyncIterator[Spawner]:
    running = Spawner()
    running.start()
    yield running
    running.close()


@pytest.mark.parametrize("job", [{"job": "local"}, {"job": "none", "into": None, "tasks": ()}, {}])
async def test_a_job_that_is_none_is_told_so(running: Spawner, job: dict[str, object]) -> None:
    process = running.process
    asked = await running.spawn(job, ())
    await asked.gone
    assert asked.error is not None
    assert asked.error.startswith("KeyError")
    output = os.open(os.devnull, os.O_RDWR)
    argv = {"argv": ["sh", "-c", "exit 7"], "env": {"PATH": os.defpath}, "cwd": "/"}
    after = await running.spawn({"job": "local", "into": None, "tasks": (), **argv}, (output, output))
    os.close(output)
    await after.gone
    assert (after.error, after.code) == (None, 7)
    assert running.process is process
    after.close()


@pytest.mark.parametrize("job", [{"job": "kill_inside"}, {"job": "sandbox"}])
def test_only_a_command_fails_as_in_a_shell_where_there_is_no_room(job: dict[str, object]) -> None:
    told, status = os.pipe()
    spawner._refused(job, status, [], OSError(errno.EAGAIN, "no room"))
    os.close(status)
    assert os.read(told, 1000) == b'{"error": "fork: no room"}\n'
    os.close(told)
