"""Nodes that die, freeze or end: their sessions are run by others, and nothing that they say afterwards counts."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fault.service.cluster import ASK, Cluster, quick, task, until_there
from tests.fault.service.processes import Node


def long_in(stage: str, mark: Path) -> dict[str, Any]:
    """Of a task, the fields that make it stay in one stage until `mark` is there."""
    wait = until_there(mark)
    match stage:
        case "init":
            return {"runtime": {"backend": "local", "prepare": [{"type": "exec", "command": wait}]}}
        case "run":
            return {"agent": {"harness": "shell", "custom_shell": {"command": f"{ASK}; {wait}"}}}
        case "postrun":
            return {"evaluator": {"strategy": "command", "config": {"command": wait}}}
    raise AssertionError(stage)


async def until_stage(cluster: Cluster, name: str, stage: str, mark: Path) -> None:
    """Has a session of the task `lost-STAGE` in that stage of that node."""
    if stage == "ready":  # a place in RUN is what it waits for
        await cluster.submit(quick("before-ready", **long_in("run", mark)))
        await cluster.in_stage(name, "run")
        await cluster.submit(quick("lost-ready"))
    else:
        await cluster.submit(quick(f"lost-{stage}", **long_in(stage, mark)))
    await cluster.in_stage(name, stage)


async def killed_in(folder: Path, stages: list[str]) -> None:
    async with Cluster(folder, lease_seconds=3) as cluster:
        node = await cluster.node("n0", run_workers=1)
        await cluster.joined("n0")
        for number, stage in enumerate(stages):
            mark = folder / f"go-{stage}"
            await until_stage(cluster, f"n{number}", stage, mark)
            await node.kill()
            node = await cluster.node(f"n{number + 1}", run_workers=1)
            await cluster.in_stage(f"n{number + 1}", "run" if stage == "ready" else stage)
            mark.touch()
            results = await cluster.check()
            other = await cluster.seen(f"n{number + 1}")
            assert other is not None
            assert results[f"lost-{stage}", 0].node_id == other["node_id"]


STAGES = ["init", "ready", "run", "postrun"]


async def test_killed_while_an_agent_runs(tmp_path: Path) -> None:
    await killed_in(tmp_path, ["run"])


@pytest.mark.faults
async def test_started_again_on_its_folder(tmp_path: Path) -> None:
    """It says itself whom it replaces: nobody waits for the lease to end. What the other one left running ends."""
    pids, mark = tmp_path / "pids", tmp_path / "go"
    async with Cluster(tmp_path, lease_seconds=600) as cluster:
        data = tmp_path / "data"
        node = await cluster.node("first", data=data)
        await cluster.submit(task("begun", f"{ASK}; echo $$ >> {pids}; {until_there(mark)}", num_samples=3))
        before = await cluster.until(lambda _: _pids(pids, 3))
        await node.kill()
        await cluster.node("second", data=data)
        after = (await cluster.until(lambda _: _pids(pids, 6)))[3:]
        for pid in before:
            await cluster.until(lambda _, pid=pid: _gone(pid))
        assert not any([await _gone(pid) for pid in after])
        mark.touch()
        await cluster.check()


@pytest.mark.faults
async def test_killed_in_each_stage(tmp_path: Path) -> None:
    await killed_in(tmp_path, STAGES)


async def frozen(cluster: Cluster, folder: Path, times: int) -> None:
    """One node stands still until its session is another's, then goes on: sometimes with an agent that still runs, and
    sometimes with one that ended meanwhile."""
    nodes: dict[str, Node] = {}
    for name in ("a", "b"):
        nodes[name] = await cluster.node(name)
    await cluster.joined("a", "b")
    for number in range(times):
        pids, mark = folder / f"pids-{number}", folder / f"go-{number}"
        await cluster.submit(task(f"frozen-{number}", f"{ASK}; echo $$ >> {pids}; {until_there(f'{mark}-$$')}"))
        held = await cluster.until(_held)
        frozen, other = nodes[held["name"]], "b" if held["name"] == "a" else "a"
        (first,) = await cluster.until(lambda _, pids=pids: _pids(pids, 1))
        frozen.signal(signal.SIGSTOP)
        _, second = await cluster.until(lambda _, pids=pids: _pids(pids, 2))
        if number % 2 == 0:
            _touch(f"{mark}-{first}")
            await cluster.until(lambda _, pid=first: _gone(pid))
        frozen.signal(signal.SIGCONT)
        await cluster.joined("a", "b")
        await cluster.until(lambda _, pid=first: _gone(pid))  # the agent of whoever lost it ends
        assert not await _gone(second)
        _touch(f"{mark}-{second}")
        results = await cluster.check()
        assert results[f"frozen-{number}", 0].node_id == (await cluster.seen(other) or {})["node_id"]


def _touch(path: str) -> None:
    Path(path).touch()


async def _held(cluster: Cluster) -> dict[str, Any] | None:
    return next((node for node in await cluster.client.nodes() if node["leases"] and node["load"].get("run")), None)


async def _pids(path: Path, count: int) -> list[int]:
    """Of those that have said theirs, once there are so many."""
    found = [int(line) for line in path.read_text().split()] if path.exists() else []  # noqa: ASYNC240 (it is small)
    return found if len(found) >= count else []


async def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: ASYNC240 (no disk is read)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.faults
async def test_frozen_past_its_lease(tmp_path: Path) -> None:
    async with Cluster(tmp_path, lease_seconds=3) as cluster:
        await frozen(cluster, tmp_path, times=1)


@pytest.mark.faults
async def test_frozen_again_and_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, lease_seconds=3) as cluster:
        await frozen(cluster, tmp_path, times=4)


@pytest.mark.faults
async def test_told_to_end_it_hands_its_sessions_back(tmp_path: Path) -> None:
    """More often than a session may be tried: none of it counts."""
    mark = tmp_path / "go"
    async with Cluster(tmp_path, lease_seconds=60, POLAR_SERVER__ATTEMPTS="1") as cluster:
        await cluster.submit(*(task(f"t{number}", f"{ASK}; {until_there(mark)}") for number in range(3)))
        for name, number in (("first", signal.SIGTERM), ("second", signal.SIGINT)):
            node = await cluster.node(name, drain_seconds=0 if number == signal.SIGTERM else 600)
            await cluster.in_stage(name, "run", 3)
            assert await node.end(number) == 0
            await cluster.until(_all_queued)
        mark.touch()
        await cluster.node("last")
        await cluster.check()


@pytest.mark.faults
async def test_told_to_end_it_lets_sessions_end(tmp_path: Path) -> None:
    """For longer than a lease, and while the server is started again; what is new goes to others. A second SIGTERM
    ends it at once."""
    mark, other = tmp_path / "go", tmp_path / "other"
    async with Cluster(tmp_path, lease_seconds=3, POLAR_SERVER__ATTEMPTS="1") as cluster:
        node = await cluster.node("first", drain_seconds=600)
        await cluster.submit(task("begun", f"{ASK}; {until_there(mark)}"))
        began = await cluster.in_stage("first", "run")
        node.signal(signal.SIGTERM)
        await cluster.until(_draining)
        await cluster.server.kill()
        await cluster.server.start()
        await cluster.until(_draining)
        await cluster.submit(task("later", f"{ASK}; {until_there(other)}"))
        second = await cluster.node("second", drain_seconds=600)
        await cluster.in_stage("second", "run")
        mark.touch()
        assert await node.process.wait() == 0
        second.signal(signal.SIGTERM)
        await cluster.until(_draining)
        assert await second.end(signal.SIGTERM) == 0
        other.touch()
        await cluster.node("third")
        results = await cluster.check()
        assert results["begun", 0].node_id == began["node_id"]


async def _draining(cluster: Cluster) -> bool:
    return any(node["draining"] for node in await cluster.client.nodes())


@pytest.mark.faults
async def test_preempted_machines_convict_nobody(tmp_path: Path) -> None:
    """20 machines are taken away, two at a time, some of them a moment after SIGTERM, while 200 sessions run."""
    async with Cluster(tmp_path, lease_seconds=3) as cluster:
        nodes = [await cluster.node(f"n{number}", run_workers=8, init_workers=8) for number in range(4)]
        await cluster.joined(*(node.name for node in nodes))
        await cluster.submit(*(quick(f"t{number}", 10, **_seconds(2)) for number in range(20)))
        for number in range(10):
            pair = [nodes[number % 4], nodes[(number + 1) % 4]]
            if number % 2:
                for node in pair:
                    node.signal(signal.SIGTERM)
            await cluster.reader.until(lambda number=number: len(cluster.reader.got) >= 15 * number)
            await asyncio.gather(*(node.kill() for node in pair))
            await asyncio.gather(*(node.start() for node in pair))
        results = await cluster.check(seconds=600)
        assert len(results) == 200


def _seconds(seconds: float) -> dict[str, Any]:
    return {"agent": {"harness": "shell", "custom_shell": {"command": f"{ASK}; sleep {seconds}"}}}


async def test_told_to_end_before_any_server_answers(tmp_path: Path) -> None:
    node = Node(tmp_path / "node", "http://127.0.0.1:9", {"POLAR_NODE__RUNTIMES": '["local"]'})
    try:
        await node.start()
        async with asyncio.timeout(120):
            while "No rollout server answers" not in node.said():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.02)
        assert await node.end(signal.SIGTERM) == 0
    finally:
        await node.close()


async def _all_queued(cluster: Cluster) -> bool:
    return (await cluster.client.status())["runs"]["default"]["queued"] == 3 and not await cluster.client.nodes()


def killing(nodes: Path) -> str:
    """A command that kills the node that runs it: whoever has its data below there."""
    is_one = f"tr '\\0' ' ' < $p/cmdline 2> /dev/null | grep -q -- '[-]-data {nodes}/n'"
    return f"for p in /proc/[0-9]*; do if {is_one}; then kill -9 ${{p#/proc/}}; fi; done"


@pytest.mark.faults
async def test_work_that_kills_its_node_is_set_aside(tmp_path: Path) -> None:
    """And what ran beside it is not."""
    async with Cluster(tmp_path, lease_seconds=4) as cluster:
        over = asyncio.Event()
        died = 0

        async def keep_alive() -> None:
            """As a supervisor would."""
            nonlocal died
            for number in range(30):
                node = await cluster.node(f"n{number}", run_workers=4)
                ended, stopped = asyncio.create_task(node.process.wait()), asyncio.create_task(over.wait())
                await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if over.is_set():
                    ended.cancel()
                    return
                stopped.cancel()
                died += 1

        await cluster.submit(
            task("killer", f"{ASK}; sleep 1; {killing(tmp_path)}; sleep 60"),
            *(task(f"innocent-{number}", f"{ASK}; sleep 2", num_samples=2) for number in range(5)),
        )
        keeping = asyncio.create_task(keep_alive())
        try:
            results = await cluster.check(usable=False)
        finally:
            over.set()
            await keeping
        assert results["killer", 0].reason == "node_killer"
        assert [one.reason for key, one in results.items() if key[0] != "killer"] == [None] * 10
        assert 4 <= died <= 9
