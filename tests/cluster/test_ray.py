"""Nodes on a real Ray cluster of two machines, with a stand-in for the node itself."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.cluster.ray_cluster import RayCluster
from polar.config import ClusterSettings, EngineSettings, ServerSettings, Settings, StoreSettings
from polar.errors import ConfigError
from tests.cluster.machines import PATIENCE, ROOT, Machines, alive, below, wait_until
from tests.cluster.stand_in import Start, drained, starts

pytestmark = pytest.mark.cluster

SERVE = "tests.cluster.stand_in:serve_node"
URL = "http://127.0.0.1:1"


def ray_cluster(
    machines: Machines,
    folder: Path,
    *,
    serve: str = SERVE,
    settings: Settings | None = None,
    url: str = URL,
    **cluster: Any,
) -> RayCluster:
    settings = settings or Settings()
    where = ClusterSettings(engine="ray", address=machines.address, data=str(folder), **cluster)
    return RayCluster(settings.model_copy(update={"cluster": where}), url, namespace=folder.name, serve=serve)


def with_token(token: str) -> Settings:
    return Settings(server=ServerSettings(node_token=token))


async def until(condition: Callable[[], object], what: str = "") -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def served(folder: Path, *names: str, times: int = 1) -> dict[str, Start]:
    """The last start of each, once there were so many."""
    await until(lambda: all(len(starts(folder / name)) >= times for name in names), f"{names} did not start")
    assert sorted(os.listdir(folder)) == sorted(names)
    return {name: starts(folder / name)[-1] for name in names}


async def test_each_machine_has_a_node_and_none_is_left(cluster: Machines, tmp_path: Path) -> None:
    async with ray_cluster(cluster, tmp_path):
        nodes = await served(tmp_path, "node@one", "node@two")
        assert {"one", "two"} == {name for name in ("one", "two") if nodes[f"node@{name}"].pid in cluster[name].pids}
        assert {node.folder for node in nodes.values()} == {"/"}
        assert {node.port for node in nodes.values()} == {0}  # two on one machine don't get in each other's way
    for name, node in nodes.items():
        assert drained(tmp_path / name) == [node.pid]
        await until(lambda pid=node.pid: not alive(pid), f"{name} is still there")


async def test_a_killed_node_comes_back(cluster: Machines, tmp_path: Path) -> None:
    async with ray_cluster(cluster, tmp_path):
        before = await served(tmp_path, "node@one", "node@two")
        os.kill(before["node@two"].pid, signal.SIGKILL)
        await until(lambda: len(starts(tmp_path / "node@two")) == 2, "it was not restarted")
        after = starts(tmp_path / "node@two")[-1]
        assert after.pid != before["node@two"].pid
        assert after.machine == before["node@two"].machine
        assert len(starts(tmp_path / "node@one")) == 1
    assert drained(tmp_path / "node@two") == [after.pid]


async def test_machines_come_and_go(cluster: Machines, tmp_path: Path) -> None:
    async with ray_cluster(cluster, tmp_path):
        await served(tmp_path, "node@one", "node@two")
        machine = cluster.add("three")
        first = (await served(tmp_path, "node@one", "node@two", "node@three"))["node@three"]
        machine.kill()
        assert not alive(first.pid)
        machine = cluster.add("three")  # it comes back, to Ray as another one
        await until(lambda: len(starts(tmp_path / "node@three")) == 2, "the machine got no node")
        second = starts(tmp_path / "node@three")[-1]
        assert second.machine != first.machine
    assert drained(tmp_path / "node@three") == [second.pid]
    machine.stop()


async def test_one_of_so_many_moves_to_another_machine(cluster: Machines, tmp_path: Path) -> None:
    """Where there is room for it: machines have room for one each."""
    machines = [cluster.add(name, {"room": 1}) for name in ("four", "five")]
    try:
        async with ray_cluster(cluster, tmp_path, nodes=1, resources={"room": 1}):
            first = (await served(tmp_path, "node-0"))["node-0"]
            [home] = [machine for machine in machines if first.pid in machine.pids]
            [other] = [machine for machine in machines if machine is not home]
            home.kill()
            await until(lambda: len(starts(tmp_path / "node-0")) == 2, "it was not restarted elsewhere")
            assert starts(tmp_path / "node-0")[-1].pid in other.pids
    finally:
        for machine in machines:
            machine.stop()


async def test_only_machines_with_the_resources_get_one(cluster: Machines, tmp_path: Path) -> None:
    machine = cluster.add("six", {"sandboxes": 1})
    try:
        async with ray_cluster(cluster, tmp_path, resources={"sandboxes": 1}):
            await served(tmp_path, "node@six")
    finally:
        machine.stop()


class Server:
    """A server process."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        argv = [sys.executable, "-m", "tests.cluster.server_process", machines.address, folder.name, str(folder)]
        self._process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"placed\n"
        [self.driver] = below(self._process.pid) - {self._process.pid}

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> int:
        self._process.terminate()
        self._process.communicate(timeout=PATIENCE)
        return self._process.returncode


