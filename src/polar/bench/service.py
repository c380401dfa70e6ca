"""`polar bench service`: sessions a second through the rollout service, results a second, and what a long queue costs.

    throughput   sessions in which nothing happens, from submission to the result at its reader (service_throughput.py)
    reading      results of 50,000 tokens each, against a plain server of JSON (service_reading.py)
    queue        submit and lease with few and with many sessions queued, and the server's memory (service_queue.py)
    peers        other durable queues, with jobs in which nothing happens (peers/queues.py)

Server, workers and client are processes of their own, and all of them may run on every core.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, field

from polar.bench import service_databases, service_peers, service_queue, service_results, service_throughput
from polar.bench.service_peers import PeerQueue
from polar.bench.service_queue import QueueCosts
from polar.bench.service_results import ReadCosts
from polar.bench.service_throughput import Throughput

Progress = Callable[[str], None]


class ServicePlan(Struct, frozen=True):
    """How much is measured."""

    sessions: int = 3_000  # of a round
    node_sessions: int = 500  # of a round, through the production node
    rounds: int = 5
    results: int = 60  # of 50,000 tokens
    few: int = 1_000  # sessions in a queue
    many: int = 100_000
    calls: int = 150  # of each kind, at each queue
    jobs: int = 2_000  # of a peer


QUICK = ServicePlan(sessions=1_500, node_sessions=200, rounds=2, results=20, many=20_000, calls=60, jobs=500)


class ServiceReport(Struct):
    plan: ServicePlan
    through: list[Throughput] = field(default_factory=list)
    read: list[ReadCosts] = field(default_factory=list)
    queued: list[QueueCosts] = field(default_factory=list)
    peers: list[PeerQueue] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # what was not measured, and why


async def run(
    plan: ServicePlan, postgres: str | None, peer_pythons: Sequence[Path], progress: Progress
) -> ServiceReport:
    """All of it. `postgres` is the URL of a server where databases may be made; peers are measured in the first of the
    given interpreters that has them."""
    report = ServiceReport(plan)
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        folder = Path(name)
        with service_databases.open_backends(postgres, folder) as (kinds, absent):
            report.absent |= absent
            for kind in kinds:
                for form in service_throughput.FORMS:
                    progress(f"sessions a second: {form}, {kind.name}")
                    sessions = plan.node_sessions if form == service_throughput.NODE else plan.sessions
                    report.through.append(
                        await service_throughput.measure(form, kind, sessions, plan.rounds, folder / "through")
                    )
            for kind in kinds:
                progress(f"results of 50,000 tokens, {kind.name}")
                report.read += await service_results.measure(kind, plan.results, plan.rounds, folder / "reading")
            for kind in kinds:
                progress(f"{plan.few:,} and {plan.many:,} sessions queued, {kind.name}")
                report.queued.append(
                    await service_queue.measure(kind, plan.few, plan.many, plan.calls, folder / "queue")
                )
            for peer in service_peers.PEERS:
                progress(f"jobs a second: {peer}")
                found = await service_peers.measure(peer, kinds, plan.jobs, peer_pythons, folder)
                if isinstance(found, str):
                    report.absent[peer] = found
                else:
                    report.peers.append(found)
    return report
