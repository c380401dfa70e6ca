"""kill -9 of the rollout server, again and again, while tasks come in, run and end, and results are read."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from tests.fault.service.cluster import ASK, Cluster, load, quick, task, until_there

UNWANTED = {"stopped": (None, "early_stop"), "cancelled": (None, "cancelled")}
"""How samples of these tasks may end."""


@contextlib.asynccontextmanager
async def unwanted(cluster: Cluster) -> AsyncIterator[None]:
    """Tasks of which not every sample is wanted, meanwhile."""

    async def go_on() -> None:
        for number in count():
            await cluster.submit(quick(f"stopped-{number}", 4, early_stop_min_usable_sessions=1))
            await cluster.submit(quick(f"cancelled-{number}", 3))
            await cluster.client.cancel(f"cancelled-{number}")
            await asyncio.sleep(0.5)
            if over.is_set():
                return

    over = asyncio.Event()
    submitting = asyncio.create_task(go_on())
    try:
        yield
    except BaseException:
        submitting.cancel()
        raise
    over.set()
    await submitting


async def killed(folder: Path, times: int, nodes: int, seed: int) -> None:
    moments = random.Random(seed)
    async with Cluster(folder) as cluster:
        names = [f"node{number}" for number in range(nodes)]
        await asyncio.gather(*(cluster.node(name) for name in names))
        await cluster.joined(*names)
        async with load(cluster, 0.1), unwanted(cluster):
            for number in range(times):
                ended = len(cluster.reader.got)
                await cluster.reader.until(lambda: len(cluster.reader.got) > ended)  # noqa: B023
                await asyncio.sleep(moments.uniform(0, 0.5))
                await cluster.server.end(signal.SIGTERM if number % 5 == 4 else signal.SIGKILL)
                await cluster.server.start()
        results = await cluster.check(usable=False)
        for (name, _), result in results.items():
            assert result.reason in UNWANTED.get(name.partition("-")[0], (None,)), (name, result.reason, result.error)
        nodes_now = {node["name"] for node in await cluster.client.nodes()}
        assert nodes_now >= set(names)


async def test_twice(tmp_path: Path) -> None:
    await killed(tmp_path, times=2, nodes=1, seed=1)


@pytest.mark.faults
async def test_fifty_times(tmp_path: Path) -> None:
    await killed(tmp_path, times=50, nodes=2, seed=2)


@pytest.mark.faults
async def test_frozen_for_longer_than_a_lease(tmp_path: Path) -> None:
    """It has not heard of anybody meanwhile, and knows why."""
    mark = tmp_path / "go"
    async with Cluster(tmp_path, lease_seconds=2) as cluster:
        await cluster.node("node")
        await cluster.submit(task("begun", f"{ASK}; {until_there(mark)}", num_samples=3))
        await cluster.in_stage("node", "run", 3)
        for _ in range(3):
            cluster.server.signal(signal.SIGSTOP)
            await asyncio.sleep(3)
            cluster.server.signal(signal.SIGCONT)
            await cluster.in_stage("node", "run", 3)
            await asyncio.sleep(1)
        mark.touch()
        await cluster.check()
        assert "is lost" not in cluster.server.said()
