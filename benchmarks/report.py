"""What the reports of all benchmarks have in common: promises, the machine, and a summary of latencies."""

import os
import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

MB = 1_000_000


class Promise(Struct):
    what: str
    promised: str
    measured: str
    reached: bool


class LatencySummary(Struct):
    """Milliseconds, and how many were measured."""

    count: int
    p50: float
    p99: float
    longest: float

    @classmethod
    def from_seconds(cls, seconds: list[float]) -> "LatencySummary":
        p50, p99, longest = np.percentile(np.array(seconds) * 1000, [50, 99, 100])
        return cls(len(seconds), float(p50), float(p99), float(longest))


def make_promise_table(promises: Iterable[Promise]) -> Table:
    table = Table(title="Promises", title_justify="left")
    for column in ("", "promised", "measured", " "):
        table.add_column(column)
    for row in promises:
        table.add_row(row.what, row.promised, row.measured, _describe_verdict(row))
    return table


def print_promises(promises: Iterable[Promise], console: Console) -> None:
    """A line each, for reports with few of them."""
    for row in promises:
        console.print(f"{row.what}: {row.measured}, promised {row.promised}: {_describe_verdict(row)}", highlight=False)


def _describe_verdict(promise: Promise) -> str:
    return "[green]reached[/]" if promise.reached else "[red]not reached[/]"


def describe_machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
