"""`make bench-sandbox`: what is promised, and a small run."""

import io

import msgspec
import pytest
from rich.console import Console

from benchmarks import sandbox
from benchmarks.client import BenchmarkError
from benchmarks.report import LatencySummary
from benchmarks.sandbox import SandboxPlan, SandboxReport


def times(p50: float, p99: float) -> LatencySummary:
    return LatencySummary(10, p50, p99, p99)


def test_promises_are_judged_by_their_figures() -> None:
    good = SandboxReport(SandboxPlan(), times(20, 100), times(4, 9), times(5, 9), times(250, 300))
    assert [promise.reached for promise in sandbox.list_promises(good)] == [True] * 4
    bad = SandboxReport(SandboxPlan(), times(31, 151), times(6, 9), times(5, 9), times(300, 300))
    assert [promise.reached for promise in sandbox.list_promises(bad)] == [False] * 4


def test_times_are_milliseconds() -> None:
    measured = LatencySummary.from_seconds([0.001 * number for number in range(1, 102)])
    assert (measured.count, round(measured.p50), round(measured.p99), round(measured.longest)) == (101, 51, 100, 101)


@pytest.mark.runtimes
async def test_a_small_run() -> None:
    try:
        report = await sandbox.run(SandboxPlan(wanted=3, launching=2, rounds=1, docker_runs=0), lambda _: None)
    except BenchmarkError as error:
        pytest.skip(str(error))
    assert (report.cold.count, report.ready.count, report.docker) == (3, 3, None)
    told = msgspec.json.decode(sandbox.to_json(report))
    assert told["cold"]["p50"] == report.cold.p50
    assert len(told["promises"]) == 3
    shown = io.StringIO()
    sandbox.print_report(report, Console(file=shown, width=120))
    assert "docker was not measured" in shown.getvalue()
