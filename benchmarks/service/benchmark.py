"""`make bench-service`: sessions a second through the rollout service, results a second, and what a long queue costs.

    throughput   sessions in which nothing happens, from submission to the result at its reader (throughput.py)
    reading      results of 50,000 tokens each, against a plain server of JSON (results.py)
    queue        submit and lease with few and with many sessions queued, and the server's memory (long_queue.py)
    peers        other durable queues, with jobs in which nothing happens (peers.py)

Server, workers and client are processes of their own, and all of them may run on every core.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer, peer_python_option
from benchmarks.process import run_async
from benchmarks.report import MB, Promise, describe_machine, make_promise_table
from benchmarks.service import databases as service_databases
from benchmarks.service import long_queue as service_queue
from benchmarks.service import peers as service_peers
from benchmarks.service import results as service_results
from benchmarks.service import throughput as service_throughput
from benchmarks.service.long_queue import LEASE, SIZE, SUBMIT, QueueCosts
from benchmarks.service.peers import PeerQueue
from benchmarks.service.results import POLAR, ReadCosts
from benchmarks.service.throughput import NODE, ONE_PROCESS, TWO_WORKERS, Throughput


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


# Promises and tables

_FORMS = {
    ONE_PROCESS: "server and worker in one process, nothing happens",
    TWO_WORKERS: "two worker processes over HTTP, nothing happens",
    NODE: "one process, production node, runtimes without work",
}
_ENOUGH = 100_000  # queued sessions, for what is promised of them


def list_promises(report: ServiceReport) -> list[Promise]:
    return list(_iterate_promises(report))


def _iterate_promises(report: ServiceReport) -> Iterator[Promise]:
    for through in report.through:
        if through.form == ONE_PROCESS:
            rate = through.per_second
            yield Promise(f"sessions a second, {through.database}", "at least 300", f"{rate:.0f}", rate >= 300)
    for read in report.read:
        if read.server == POLAR:
            rate, what = read.mb_per_second, f"results of {read.tokens:,} tokens, {read.database}"
            yield Promise(what, "at least 50 MB/s", f"{rate:.1f} MB/s", rate >= 50)
    for queued in report.queued:
        if queued.many >= _ENOUGH:
            memory, what = queued.peak / MB, f"memory of the server, {queued.many:,} sessions queued, {queued.database}"
            yield Promise(what, "under 400 MB", f"{memory:.0f} MB", memory < 400)
            for call in (SUBMIT, LEASE):
                what = f"{call} with {queued.many:,} queued against {queued.few:,}, {queued.database}"
                ratio = queued.compute_ratio(call)
                yield Promise(what, "at most 1.25 x", f"{ratio:.2f} x", ratio <= 1.25)


def to_json(report: ServiceReport) -> bytes:
    return msgspec.json.encode(
        {"machine": describe_machine(), **msgspec.structs.asdict(report), "promises": list_promises(report)},
    )


def print_report(report: ServiceReport, console: Console) -> None:
    for table in (
        _make_throughput_table(report),
        _make_read_table(report),
        _make_queue_table(report),
        make_promise_table(list_promises(report)),
    ):
        if table.row_count:
            console.print(table)
    for name, why in report.absent.items():
        console.print(f"{name} was not measured: {why}", highlight=False, markup=False)


def _make_throughput_table(report: ServiceReport) -> Table:
    title = "From submission to the result: sessions a second, and CPU milliseconds a session"
    table = _make_table(title, "", "database", "a second", "CPU", "of which", "sessions")
    for one in report.through:
        table.add_row(
            _FORMS[one.form], one.database, f"{one.per_second:.0f}", *_format_cpu(one.cpu_ms), f"{one.sessions:,}"
        )
    for peer in report.peers:
        name = f"{peer.name} {peer.version}, jobs"
        table.add_row(name, peer.database, f"{peer.per_second:.0f}", *_format_cpu(peer.cpu_ms), f"{peer.jobs:,}")
    return table


def _format_cpu(by_process: dict[str, float]) -> tuple[str, str]:
    parts = ", ".join(f"{name} {figure:.2f}" for name, figure in by_process.items())
    return f"{sum(by_process.values()):.2f}", parts


def _make_read_table(report: ServiceReport) -> Table:
    table = _make_table("Results read over HTTP", "", "database", "MB/s", "CPU ms a MB", "tokens", "KB each", "results")
    for one in report.read:
        figures = f"{one.mb_per_second:.1f}", f"{one.cpu_ms:.1f}", f"{one.tokens:,}", f"{one.size / 1000:.0f}"
        table.add_row(one.server, one.database, *figures, str(one.results))
    return table


def _make_queue_table(report: ServiceReport) -> Table:
    title = f"A long queue against a short one: calls for {SIZE} sessions, medians in ms (the server's CPU)"
    table = _make_table(title, "", "database", "short", "long", "ratio")
    for one in report.queued:
        for call in one.long.ms:
            short, long = (f"{side.ms[call]:.2f} ({side.cpu_ms[call]:.2f})" for side in (one.short, one.long))
            ratio = f"{one.compute_ratio(call):.2f}"
            table.add_row(f"{call}, {one.few:,} and {one.many:,}", one.database, short, long, ratio)
        resident = f"{one.before / MB:.0f} MB", f"{one.resident / MB:.0f} MB, at most {one.peak / MB:.0f}"
        table.add_row("resident, without and with the long one", one.database, *resident, "")
        table.add_row("taken in, sessions a second", one.database, "", f"{one.per_second:,.0f}", "")
    return table


def _make_table(title: str, *columns: str, right: bool = True) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if right and column not in ("", "database", "of which") else "left")
    return table


# The command


@click.command("service")
@click.option("--quick", is_flag=True, help="Run fewer sessions, and queue 20,000 instead of 100,000.")
@click.option(
    "--postgres",
    metavar="URL",
    help="Use the PostgreSQL server at this URL, where databases may be made [default: pgserver, if it is installed].",
)
@peer_python_option
@json_option
def command(quick: bool, postgres: str | None, peer_pythons: tuple[Path, ...], as_json: bool) -> None:
    """Measure sessions and results a second through the rollout service, and what a long queue costs.

    Peers are huey and procrastinate.
    """
    plan = QUICK if quick else ServicePlan()
    measured = run_async(run(plan, postgres, peer_pythons, make_progress_printer()))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())
