"""The wall clocks of the server and of its nodes jump by hours, back and forth."""

import os
from pathlib import Path

import pytest

from tests.fault.service.cluster import ASK, Cluster, load, quick, task

JUMPING = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH")]))
}


async def jumping(folder: Path, sessions: int, tasks: int) -> None:
    """Results are kept for one hour of service."""
    async with Cluster(folder, lease_seconds=5, POLAR_SERVER__RETENTION_HOURS="1", **JUMPING) as cluster:
        node = await cluster.node("node")
        await cluster.joined("node")
        await cluster.submit(task("long", f"{ASK}; sleep 3", num_samples=4))
        async with load(cluster, 0.1):
            await cluster.reader.until(lambda: len(cluster.reader.got) >= sessions)
        await cluster.submit(*(quick(f"t{number}") for number in range(tasks)))
        results = await cluster.check()
        assert {one.node_id for one in results.values()} == {(await cluster.seen("node") or {})["node_id"]}
        await cluster.server.kill()
        await cluster.server.start()
        await cluster.check()  # still there
        times = [one.metadata["timing"]["created_at"] for one in results.values()]
        assert max(times) - min(times) > 3600  # they did jump
        assert "lost" not in node.said() + cluster.server.said()


@pytest.mark.slow
async def test_for_a_moment(tmp_path: Path) -> None:
    await jumping(tmp_path, sessions=10, tasks=2)


@pytest.mark.faults
async def test_for_long(tmp_path: Path) -> None:
    await jumping(tmp_path, sessions=300, tasks=20)