async def test_a_server_that_was_killed_finds_its_nodes_again(cluster: Machines, tmp_path: Path) -> None:
    server = await asyncio.to_thread(Server, cluster, tmp_path)
    nodes = await served(tmp_path, "node@one", "node@two")
    server.kill()
    await until(lambda: not alive(server.driver), "Ray's client outlived the server")

    # Meanwhile they live, and are restarted.
    os.kill(nodes["node@one"].pid, signal.SIGKILL)
    await until(lambda: len(starts(tmp_path / "node@one")) == 2, "it was not restarted while there was no server")
    assert alive(nodes["node@two"].pid)

    server = await asyncio.to_thread(Server, cluster, tmp_path)
    pids = [starts(tmp_path / name)[-1].pid for name in ("node@one", "node@two")]
    assert pids[1] == nodes["node@two"].pid
    assert all(map(alive, pids))
    assert [drained(tmp_path / name) for name in ("node@one", "node@two")] == [[], []]
    assert await asyncio.to_thread(server.stop) == 0
    assert [drained(tmp_path / name) for name in ("node@one", "node@two")] == [[pids[0]], [pids[1]]]
    assert [len(starts(tmp_path / name)) for name in ("node@one", "node@two")] == [2, 1]


async def test_rays_client_is_started_again(cluster: Machines, tmp_path: Path) -> None:
    server = await asyncio.to_thread(Server, cluster, tmp_path)
    nodes = await served(tmp_path, "node@one", "node@two")
    os.kill(server.driver, signal.SIGKILL)
    os.kill(nodes["node@two"].pid, signal.SIGKILL)
    await until(lambda: len(starts(tmp_path / "node@two")) == 2, "it was not restarted")
    assert await asyncio.to_thread(server.stop) == 0


async def test_other_settings_replace_the_nodes(cluster: Machines, tmp_path: Path) -> None:
    server = await asyncio.to_thread(Server, cluster, tmp_path)
    old = await served(tmp_path, "node@one", "node@two")
    server.kill()
    async with ray_cluster(cluster, tmp_path, settings=with_token("another")):
        await until(lambda: all(len(starts(tmp_path / name)) == 2 for name in old), "they were not replaced")
        for name, node in old.items():
            assert drained(tmp_path / name) == [node.pid]
            assert starts(tmp_path / name)[-1].token == "another"


async def test_fewer_nodes_leave_none_too_many(cluster: Machines, tmp_path: Path) -> None:
    server = await asyncio.to_thread(Server, cluster, tmp_path)
    old = await served(tmp_path, "node@one", "node@two")
    server.kill()
    async with ray_cluster(cluster, tmp_path, nodes=1):
        assert {name: drained(tmp_path / name) for name in old} == {name: [node.pid] for name, node in old.items()}
        await served(tmp_path, "node@one", "node@two", "node-0")
        assert [len(starts(tmp_path / name)) for name in ("node@one", "node@two", "node-0")] == [1, 1, 1]


async def test_a_server_that_listens_everywhere_is_named_as_others_reach_it(cluster: Machines, tmp_path: Path) -> None:
    async with ray_cluster(cluster, tmp_path, url="http://0.0.0.0:8080"):
        nodes = await served(tmp_path, "node@one", "node@two")
    assert {node.server_url for node in nodes.values()} == {"http://127.0.0.1:8080"}


