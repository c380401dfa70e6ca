"""Results of 50,000 tokens each, read by a consumer over HTTP: bytes a second, and what they cost the server.

    Polar     GET /rollout/results: read from the store, built, and written as they are needed, page by page
    FastAPI   the same documents as a straightforward server has them (json_results.py)

Both are read by the same client, in turns.
"""

import contextlib
import statistics
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.client import BenchmarkError
from benchmarks.process import Address, ServerProcess
from benchmarks.service.client import ClientOrder, ClientResult
from benchmarks.service.databases import SQLITE, DatabaseBackend
from benchmarks.service.throughput import run_order, start_client, start_process
from polar.client.async_client import AsyncClient

POLAR, FASTAPI = "Polar", "FastAPI and json"
_PAGE = 16  # results
_MB = 1_000_000


class ReadCosts(Struct):
    server: str
    database: str
    results: int
    tokens: int  # of a result
    size: int  # bytes of a result
    mb_per_second: float
    cpu_ms: float  # of the server, a MB


async def measure(kind: DatabaseBackend, results: int, rounds: int, folder: Path) -> list[ReadCosts]:
    where = folder / kind.name
    where.mkdir(parents=True)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(kind.new())
        server, url = await start_process(stack, "server", ["long", str(where / "server")], store, where)
        sides = {POLAR: (server, await start_client(stack, url, where))}
        await run_order(sides[POLAR][1], ClientOrder(results, submit="long", page=_PAGE), server)
        if kind.name == SQLITE:
            peer, peer_url = await _start_peer(stack, url, results, where)
            (where / "peer").mkdir()
            sides[FASTAPI] = peer, await start_client(stack, peer_url, where / "peer")
        found: dict[str, list[tuple[ClientResult, float]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, (process, client) in sides.items():
                before = process.read_cpu_seconds()
                done = await run_order(client, ClientOrder(results, page=_PAGE), process)
                found[name].append((done, process.read_cpu_seconds() - before))
        tokens = await _count_tokens(url)
    sizes = {done.size for some in found.values() for done, _ in some}
    if max(sizes) > 1.01 * min(sizes):  # numbers may be written in more than one way
        raise BenchmarkError(f"The same results were read as {min(sizes)} and as {max(sizes)} bytes.")
    return [
        ReadCosts(
            name,
            kind.name,
            results,
            tokens,
            some[0][0].size // results,
            statistics.median(done.size / _MB / done.seconds for done, _ in some),
            statistics.median(1000 * cpu / (done.size / _MB) for done, cpu in some),
        )
        for name, some in found.items()
    ]


async def _start_peer(
    stack: contextlib.AsyncExitStack, url: str, results: int, folder: Path
) -> tuple[ServerProcess, str]:
    """A server of the same documents."""
    documents = folder / "documents.jsonl"
    with documents.open("wb") as file:
        async with AsyncClient(url) as client, client.results(0, raw=True, limit=_PAGE, count=results) as read:
            async for result in read:
                file.write(result.data + b"\n")
    argv = [sys.executable, "-m", "benchmarks.service.json_results", str(documents), str(folder / "documents.db")]
    process = await stack.enter_async_context(ServerProcess(argv, None, folder / "peer.log", speaks=True))
    return process, (await process.read_message(Address)).control


async def _count_tokens(url: str) -> int:
    """Of the first result."""
    async with AsyncClient(url) as client, client.results(0, raw=True, limit=1, count=1) as read:
        [result] = [result async for result in read]
    traces = msgspec.json.decode(result.data, type=_Document).trajectory.traces
    return sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)


class _Trace(Struct):
    prompt_ids: list[int]
    response_ids: list[int]


class _Trajectory(Struct):
    traces: list[_Trace]


class _Document(Struct):
    trajectory: _Trajectory
