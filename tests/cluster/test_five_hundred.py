"""The whole of it: `polar up` on two Ray machines with PostgreSQL, 500 sessions, and a trainer that reads them.

On the way a node's process, a machine and the server (twice) are killed. 500 results come, none twice, none missing.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

import polar
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.records.result import NumberedResult
from tests.cluster.machines import Machines, alive, command_line, wait_until
from tests.fault.service.processes import POLAR, Server
from tests.unit.store.servers import postgres_server

pytestmark = pytest.mark.cluster

TASKS, SAMPLES = 125, 4
PATIENCE = 180.0  # seconds, for each step

FIRST, SECOND = "I think.", "Answer: 7"
PLAY = f"""
[[turns]]
text = "{FIRST}"

[[turns]]
text = "{SECOND}"
"""


def ask(*messages: tuple[str, str]) -> str:
    """A command that calls the model with this conversation."""
    body = {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages]}
    return (
        'curl -fs "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


def task(number: int) -> dict[str, Any]:
    """An agent that asks, waits, and asks again; what it then answers is right in every other task."""
    question = ("user", f"What is riddle-{number:03}?")
    first, second = ask(question), ask(question, ("assistant", FIRST), ("user", "Well?"))
    return {
        "task_id": f"riddle-{number:03}",
        "instruction": "solve it",
        "num_samples": SAMPLES,
        "runtime": {"backend": "local"},
        "agent": {"harness": "shell", "custom_shell": {"command": f"{first} && sleep 1 && {second}"}},
        "evaluator": {"strategy": "answer", "config": {"expected": str(7 + number % 2)}},
    }


@contextlib.contextmanager
def scripted_engine(folder: Path) -> Iterator[str]:
    """A process of its own, which outlives all others; its URL."""
    play = folder / "play.toml"
    play.write_text(PLAY)
    argv = [sys.executable, "-m", "polar.engines.scripted", "--play", str(play)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate()


class Trainer:
    """Follows the feed in a thread. Use as a context manager."""

    def __init__(self, url: str) -> None:
        self.client = polar.Client(url, patience=PATIENCE)
        self.got: list[NumberedResult] = []
        self._results = self.client.results(consumer="trainer", limit=16, wait=2)
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        for result in self._results:
            self.got.append(result)

    def __enter__(self) -> "Trainer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._results.close()
        self._thread.join()
        self.client.close()

    async def has(self, count: int) -> None:
        await until(lambda: len(self.got) >= count or not self._thread.is_alive(), lambda: f"{len(self.got)} results")
        assert self._thread.is_alive(), "the trainer failed"

    def nodes(self) -> dict[str, dict[str, Any]]:
        """By name, as the server knows them."""
        return {node["name"]: node for node in self.client.nodes()}

    async def joined(self, *others: str) -> dict[str, str]:
        """Waits for both nodes, with other ids than these: their ids by name."""
        found: dict[str, str] = {}

        def both() -> bool:
            found.update(
                {name: node["node_id"] for name, node in self.nodes().items() if node["node_id"] not in others}
            )
            return found.keys() == {"node@one", "node@two"}

        await until(both, lambda: f"only {list(found)} joined")
        return found

    async def busy(self, name: str) -> None:
        """Waits until this node runs some."""
        await until(lambda: self.nodes()[name]["load"].get("run", 0) > 1, lambda: f"{name} runs nothing")


async def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    clock = asyncio.get_running_loop().time
    end = clock() + PATIENCE
    while not await asyncio.to_thread(condition):
        assert clock() < end, what()
        await asyncio.sleep(0.05)


def actors(machines: Machines) -> list[list[int]]:
    """The processes that are nodes, of each machine."""
    return [machines[name].actors for name in ("one", "two")]


def at_work(database: str, node_id: str) -> set[str]:
    """The sessions of a node that have not ended."""
    with psycopg.connect(database) as connection:
        wanted = "SELECT session_id FROM sessions WHERE status = 'open' AND metadata::json->>'node_id' = %s"
        return {session_id for (session_id,) in connection.execute(wanted, [node_id])}


def processes_of(folder: Path) -> list[str]:
    """Command lines of all that were started for this test: the folder is in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes() and alive(int(process.name)):
                found.append(command_line(int(process.name)).replace(b"\0", b" ").decode())
    return found


def settings(machines: Machines, folder: Path, engine: str, database: str) -> dict[str, str]:
    return {
        "POLAR_STORE__URL": database,
        "POLAR_ENGINE__KIND": "vllm",
        "POLAR_ENGINE__TOKENIZER": str(TOKENIZER_FOLDER),
        "POLAR_ENGINE__URLS": json.dumps([engine]),
        "POLAR_SERVER__BEAT_SECONDS": "1",
        "POLAR_CLUSTER__ENGINE": "ray",
        "POLAR_CLUSTER__ADDRESS": machines.address,
        "POLAR_CLUSTER__DATA": str(folder / "nodes"),
        "POLAR_NODE__RUNTIMES": '["local"]',
        "POLAR_NODE__RUN_WORKERS": "8",
    }


