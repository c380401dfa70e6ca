"""The server hears nothing of what came of its COMMIT: it may have happened, or not."""

import asyncio
import random
import tempfile
from pathlib import Path

import pytest

from tests.fault.service.cluster import Cluster, load
from tests.fault.service.receiver import Receiver
from tests.fault.test_postgres import Wire
from tests.unit.store.servers import postgres_server


async def cut_off(folder: Path, times: int) -> None:
    moments = random.Random(5)
    receiver = Receiver(failures=0)
    await receiver.start()
    with postgres_server() as postgres, tempfile.TemporaryDirectory(prefix="polar-wire-") as sockets:
        database = postgres.new_database()
        wire = Wire(postgres, Path(sockets))
        try:
            async with Cluster(folder, store=database, server_store=wire.url(database)) as cluster:
                await cluster.node("node")
                async with load(cluster, 0.1, callback_url=receiver.url):
                    for number in range(times):
                        await asyncio.sleep(moments.uniform(0.1, 0.3))
                        wire.cut = "after" if number % 3 else "before"
                await cluster.check()
                await receiver.until({name for name, _ in cluster.expected})
        finally:
            wire.close()
            await receiver.stop()
    assert wire.cuts >= times // 2


@pytest.mark.faults
async def test_again_and_again(tmp_path: Path) -> None:
    """Each task is told of by its callback all the same."""
    await cut_off(tmp_path, times=100)
