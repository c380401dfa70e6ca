"""Servers, nodes and the database die, freeze and end at random, again and again, while tasks come in."""

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.fault.service.cluster import Cluster, load
from tests.fault.service.processes import Program
from tests.unit.store.servers import Server, postgres_server

EVENTS = 30


async def freeze(program: Program, seconds: float) -> None:
    program.signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    program.signal(signal.SIGCONT)


async def something(cluster: Cluster, nodes: list[Program], postgres: Server | None, chance: random.Random) -> None:
    node = chance.choice(nodes)
    match chance.randrange(7 if postgres is not None else 6):
        case 0 | 1:
            await node.kill()
            await node.start()
        case 2:
            await node.end(signal.SIGTERM)
            await node.start()
        case 3:
            await freeze(node, chance.uniform(0, 8))
        case 4:
            await cluster.server.kill()
            await cluster.server.start()
        case 5:
            await freeze(cluster.server, chance.uniform(0, 8))
        case 6:
            assert postgres is not None
            await asyncio.to_thread(postgres.stop)
            await asyncio.sleep(chance.uniform(0, 2))
            await asyncio.to_thread(postgres.start)


async def at_once(folder: Path, postgres: Server | None, seed: int) -> None:
    chance = random.Random(seed)
    store = None if postgres is None else postgres.new_database()
    async with Cluster(folder, store=store, lease_seconds=4) as cluster:
        names = ["a", "b", "c"]
        nodes: list[Program] = list(await asyncio.gather(*(cluster.node(name) for name in names)))
        await cluster.joined(*names)
        async with load(cluster, 0.2):
            for _ in range(EVENTS):
                await something(cluster, nodes, postgres, chance)
                await asyncio.sleep(chance.uniform(0, 1))
        results = await cluster.check(usable=False)
        assert {one.reason for one in results.values()} == {None}


@pytest.mark.faults
async def test_on_sqlite(tmp_path: Path) -> None:
    await at_once(tmp_path, None, seed=11)


@pytest.mark.faults
async def test_on_postgres(tmp_path: Path) -> None:
    with postgres_server() as postgres:
        await at_once(tmp_path, postgres, seed=12)
