"""Sessions a second through the rollout service, from submission to the result at its reader, and what each costs.

    one process   the server and its worker together, as in `polar up`; a session is made and ended in the store
    two workers   two more processes with a worker each, which join over HTTP. On PostgreSQL they write to the server's
                  store, else to stores of their own, and send a copy of each session
    node          one process again, with the production node: plans, stages, folders, verdicts, over runtimes in which
                  nothing happens

The client submits in batches while it reads pages of results, over HTTP. Rounds are alike; the median is told.
"""

import asyncio
import contextlib
import statistics
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.client import BenchmarkError
from benchmarks.pipeline.runtime import NAME, NUMBER, SECONDS
from benchmarks.process import Address, ServerProcess
from benchmarks.service.client import ClientOrder, ClientResult
from benchmarks.service.databases import SQLITE, DatabaseBackend

ONE_PROCESS, TWO_WORKERS, NODE = "one process", "two workers", "node"
FORMS = (ONE_PROCESS, TWO_WORKERS, NODE)
_SERVERS = {ONE_PROCESS: "noop", TWO_WORKERS: "none", NODE: "node"}
_LONGEST = 600.0  # seconds of a round


class Throughput(Struct):
    """What was measured of one form. CPU is milliseconds of user and system time a session, by process."""

    form: str
    database: str
    sessions: int  # of all rounds
    per_second: float
    cpu_ms: dict[str, float]

    @property
    def cpu(self) -> float:
        return sum(self.cpu_ms.values())


async def measure(form: str, kind: DatabaseBackend, sessions: int, rounds: int, folder: Path) -> Throughput:
    where = folder / f"{form} {kind.name}".replace(" ", "-")
    where.mkdir(parents=True)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(kind.new())
        server, url = await start_process(stack, "server", [_SERVERS[form], str(where / "server")], store, where)
        processes = {"server": [server], "workers": []}
        if form == TWO_WORKERS:
            for name in ("first", "second"):
                arguments = [url, name, str(where / name)]
                shared = None if kind.name == SQLITE else store
                worker, _ = await start_process(stack, "worker", arguments, shared, where, name=name)
                processes["workers"].append(worker)
        client = await start_client(stack, url, where)
        order = ClientOrder(max(50, sessions // 10), submit="first", task=make_node_task() if form == NODE else None)
        cursor = (await _run_round(client, order, server)).cursor  # the first is for their caches
        rates: list[float] = []
        costs: list[dict[str, float]] = []
        for number in range(rounds):
            before = _read_cpu(processes, kind)
            order = ClientOrder(sessions, cursor, submit=f"round-{number}", task=order.task)
            done = await _run_round(client, order, server)
            cursor = done.cursor
            after = _read_cpu(processes, kind)
            spent = {name: after[name] - before[name] for name in after} | {"client": done.cpu}
            rates.append(sessions / done.seconds)
            costs.append({name: 1000 * seconds / sessions for name, seconds in spent.items()})
    cpu = {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}
    return Throughput(form, kind.name, sessions * rounds, statistics.median(rates), cpu)


async def start_process(
    stack: contextlib.AsyncExitStack, what: str, arguments: list[str], store: str | None, folder: Path, name: str = ""
) -> tuple[ServerProcess, str]:
    """A process of this benchmark's (server.py, worker.py), and the address that it prints."""
    argv = [sys.executable, "-m", f"benchmarks.service.{what}", *arguments, *([] if store is None else [store])]
    process = await stack.enter_async_context(ServerProcess(argv, None, folder / f"{what}{name}.log", speaks=True))
    return process, (await process.read_message(Address)).control


async def start_client(stack: contextlib.AsyncExitStack, url: str, folder: Path) -> ServerProcess:
    argv = [sys.executable, "-m", "benchmarks.service.client", url]
    return await stack.enter_async_context(ServerProcess(argv, None, folder / "client.log", speaks=True))


async def run_order(client: ServerProcess, order: ClientOrder, server: ServerProcess) -> ClientResult:
    client.send_line(msgspec.json.encode(order).decode())
    done = asyncio.ensure_future(client.read_message(ClientResult, _LONGEST))
    ended = asyncio.ensure_future(server.wait())
    try:
        await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise server.make_error("ended while it was measured")
        return done.result()
    finally:
        done.cancel()
        ended.cancel()


async def _run_round(client: ServerProcess, order: ClientOrder, server: ServerProcess) -> ClientResult:
    done = await run_order(client, order, server)
    if done.usable != order.count:
        raise BenchmarkError(f"Of {order.count} sessions only {done.usable} went well.")
    return done


def _read_cpu(processes: dict[str, list[ServerProcess]], kind: DatabaseBackend) -> dict[str, float]:
    """Seconds of CPU time so far."""
    spent = {name: sum(one.read_cpu_seconds() for one in some) for name, some in processes.items() if some}
    return spent if kind.cpu is None else spent | {kind.name: kind.cpu()}


def make_node_task() -> str:
    """An agent that does nothing, in a runtime in which nothing happens."""
    nothing = {NUMBER: "0", SECONDS: "0"}
    task = {
        "task_id": "any",
        "instruction": "Do nothing.",
        "runtime": {"backend": NAME},
        "agent": {"custom_shell": {"command": "true"}, "env": nothing},
        "evaluator": {"strategy": "session_completed"},
    }
    return msgspec.json.encode(task).decode()
