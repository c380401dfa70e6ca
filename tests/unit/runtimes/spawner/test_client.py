"""Following a command: what happens when its end and a cancellation come together."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polar.runtimes.spawner.client import SpawnedJob, run_command


class EndingSpawner:
    """Starts nothing. The command has ended when the test says so."""

    def __init__(self) -> None:
        self._read, self._status = os.pipe()
        os.set_blocking(self._read, False)

    async def spawn(self, job: dict[str, Any], fds: Sequence[int]) -> SpawnedJob:
        return SpawnedJob(self._read)

    def end_command(self) -> None:
        os.write(self._status, b'{"exit": 0}\n')

    def close(self) -> None:
        os.close(self._status)


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancellation_is_never_lost(tmp_path: Path, steps: int) -> None:
    """Not even in the very step of the event loop in which the command ends: the caller would go on as if nobody had
    told it to stop."""
    spawner = EndingSpawner()
    followed: asyncio.Future[SpawnedJob] = asyncio.get_running_loop().create_future()

    async def kill(spawned: SpawnedJob) -> None:
        spawned.close()

    running = asyncio.ensure_future(
        run_command(
            spawner, {}, (), stdin=b"", timeout=600.0, output=tmp_path / "out", max_output=1, kill=kill,
            follow=followed.set_result,
        )
    )  # fmt: skip
    spawned = await followed
    spawner.end_command()
    await spawned.ended
    for _ in range(steps):
        await asyncio.sleep(0)
    was_cancelled = running.cancel()
    await asyncio.wait({running})
    assert running.cancelled() == was_cancelled
    spawned.close()
    spawner.close()
