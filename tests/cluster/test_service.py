"""`polar up` on Ray, with real nodes: they run sessions, and come back, whatever is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, Machines, alive, wait_until
from tests.fault.service.cluster import ASK, Cluster, quick, task, until_there

pytestmark = pytest.mark.cluster


def service(machines: Machines, folder: Path) -> Cluster:
    return Cluster(
        folder,
        POLAR_CLUSTER__ENGINE="ray",
        POLAR_CLUSTER__ADDRESS=machines.address,
        POLAR_CLUSTER__DATA=str(folder / "nodes"),
        POLAR_NODE__RUNTIMES='["local"]',
        POLAR_NODE__INIT_WORKERS="1",
        POLAR_NODE__READY_BUFFER="1",
        POLAR_NODE__RUN_WORKERS="2",
    )


def node_process(machine: Machine) -> int:
    """That of the node actor on it."""
    [pid] = machine.actors
    return pid


async def test_sessions_survive_a_killed_node_and_a_killed_server(cluster: Machines, tmp_path: Path) -> None:
    mark = tmp_path / "go"
    async with service(cluster, tmp_path) as rollout:
        await rollout.joined("node@one", "node@two")
        await rollout.submit(task("long", f"{ASK}; {until_there(mark)}", num_samples=12))
        await rollout.in_stage("node@one", "run", 1)
        await rollout.in_stage("node@two", "run", 1)
        before = {name: node_process(cluster[name]) for name in ("one", "two")}

        os.kill(before["two"], signal.SIGKILL)
        await rollout.server.kill()
        await rollout.server.start()
        await rollout.joined("node@one", "node@two")
        assert node_process(cluster["one"]) == before["one"]  # it was found again
        assert node_process(cluster["two"]) != before["two"]  # Ray restarted it

        await rollout.submit(*(quick(f"quick-{number}") for number in range(10)))
        mark.touch()
        results = await rollout.check()
        nodes = {node["node_id"] for node in await rollout.client.nodes()}
        assert {result.node_id for result in results.values()} <= nodes
        last = [node_process(cluster[name]) for name in ("one", "two")]
    # Closed in good order: nodes were drained.
    await asyncio.to_thread(wait_until, lambda: not any(map(alive, last)), "nodes outlived polar up")
