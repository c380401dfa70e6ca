"""What a long queue costs: the server's memory, and submit and lease, against a short queue.

Two servers, each a real `polar up --no-node` on a database of its own: one with few sessions queued, one with many, all
of them tasks of one sample with a kilobyte of instructions. A caller submits some tasks to one, leases as many as a
node, and tells their end, then does the same at the other, and so on in turns, so that whatever else the machine does
hits both; which one begins changes from turn to turn. So both queues stay as long as they were. What is compared are
the medians of the seconds that calls took, over HTTP.
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from benchmarks.client import BenchmarkError
from benchmarks.process import Address, ServerProcess
from benchmarks.service.databases import DatabaseBackend
from benchmarks.service.worker import BACKEND, make_no_op_task
from polar.client.async_client import AsyncClient
from polar.node.remote_server import RemoteServer
from polar.rollout.protocol import JoinRequest, SessionOutcome

SUBMIT, LEASE, FINISH = "submit", "lease", "finish"
SIZE = 20  # sessions of a call
_INSTRUCTION = "Do nothing, and do it well. " * 36
_FIRST = 10  # turns that are not counted: both have just been filled
_SLICE = 5_000  # tasks that are made at a time
_POLAR = [sys.executable, "-c", "from polar.cli.main import main; main()"]

T = TypeVar("T")


class CallCosts(Struct):
    """Medians of a call for SIZE sessions, by kind of call: milliseconds, and of these the server's CPU."""

    ms: dict[str, float]
    cpu_ms: dict[str, float]


class QueueCosts(Struct):
    database: str
    few: int
    many: int
    per_second: float  # sessions taken into the long queue
    before: int  # resident bytes of its server
    resident: int  # with all of them queued
    peak: int  # the most it ever was
    short: CallCosts
    long: CallCosts

    def compute_ratio(self, call: str) -> float:
        return self.long.ms[call] / self.short.ms[call]


async def measure(kind: DatabaseBackend, few: int, many: int, calls: int, folder: Path) -> QueueCosts:
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for name in ("short", "long"):
            where = folder / kind.name / name
            where.mkdir(parents=True)
            store = stack.enter_context(kind.new())
            sides.append(await stack.enter_async_context(_start_side(where, store)))
        short, long = sides
        before = long.process.read_memory_bytes()
        await short.fill(few)
        took = await long.fill(many)
        resident, peak = long.process.read_memory_bytes(), _read_peak(long.process)
        for side in sides:
            await side.join_server()
        for number in range(_FIRST + calls):
            for side in (short, long) if number % 2 else (long, short):
                await side.run_turn(number)
    return QueueCosts(
        kind.name, few, many, many / took, before, resident, peak, short.compute_costs(), long.compute_costs()
    )


class _Side:
    def __init__(self, process: ServerProcess, client: AsyncClient, node: RemoteServer) -> None:
        self.process = process
        self._client = client
        self._node = node
        self._seconds: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    async def fill(self, count: int) -> float:
        """Seconds that it took."""
        started_at = time.monotonic()
        numbers = iter(range(count))
        while some := [
            make_no_op_task(f"queued-{number}", _INSTRUCTION) for number in itertools.islice(numbers, _SLICE)
        ]:
            await self._client.submit(some)
        return time.monotonic() - started_at

    async def join_server(self) -> None:
        await self._node.join(JoinRequest("caller", "caller", [BACKEND], SIZE, "none"))

    async def run_turn(self, number: int) -> None:
        tasks = [make_no_op_task(f"turn-{number}-{task}", _INSTRUCTION) for task in range(SIZE)]
        await self._time_call(SUBMIT, lambda: self._client.submit(tasks))
        leases = await self._time_call(LEASE, lambda: self._node.lease("caller", [], SIZE))
        if len(leases) != SIZE:
            raise BenchmarkError(f"The server leased {len(leases)} sessions instead of {SIZE}.")
        ended = [SessionOutcome(lease.work_id, lease.fence, None, reward=1.0) for lease in leases]
        await self._time_call(FINISH, lambda: self._node.finish("caller", ended))

    async def _time_call(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        cpu, started_at = self.process.read_cpu_seconds(), time.perf_counter()
        answer = await call()
        self._seconds.setdefault(what, []).append(time.perf_counter() - started_at)
        self._cpu.setdefault(what, []).append(self.process.read_cpu_seconds() - cpu)
        return answer

    def compute_costs(self) -> CallCosts:
        return CallCosts(_compute_medians(self._seconds), _compute_medians(self._cpu))


@contextlib.asynccontextmanager
async def _start_side(folder: Path, store: str | None) -> AsyncIterator[_Side]:
    config = folder / "polar.toml"
    config.write_text("" if store is None else f"[store]\nurl = {msgspec.json.encode(store).decode()}\n", "utf-8")
    options = ["--no-node", "--json", "--port", "0", "--control-port", "0"]
    argv = [*_POLAR, "up", *options, "--config", str(config), "--data", str(folder / "data")]
    async with ServerProcess(argv, None, folder / "polar.log", speaks=True) as process:
        url = (await process.read_message(Address)).control
        async with AsyncClient(url) as client, RemoteServer(url, None) as node:
            yield _Side(process, client, node)


def _compute_medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {what: 1000 * statistics.median(some[_FIRST:]) for what, some in seconds.items()}


def _read_peak(process: ServerProcess) -> int:
    """Resident bytes, at most so far."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024
