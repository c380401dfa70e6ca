"""Disks that fill up, and are emptied again: of the server, and of a node."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import aiohttp
import pytest

from tests.fault.service.cluster import ASK, Cluster, quick, task, until_there

LARGE = {"padding": "x" * 2**16}
"""A task's metadata for which a full disk has no room. Small things may well be written there, and are durable then: in
the last block of a file, or where an ended session was."""


class Disk:
    """A small one of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096) == 4096:
                pass

    def empty(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a disk of its own can't be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.faults
async def test_the_servers_disk(tmp_path: Path, disk: Disk) -> None:
    """Calls fail and say why, nodes hold what has ended, and all of it comes when there is space again."""
    mark = tmp_path / "go"
    async with Cluster(tmp_path, data=disk.folder / "data") as cluster:
        await cluster.node("node")
        await cluster.submit(
            task("held", f"{ASK}; {until_there(mark)}", num_samples=6, metadata=LARGE), quick("before")
        )
        await cluster.in_stage("node", "run", 6)
        await cluster.reader.until(lambda: len(cluster.reader.got) == 1)
        disk.fill()
        try:
            status, answer = await refused(cluster, "refused")
            assert status == 503
            assert "the disk is full; free some space" in answer
            status, health = await current_health(cluster)
            assert (status, health["status"]) == (503, "degraded")
            assert health["reason"] == "The store can't write; the service's log says why."
            assert "the disk is full; free some space" in cluster.server.said()
            mark.touch()

            async def all_ended(_: Cluster) -> bool:
                node = await cluster.seen("node")
                return node is not None and not any(
                    node["load"][stage] for stage in ("init", "ready", "run", "postrun")
                )

            await cluster.until(all_ended)
            held = await cluster.seen("node")
            assert held is not None
            assert held["leases"] == 6
            assert (await refused(cluster, "refused"))[0] == 503
            assert len(cluster.reader.got) == 1
            assert (await current_health(cluster))[0] == 503
        finally:
            disk.empty()

        async def is_healthy(_: Cluster) -> bool:
            return await current_health(cluster) == (200, ANY)

        await cluster.until(is_healthy)
        assert (await current_health(cluster))[1]["reason"] is None
        await cluster.submit(quick("refused"), quick("after", 3))
        await cluster.check()


async def test_health_recovers_without_traffic(tmp_path: Path, disk: Disk) -> None:
    """Nobody has to write before a server whose disk was full is well again."""
    async with Cluster(tmp_path, data=disk.folder / "data") as cluster:
        assert (await current_health(cluster))[0] == 200
        disk.fill()
        try:
            assert (await refused(cluster, "refused"))[0] == 503
            assert (await current_health(cluster))[0] == 503
        finally:
            disk.empty()

        async def is_healthy(_: Cluster) -> bool:
            return (await current_health(cluster))[0] == 200

        await cluster.until(is_healthy)
        assert not list(disk.folder.rglob("*.probe"))


async def current_health(cluster: Cluster) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession(cluster.server.url) as http, http.get("/health") as response:
        return response.status, await response.json()


async def refused(cluster: Cluster, name: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(cluster.server.url) as http,
        http.post("/rollout/task/submit", json=quick(name, metadata=LARGE)) as response,
    ):
        return response.status, await response.text()


@pytest.mark.slow
async def test_a_nodes_disk(tmp_path: Path, disk: Disk) -> None:
    """What runs there is tried again; and sessions that can't begin there are nobody's fault: none of that counts."""
    mark = tmp_path / "go"
    async with Cluster(tmp_path, POLAR_SERVER__ATTEMPTS="2") as cluster:
        node = await cluster.node("small", data=disk.folder / "data")
        await cluster.submit(quick("before"), task("begun", f"{until_there(mark)}; {ASK}", metadata=LARGE))
        await cluster.reader.until(lambda: len(cluster.reader.got) == 1)
        await cluster.in_stage("small", "run")
        disk.fill()
        try:
            mark.touch()
            await cluster.submit(*(quick(f"t{number}", 2, metadata=LARGE) for number in range(4)))

            async def tried(_: Cluster) -> bool:
                return node.said().count("could not begin here") >= 2 * 8

            await cluster.until(tried)
            assert len(cluster.reader.got) == 1
            await cluster.node("large")
            await cluster.reader.until(lambda: len(cluster.reader.got) == 10)
        finally:
            disk.empty()
        await cluster.submit(*(quick(f"after-{number}", 4) for number in range(4)))
        await cluster.check()
