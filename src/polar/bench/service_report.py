"""What `polar bench service` measured, against what is promised."""

from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.gateway_report import MB, Promise, describe_machine, promise_table
from polar.bench.service import ServiceReport
from polar.bench.service_queue import LEASE, SIZE, SUBMIT
from polar.bench.service_results import POLAR
from polar.bench.service_throughput import NODE, ONE_PROCESS, TWO_WORKERS

_FORMS = {
    ONE_PROCESS: "server and worker in one process, nothing happens",
    TWO_WORKERS: "two worker processes over HTTP, nothing happens",
    NODE: "one process, production node, runtimes without work",
}
_ENOUGH = 100_000  # queued sessions, for what is promised of them


def list_promises(report: ServiceReport) -> list[Promise]:
    return list(_promises(report))


def _promises(report: ServiceReport) -> Iterator[Promise]:
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
                ratio = queued.ratio(call)
                yield Promise(what, "at most 1.25 x", f"{ratio:.2f} x", ratio <= 1.25)


def as_json(report: ServiceReport) -> bytes:
    return msgspec.json.encode(
        {"machine": describe_machine(), **msgspec.structs.asdict(report), "promises": list_promises(report)},
    )


def show(report: ServiceReport, console: Console) -> None:
    for table in (_through(report), _read(report), _queued(report), promise_table(list_promises(report))):
        if table.row_count:
            console.print(table)
    for name, why in report.absent.items():
        console.print(f"{name} was not measured: {why}", highlight=False, markup=False)


def _through(report: ServiceReport) -> Table:
    title = "From submission to the result: sessions a second, and CPU milliseconds a session"
    table = _table(title, "", "database", "a second", "CPU", "of which", "sessions")
    for one in report.through:
        table.add_row(_FORMS[one.form], one.database, f"{one.per_second:.0f}", *_cpu(one.cpu_ms), f"{one.sessions:,}")
    for peer in report.peers:
        name = f"{peer.name} {peer.version}, jobs"
        table.add_row(name, peer.database, f"{peer.per_second:.0f}", *_cpu(peer.cpu_ms), f"{peer.jobs:,}")
    return table


def _cpu(by_process: dict[str, float]) -> tuple[str, str]:
    parts = ", ".join(f"{name} {figure:.2f}" for name, figure in by_process.items())
    return f"{sum(by_process.values()):.2f}", parts


def _read(report: ServiceReport) -> Table:
    table = _table("Results read over HTTP", "", "database", "MB/s", "CPU ms a MB", "tokens", "KB each", "results")
    for one in report.read:
        figures = f"{one.mb_per_second:.1f}", f"{one.cpu_ms:.1f}", f"{one.tokens:,}", f"{one.size / 1000:.0f}"
        table.add_row(one.server, one.database, *figures, str(one.results))
    return table


def _queued(report: ServiceReport) -> Table:
    title = f"A long queue against a short one: calls for {SIZE} sessions, medians in ms (the server's CPU)"
    table = _table(title, "", "database", "short", "long", "ratio")
    for one in report.queued:
        for call in one.long.ms:
            short, long = (f"{side.ms[call]:.2f} ({side.cpu_ms[call]:.2f})" for side in (one.short, one.long))
            table.add_row(f"{call}, {one.few:,} and {one.many:,}", one.database, short, long, f"{one.ratio(call):.2f}")
        resident = f"{one.before / MB:.0f} MB", f"{one.resident / MB:.0f} MB, at most {one.peak / MB:.0f}"
        table.add_row("resident, without and with the long one", one.database, *resident, "")
        table.add_row("taken in, sessions a second", one.database, "", f"{one.per_second:,.0f}", "")
    return table


def _table(title: str, *columns: str, right: bool = True) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if right and column not in ("", "database", "of which") else "left")
    return table
