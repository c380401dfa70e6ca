"""Two hundred sandboxes at once, agents that behave badly, a node that is killed: nothing is left on the machine."""

import asyncio
import json
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polar.config import load
from polar.gateway.process import tune_process
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.records.task import TaskRequest
from polar.store import open_store
from polar.testing import leftovers
from tests.integration.agents import command

pytestmark = pytest.mark.faults

PYTHON = "/usr/bin/python3"
DAEMONS = """
import subprocess
for _ in range(3):
    subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 300 & sleep 300"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
"""
STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
time.sleep(300)
"""
FILLS = """
try:
    with open("big", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
except OSError as error:
    print(error)
"""


def task(name: str, code: str, mark: str, **fields: Any) -> TaskRequest:
    runtime = {"backend": "bubblewrap", "env": {"MARK": mark}, "memory_mb": 256, "processes": 64}
    document = {
        "task_id": name,
        "instruction": "go",
        "runtime": runtime | fields.pop("runtime", {}),
        "agent": {"harness": "shell", "custom_shell": {"command": command(code, PYTHON)}},
        "evaluator": {"strategy": "command", "config": {"command": "true", "artifacts": ["done"]}},
        **fields,
    }
    return TaskRequest.model_validate(document)


class Ids:
    """Ids of the runtimes that there have been, told by their folders while they are there."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.seen: set[str] = set()

    def look(self) -> None:
        self.seen |= {path.name for path in self._data.glob("runtimes/*/*/runtimes/*")}


def nothing_left(data: Path, ids: Ids, mark: str) -> None:
    assert ids.seen
    found = leftovers.list_leftovers(data / "runtimes", sorted(ids.seen), mark)
    assert found == {kind: [] for kind in found}
    assert list((data / "node").iterdir()) == []
    assert list((data / "runtimes").glob("*/*")) == []


async def test_two_hundred_sessions_at_once(tmp_path: Path) -> None:
    tune_process()
    mark, data = secrets.token_hex(8), tmp_path / "data"
    done = "open('done', 'w').close()\n"
    tasks = [
        task("plain", "ask()\n" + done, mark, num_samples=80),
        task("daemons", "ask()\n" + done + DAEMONS, mark, num_samples=40),
        task("stubborn", "ask()\n" + done + STUBBORN, mark, num_samples=40, timeout_seconds=20),
        task("fills", "ask()\n" + done + FILLS, mark, num_samples=40, runtime={"disk_mb": 16}),
    ]
    node = {"init_workers": 4, "ready_buffer": 8, "run_workers": 200, "postrun_workers": 4}
    ids, descriptors = Ids(data), leftovers.count_open_descriptors()
    finished: list[FinishedSession] = []
    async with LocalRollout(
        load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}, "node": node}), data
    ) as rollout:
        await rollout.plane.pool.pause()  # until every session waits for its first reply: so all are there at once
        plans = await rollout.plan(tasks)
        running = [await rollout.node.submit(plan, n) for plan in plans for n in range(plan.task.num_samples)]
        async with asyncio.timeout(300):
            while rollout.get_load().held < 200:
                ids.look()
                await asyncio.sleep(0.05)
        assert rollout.get_load().run == 200
        assert len(ids.seen) >= 200
        await rollout.plane.pool.resume()
        for one in running:
            finished.append(await one.finished)
            ids.look()
    outcomes = Counter((one.task_id, one.outcome and one.outcome.end_reason, one.verdict.reward) for one in finished)
    assert outcomes == {
        ("plain", "finished", 1.0): 80,
        ("daemons", "finished", 1.0): 40,
        ("stubborn", "timeout", 1.0): 40,
        ("fills", "finished", 1.0): 40,
    }
    nothing_left(data, ids, mark)
    assert leftovers.count_open_descriptors() <= descriptors + 4  # libraries keep a few of their own


WAITS = "ask()\n" + DAEMONS + STUBBORN
NODE = {"init_workers": 3, "ready_buffer": 3, "run_workers": 4, "postrun_workers": 3}
SLEEPS = {"strategy": "command", "config": {"command": "sh -c 'trap \"\" TERM; sleep 300'"}}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "init": (WAITS, {"runtime": {"prepare": [{"type": "exec", "command": "trap '' TERM; sleep 300"}]}}),
    "ready": (WAITS, {}),
    "run": (WAITS, {"runtime": {"disk_mb": 16}}),
    "postrun": ("ask()\n", {"evaluator": SLEEPS}),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_node_is_killed_and_started_again(tmp_path: Path, stage: str) -> None:
    mark, data = secrets.token_hex(8), tmp_path / "data"
    code, fields = STAGES[stage]
    wanted = task("killed", code, mark, **fields)
    ids = Ids(data)
    arguments = [str(data), wanted.model_dump_json(), "12", json.dumps(NODE)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fault.node_process", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            while json.loads(await process.stdout.readline())[stage] < 3:
                ids.look()
            await asyncio.sleep(0.3)  # their commands have begun
            ids.look()
    finally:
        process.kill()
    await process.wait()

    async with LocalRollout(
        load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}, "node": NODE}), data
    ):
        pass  # it has swept
    nothing_left(data, ids, mark)
    store = open_store(f"sqlite:{data / 'polar.db'}")
    try:
        sessions = await store.list_sessions()
    finally:
        await store.close()
    assert len(sessions) == 12
    assert {(session.status, session.reward) for session in sessions} == {("ended", None)}
    assert "node_lost" in {session.reason for session in sessions}
