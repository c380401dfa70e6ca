"""What `polar bench pipeline` measured, against what is promised."""

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.gateway_report import Promise, describe_machine, promise_table
from polar.bench.pipeline import PipelineReport, Side

_PROMISED = 0.95


def list_promises(report: PipelineReport) -> list[Promise]:
    """The engine's slots count, not just whether it does anything; as long as there are sessions left to take up: how
    a finite number of them ends depends on the longest alone."""
    busy = report.stages.steady.slots
    what = "engine's batch in use, while there is more to do"
    return [Promise(what, f"at least {_PROMISED:.0%}", f"{busy:.1%}", busy >= _PROMISED)]


def as_json(report: PipelineReport) -> bytes:
    return msgspec.json.encode(
        {"machine": describe_machine(), **msgspec.structs.asdict(report), "promises": list_promises(report)},
    )


def show(report: PipelineReport, console: Console) -> None:
    for table in (_sides(report), _node(report), promise_table(list_promises(report))):
        console.print(table)


def _sides(report: PipelineReport) -> Table:
    plan = report.plan
    title = (
        f"{plan.sessions} sessions, an engine with {plan.slots} slots; runs p50 {report.run_p50:.1f} s, "
        f"p99 {report.run_p99:.1f} s ({report.run_p99 / report.run_p50:.1f} x)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in (
        "batch in use",
        "idle",
        "time full",
        "calls waiting",
        "sessions a minute",
        "batch in use, whole run",
        "whole run",
        "most runtimes",
    ):
        table.add_column(column, justify="right")
    for side in (report.stages, report.one_by_one, report.as_many_workers):
        table.add_row(*_row(side))
    return table


def _row(side: Side) -> tuple[str, ...]:
    steady, whole = side.steady, side.whole
    return (
        side.name,
        f"{steady.slots:.1%}",
        f"{1 - steady.slots:.1%}",
        f"{steady.full:.1%}",
        f"{steady.waiting:.1f}",
        f"{side.sessions_per_minute:.0f}",
        f"{whole.slots:.1%}",
        f"{whole.seconds:.0f} s",
        str(side.most_runtimes),
    )


def _node(report: PipelineReport) -> Table:
    table = Table(title="The node's stages", title_justify="left", show_header=False)
    refill = report.refill
    table.add_row(
        "from the end of a run to the next session's first call, p50 / p99 (ms)", f"{refill.p50:.1f} / {refill.p99:.1f}"
    )
    table.add_row("evaluations whose runtime had been made before they began", f"{report.prewarmed:.1%}")
    return table
