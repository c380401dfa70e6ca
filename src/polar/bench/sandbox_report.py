"""What `polar bench sandbox` measured, against what is promised."""

from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.gateway_report import Promise, describe_machine, promise_table
from polar.bench.sandbox import LatencySummary, SandboxReport


def list_promises(report: SandboxReport) -> list[Promise]:
    return list(_promises(report))


def _promises(report: SandboxReport) -> Iterator[Promise]:
    cold, ready = report.cold, report.ready
    how = f"{report.plan.wanted} wanted, {report.plan.launching} at a time"
    yield Promise(f"cold start, p50, {how}", "at most 30 ms", f"{cold.p50:.1f} ms", cold.p50 <= 30)
    yield Promise(f"cold start, p99, {how}", "at most 150 ms", f"{cold.p99:.1f} ms", cold.p99 <= 150)
    yield Promise("a ready one, p50", "at most 5 ms", f"{ready.p50:.1f} ms", ready.p50 <= 5)
    if report.docker is not None:
        ratio = report.docker.p50 / cold.p50
        yield Promise("cold start against `docker run`, p50", "at most 1/10", f"1/{ratio:.1f}", ratio >= 10)


def as_json(report: SandboxReport) -> bytes:
    return msgspec.json.encode(
        {"machine": describe_machine(), **msgspec.structs.asdict(report), "promises": list_promises(report)},
    )


def show(report: SandboxReport, console: Console) -> None:
    table = Table(title="From launch until the first command has ended (ms)", title_justify="left")
    for column in ("", "p50", "p99", "longest", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in _rows(report):
        figures = (f"{figure:.1f}" for figure in (times.p50, times.p99, times.longest))
        table.add_row(name, *figures, str(times.count))
    console.print(table)
    for name, why in report.absent.items():
        console.print(f"{name} was not measured: {why}", highlight=False, markup=False)
    console.print(promise_table(list_promises(report)))


def _rows(report: SandboxReport) -> Iterator[tuple[str, LatencySummary]]:
    yield "bubblewrap, cold", report.cold
    yield "bubblewrap, ready", report.ready
    if report.docker is not None:
        yield "docker run", report.docker
    yield "bubblewrap, removed", report.removed