def test_machines_that_can_not_reach_the_server() -> None:
    from polar.cluster.driver import (  # takes Ray: not where tests are only collected
        Machine,
        find_unreachable_addresses,
    )

    here, there = Machine("1", "here", "10.0.0.1", {}), Machine("2", "there", "10.0.0.9", {})
    assert find_unreachable_addresses("http://127.0.0.1:8080", "10.0.0.1", [here, there]) == {"10.0.0.9"}
    assert find_unreachable_addresses("http://127.0.0.1:8080", "10.0.0.1", [here]) == set()
    assert find_unreachable_addresses("http://10.0.0.1:8080", "10.0.0.1", [here, there]) == set()


async def test_two_servers_in_one_namespace_do_not_fight(
    cluster: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ray_cluster(cluster, tmp_path, settings=with_token("first")):
        await served(tmp_path, "node@one", "node@two")
        async with ray_cluster(cluster, tmp_path, settings=with_token("second")):
            await until(lambda: "Another server has taken over" in caplog.text)
            await until(lambda: all(len(starts(tmp_path / name)) == 2 for name in ("node@one", "node@two")))
            assert {starts(tmp_path / name)[-1].token for name in ("node@one", "node@two")} == {"second"}


async def test_a_server_that_was_superseded_leaves_the_nodes_to_its_successor(
    cluster: Machines, tmp_path: Path
) -> None:
    async with ray_cluster(cluster, tmp_path):
        nodes = await served(tmp_path, "node@one", "node@two")
        successor = await ray_cluster(cluster, tmp_path).__aenter__()
    assert [drained(tmp_path / name) for name in nodes] == [[], []]
    await successor.__aexit__(None, None, None)
    assert [drained(tmp_path / name) for name in nodes] == [[node.pid] for node in nodes.values()]
    assert [len(starts(tmp_path / name)) for name in nodes] == [1, 1]


async def test_secrets_stay_where_they_are_needed(cluster: Machines, tmp_path: Path) -> None:
    settings = Settings(
        engine=EngineSettings(api_key="hush-the-engine"),
        server=ServerSettings(token="hush-the-admin", node_token="hush-the-node"),
        store=StoreSettings(url="postgresql://polar:hush-the-store@db/polar"),
    )
    secret = b"hush-"
    async with ray_cluster(cluster, tmp_path, settings=settings):
        nodes = await served(tmp_path, "node@one", "node@two")
        for node in nodes.values():
            assert (node.token, node.api_key, node.admin_token) == ("hush-the-node", "hush-the-engine", None)
        for pid in cluster["one"].pids | cluster["two"].pids:
            for file in (Path(f"/proc/{pid}/cmdline"), Path(f"/proc/{pid}/environ")):
                assert not file.exists() or secret not in file.read_bytes(), file
    files = [file for file in cluster.folder.rglob("*") if file.is_file()]
    assert any(file.name.startswith("worker-") for file in files)  # the actors' own logs among them
    assert [file for file in files if secret in file.read_bytes()] == []


async def test_a_node_that_fails_says_so(cluster: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with ray_cluster(cluster, tmp_path, serve="tests.cluster.stand_in:fail"):
        await until(lambda: "node@two can't serve: RuntimeError: there is no gateway today" in caplog.text)


async def test_a_node_that_can_not_be_made_says_so(
    cluster: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with ray_cluster(cluster, tmp_path, serve="nowhere:serve_node"):
        await until(lambda: "No module named 'nowhere'" in caplog.text)


async def test_no_ray_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No Ray cluster could be reached at '127\.0\.0\.1:1'"):
        async with RayCluster(Settings(cluster=ClusterSettings(address="127.0.0.1:1", data=str(tmp_path))), URL):
            pass


async def test_the_server_outlives_ray(tmp_path: Path) -> None:
    """Ray loses everything with its head. Nodes are placed anew as soon as there is one again."""
    with Machines("alone") as machines:
        async with ray_cluster(machines, tmp_path):
            first = (await served(tmp_path, "node@alone"))["node@alone"]
            machines["alone"].kill()
            assert not alive(first.pid)
            await asyncio.to_thread(machines.add, "alone")
            await until(lambda: len(starts(tmp_path / "node@alone")) == 2, "the new cluster got no node")
            second = starts(tmp_path / "node@alone")[-1]
        assert drained(tmp_path / "node@alone") == [second.pid]
