"""Of every ten answers of the server, three are lost on their way to nodes and to trainers."""

import asyncio
from pathlib import Path

import pytest

from polar.client.async_client import AsyncClient
from tests.fault.service.cluster import ASK, PATIENCE, Cluster, Reader, quick, task, until_there
from tests.fault.service.lossy import Lossy


async def lossy(folder: Path, tasks: int, nodes: int) -> None:
    async with Cluster(folder) as cluster, Lossy(cluster.server.url, 0.3, seed=3) as proxy:
        names = [f"node{number}" for number in range(nodes)]
        await asyncio.gather(*(cluster.node(name, url=proxy.url) for name in names))
        async with AsyncClient(proxy.url, patience=PATIENCE) as client:
            direct, cluster.client = cluster.client, client
            await cluster.reader.close()
            cluster.reader = Reader(client)
            try:
                for number in range(tasks):
                    await cluster.submit(quick(f"t{number}", 3))
                await cluster.check()
            finally:
                await cluster.reader.close()
                cluster.client = direct
        assert proxy.lost > proxy.forwarded * 0.15


async def test_a_few_tasks(tmp_path: Path) -> None:
    await lossy(tmp_path, tasks=4, nodes=1)


@pytest.mark.faults
async def test_many_tasks(tmp_path: Path) -> None:
    await lossy(tmp_path, tasks=100, nodes=3)


@pytest.mark.faults
async def test_connections_that_fall_silent(tmp_path: Path) -> None:
    """As when a machine in between is gone: nobody says so. A node shows that it lives in time all the same."""
    mark = tmp_path / "go"
    async with (
        Cluster(tmp_path, lease_seconds=4) as cluster,
        Lossy(cluster.server.url, 0.3, seed=4, silent="/beat") as proxy,
    ):
        # It is full, and so has nothing else to ask the server meanwhile.
        node = await cluster.node("node", url=proxy.url, init_workers=1, ready_buffer=1, run_workers=1)
        await cluster.submit(task("begun", f"{ASK}; {until_there(mark)}", num_samples=8))
        await cluster.in_stage("node", "waiting", 2)
        lost = proxy.lost
        async with asyncio.timeout(PATIENCE):
            while proxy.lost < lost + 6:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.1)
        mark.touch()
        await cluster.check()
        assert "is lost" not in cluster.server.said()
        await node.end()


@pytest.mark.faults
async def test_a_proxy_that_takes_small_requests_only(tmp_path: Path) -> None:
    """What is too much at once is told one by one, and what is too much by itself is a result without a reward."""
    mark = tmp_path / "go"
    async with Cluster(tmp_path) as cluster, Lossy(cluster.server.url, 0.0, most=2000) as proxy:
        node = await cluster.node("node", url=proxy.url)
        loud = {"type": "exec", "command": "head -c 5000 /dev/zero | tr '\\0' x; exit 1"}
        await cluster.submit(
            task("many", f"{ASK}; {until_there(mark)}", num_samples=8),
            quick("loud", runtime={"backend": "local", "prepare": [loud]}),
        )
        await cluster.reader.until(lambda: len(cluster.reader.got) == 1)
        await cluster.in_stage("node", "run", 8)
        mark.touch()
        results = await cluster.check(usable=False)
        assert proxy.refused > 0
        assert results.pop(("loud", 0)).reason == "result_refused"
        assert {one.reason for one in results.values()} == {None}
        assert node.running
