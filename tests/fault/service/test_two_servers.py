"""A second server is started on the database of one that runs: the first one stops, and says why."""

import asyncio
from pathlib import Path

import pytest

from polar.client.async_client import AsyncClient
from tests.fault.service.cluster import ASK, PATIENCE, Cluster, Reader, quick, task, until_there


@pytest.mark.faults
async def test_the_older_one_stops(tmp_path: Path) -> None:
    mark = tmp_path / "go"
    data = tmp_path / "data"
    async with Cluster(tmp_path, data=data, lease_seconds=2) as cluster:
        old = await cluster.node("old")
        await cluster.submit(task("begun", f"{ASK}; {until_there(mark)}"), quick("ended", 2))
        await cluster.in_stage("old", "run")
        await cluster.reader.until(lambda: len(cluster.reader.got) == 2)
        second = cluster.new_server("second", data)
        try:
            await second.start()
            async with asyncio.timeout(120):
                assert await cluster.server.process.wait() == 1
            assert "Another server was started on the same database" in cluster.server.said()
            await cluster.reader.close()
            await old.kill()  # it would look for its server for a while
            async with AsyncClient(second.url, patience=PATIENCE) as client:
                cluster.client, former = client, cluster.client
                cluster.reader = Reader(client, after=cluster.reader)
                await cluster.node("new", url=second.url)
                await cluster.submit(quick("later", 2))
                await cluster.in_stage("new", "run")
                mark.touch()
                await cluster.check()
                await cluster.reader.close()
                cluster.client = former
        finally:
            await second.close()