async def test_five_hundred_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres_server() as postgres:
        monkeypatch.setenv("STARTED_FOR", str(tmp_path))
        database = postgres.new_database()
        with scripted_engine(tmp_path) as engine, Machines("one", "two") as machines:
            server = Server(tmp_path / "server", settings(machines, tmp_path, engine, database))
            try:
                await through_all(machines, server, database)
            except BaseException:
                print(server.said()[-6000:])
                raise
            finally:
                await server.close()
            assert actors(machines) == [[], []]  # they were drained, and none was left to Ray
        await asyncio.to_thread(wait_until, lambda: processes_of(tmp_path) == [], "processes are left")


async def through_all(machines: Machines, server: Server, database: str) -> None:
    await server.start()
    tasks = [task(number) for number in range(TASKS)]
    lost: set[str] = set()
    with Trainer(server.url) as trainer:
        nodes = [await trainer.joined()]
        await asyncio.to_thread(trainer.client.submit, tasks[:100])

        await trainer.has(40)  # a node's process is killed
        await trainer.busy("node@one")
        os.kill(machines["one"].actors[0], signal.SIGKILL)
        lost |= at_work(database, nodes[-1]["node@one"])
        nodes.append(await trainer.joined(nodes[-1]["node@one"]))

        await trainer.has(120)  # the server, for the first time
        await server.kill()
        await server.start()
        assert await trainer.joined() == nodes[-1]  # they went on, and were found

        await trainer.has(200)  # a machine
        await trainer.busy("node@two")
        await asyncio.to_thread(machines["two"].kill)
        lost |= at_work(database, nodes[-1]["node@two"])
        await asyncio.to_thread(machines.add, "two")
        nodes.append(await trainer.joined(nodes[-1]["node@two"]))

        before = actors(machines)  # the server again, as the last tasks come
        await server.kill()
        submitting = asyncio.create_task(asyncio.to_thread(trainer.client.submit, tasks[100:]))
        await server.start()
        await submitting
        assert await trainer.joined() == nodes[-1]

        await trainer.has(TASKS * SAMPLES)
        assert actors(machines) == before
        check_results(trainer, nodes, lost)
        # There is nothing more, and whoever comes later reads the same.
        counts = trainer.client.status()["runs"]["default"]
        assert [counts[state] for state in ("queued", "leased", "waiting", "done")] == [0, 0, 0, TASKS * SAMPLES]
        again = [(result.cursor, result.session_id) for result in trainer.client.results(after=0, follow=False)]
        assert again == [(result.cursor, result.session_id) for result in trainer.got]
    assert await server.end() == 0
    await check_store(server, database, trainer.got, lost)


def check_results(trainer: Trainer, nodes: list[dict[str, str]], lost: set[str]) -> None:
    got = trainer.got
    expected = Counter((f"riddle-{number:03}", sample) for number in range(TASKS) for sample in range(SAMPLES))
    assert Counter((result.task_id, result.sample) for result in got) == expected
    assert len({result.session_id for result in got}) == len(got)
    assert all(before.cursor < after.cursor for before, after in pairwise(got))
    for result in got:
        assert result.reason is None, (result.reason, result.error)
        assert result.reward == 1.0 - int(result.task_id[-3:]) % 2
        assert result.trajectory is not None
        [trace] = result.trajectory.traces  # both calls: the second goes on from the first
        assert result.task_id in str(trace.prompt_messages)
        assert 0 in trace.loss_mask
        assert 1 in trace.loss_mask
    # Both machines ran sessions, before and after each of their deaths; no session that died with one is among them.
    places = {node_id for names in nodes for node_id in names.values()}
    assert len(places) == 4
    assert {result.node_id for result in got} == places
    assert lost
    assert lost.isdisjoint(result.session_id for result in got)


async def check_store(server: Server, database: str, got: list[NumberedResult], lost: set[str]) -> None:
    """Every token is what was sampled, in what was delivered and in what was lost; and none of the lost
    passes for a sample."""
    delivered = {result.session_id for result in got}
    checked = await verified(server.folder, database, *delivered)
    assert (checked["sessions"], checked["exchanges"]) == (TASKS * SAMPLES, 2 * TASKS * SAMPLES)
    assert (await verified(server.folder, database))["sessions"] >= len(delivered | lost)
    with psycopg.connect(database) as connection:
        wanted = "SELECT status, reward, reason FROM sessions WHERE session_id = ANY(%s)"
        assert set(connection.execute(wanted, [list(lost)])) == {("ended", None, "node_lost")}


async def verified(folder: Path, database: str, *sessions: str) -> dict[str, Any]:
    """What `polar verify` says."""
    process = await asyncio.create_subprocess_exec(
        *POLAR,
        *("verify", "--json", *sessions),
        cwd=folder,
        env=os.environ | {"POLAR_STORE__URL": database},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said
    found: dict[str, Any] = json.loads(said)
    return found
