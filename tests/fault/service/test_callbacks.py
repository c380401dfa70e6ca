"""Whoever is to be told of ended tasks is away for a while."""

from pathlib import Path

import pytest

from tests.fault.service.cluster import Cluster, quick
from tests.fault.service.receiver import Receiver


@pytest.mark.faults
async def test_everything_is_told_when_it_is_back(tmp_path: Path) -> None:
    """Though the server was killed meanwhile."""
    receiver = Receiver(failures=1)
    await receiver.start()
    await receiver.stop()  # its address is known now
    async with Cluster(tmp_path) as cluster:
        try:
            await cluster.node("node")
            await cluster.submit(*(quick(f"t{number}", 2, callback_url=receiver.url) for number in range(4)))
            await cluster.check()
            await cluster.server.kill()
            await cluster.server.start()
            await receiver.start()
            await receiver.until({name for name, _ in cluster.expected})
        finally:
            await receiver.stop()
        for told in receiver.got.values():
            assert [len(one["results"]) for one in told] == [2] * len(told)
            assert {one["status"] for one in told} == {"completed"}
        assert [len(keys) for keys in receiver.keys.values()] == [1] * 4
        assert len(set.union(*receiver.keys.values())) == 4
