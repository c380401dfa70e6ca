"""Other durable queues on the same machine in the same run, with jobs in which nothing happens (peer_queues.py)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.service.databases import POSTGRES, SQLITE, DatabaseBackend

PEERS = ("huey", "procrastinate")
_DATABASES = {"huey": SQLITE, "procrastinate": POSTGRES}
_SCRIPT = Path(__file__).with_name("peer_queues.py")
_PEER_TIMEOUT_SECONDS = 600.0  # seconds


class PeerQueue(Struct):
    name: str
    version: str
    database: str
    jobs: int
    per_second: float
    cpu_ms: dict[str, float]  # a job, by process


class _Answer(Struct):
    version: str
    seconds: float
    cpu: float


async def measure(
    peer: str, kinds: Sequence[DatabaseBackend], jobs: int, pythons: Sequence[Path], folder: Path
) -> PeerQueue | str:
    """Why not, where it can't be measured."""
    found = [kind for kind in kinds if kind.name == _DATABASES[peer]]
    if not found:
        return f"there is no {_DATABASES[peer]}"
    why = f"name an interpreter that has {peer} with --peer-python"
    for python in pythons:
        with found[0].new() as url:
            answer = await _run_peer(python, peer, jobs, url or str(folder / f"{peer}.db"), found[0])
        if isinstance(answer, PeerQueue):
            return answer
        why = answer
    return why


async def _run_peer(python: Path, peer: str, jobs: int, place: str, kind: DatabaseBackend) -> PeerQueue | str:
    before = 0.0 if kind.cpu is None else kind.cpu()
    pipe = asyncio.subprocess.PIPE
    try:
        argv = [str(python), str(_SCRIPT), peer, str(jobs), place]
        process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    except OSError as error:
        return f"{python}: {error.strerror}"
    try:
        async with asyncio.timeout(_PEER_TIMEOUT_SECONDS):
            told, complaints = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"{python}: no end after {_PEER_TIMEOUT_SECONDS:.0f} seconds"
    if process.returncode:
        return f"{python}: {(complaints.decode(errors='replace').strip().splitlines() or ['no reason given'])[-1]}"
    answer = msgspec.json.decode(told, type=_Answer)
    cpu = {"workers": 1000 * answer.cpu / jobs}
    if kind.cpu is not None:
        cpu[kind.name] = 1000 * (kind.cpu() - before) / (jobs + jobs // 10)
    return PeerQueue(peer, answer.version, kind.name, jobs, jobs / answer.seconds, cpu)
