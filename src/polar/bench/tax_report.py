"""What `polar bench tax` measured, against what is promised."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.gateway_report import Promise, describe_machine
from polar.bench.tax import LOGPROBS, OFF, ON, TaxReport


def compute_ratios(report: TaxReport, kind: str, way: str = ON) -> list[float]:
    """Tokens a second against those of the engine alone, round by round: what else the machine does changes slowly."""
    ways = report.engines[kind]
    return [rate / alone for rate, alone in zip(ways[way].rates, ways[OFF].rates, strict=True)]


def compute_ratio(report: TaxReport, kind: str, way: str = ON) -> float:
    return median(compute_ratios(report, kind, way))


def list_promises(report: TaxReport) -> list[Promise]:
    """Of engines that are ours. What others make of log-probabilities is not for us to promise."""
    if "embedded" not in report.engines:
        return []
    kept, all_of_them = compute_ratio(report, "embedded"), compute_ratios(report, "embedded")
    measured = f"{kept:.3f} (rounds: {min(all_of_them):.3f} to {max(all_of_them):.3f})"
    return [Promise("throughput of the embedded engine, captured", "at least 0.95", measured, kept >= 0.95)]


def as_json(report: TaxReport) -> bytes:
    found = {kind: {way: compute_ratio(report, kind, way) for way in ways} for kind, ways in report.engines.items()}
    told: dict[str, Any] = {"machine": describe_machine(), **msgspec.structs.asdict(report)}
    return msgspec.json.encode(told | {"ratios": found, "promises": list_promises(report)})


def show(report: TaxReport, console: Console) -> None:
    plan = report.plan
    title = f"{plan.conversations} conversations at a time, {plan.turns} turns of up to {plan.tokens} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("engine", "", "tokens/s", "by round", "against the engine alone", "gateway's CPU, ms/token"):
        table.add_column(column, justify="left" if column in ("engine", "") else "right")
    for row in _rows(report):
        table.add_row(*row)
    console.print(table)
    for promise in list_promises(report):
        reached = "[green]reached[/]" if promise.reached else "[red]not reached[/]"
        console.print(f"{promise.what}: {promise.measured}, promised {promise.promised}: {reached}", highlight=False)


def _rows(report: TaxReport) -> Iterator[tuple[str, ...]]:
    for kind, ways in report.engines.items():
        for way in (OFF, LOGPROBS, ON):
            rates = " ".join(f"{rate:.1f}" for rate in ways[way].rates)
            cpu = f"{1e3 * ways[way].gateway_cpu / ways[way].tokens:.2f}" if way == ON else ""
            yield kind, way, f"{ways[way].rate:.1f}", rates, f"{compute_ratio(report, kind, way):.3f}", cpu
