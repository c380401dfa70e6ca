"""The database that the server and its nodes share is restarted, or killed, while they work."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fault.service.cluster import Cluster, load
from tests.unit.store.servers import Server, postgres_server


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with postgres_server() as running:
        yield running


def kill(postgres: Server) -> None:
    """Its first process, without a word; the others notice, and end."""
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute("SHOW data_directory").fetchone()
    assert row is not None
    pid = int(Path(row[0], "postmaster.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)


async def start(postgres: Server) -> None:
    """What is left of a killed one may still be about to end."""
    for _ in range(20):
        try:
            await asyncio.to_thread(postgres.start)
            return
        except Exception as error:  # noqa: BLE001 - of the tool that starts it
            failed = error
            await asyncio.sleep(0.5)
    raise failed


async def away(folder: Path, postgres: Server, times: int, nodes: int, seed: int) -> None:
    moments = random.Random(seed)
    async with Cluster(folder, store=postgres.new_database()) as cluster:
        names = [f"node{number}" for number in range(nodes)]
        await asyncio.gather(*(cluster.node(name) for name in names))
        await cluster.joined(*names)
        async with load(cluster, 0.1):
            for number in range(times):
                ended = len(cluster.reader.got)
                await cluster.reader.until(lambda: len(cluster.reader.got) > ended + 5)  # noqa: B023
                await asyncio.sleep(moments.uniform(0, 0.5))
                await asyncio.to_thread(kill if number % 2 else postgres.stop, *([postgres] if number % 2 else []))
                await asyncio.sleep(moments.uniform(0, 2))
                await start(postgres)
        await cluster.check()
        assert {node["name"] for node in await cluster.client.nodes()} == set(names)


@pytest.mark.faults
async def test_once(tmp_path: Path, postgres: Server) -> None:
    await away(tmp_path, postgres, times=1, nodes=1, seed=1)


@pytest.mark.faults
async def test_again_and_again(tmp_path: Path, postgres: Server) -> None:
    await away(tmp_path, postgres, times=10, nodes=2, seed=2)
