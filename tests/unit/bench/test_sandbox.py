"""`polar bench sandbox`: what is promised, and a small run."""

import io

import msgspec
import pytest
from rich.console import Console

from polar.bench import sandbox, sandbox_report
from polar.bench.client import BenchError
from polar.bench.sandbox import LatencySummary, SandboxPlan, SandboxReport


def times(p50: float, p99: float) -> LatencySummary:
    return LatencySummary(10, p50, p99, p99)


def test_promises_are_judged_by_their_figures() -> None:
    good = SandboxReport(SandboxPlan(), times(20, 100), times(4, 9), times(5, 9), times(250, 300))
    assert [promise.reached for promise in sandbox_report.list_promises(good)] == [True] * 4
    bad = SandboxReport(SandboxPlan(), times(31, 151), times(6, 9), times(5, 9), times(300, 300))
    assert [promise.reached for promise in sandbox_report.list_promises(bad)] == [False] * 4


def test_times_are_milliseconds() -> None:
    measured = LatencySummary.of([0.001 * number for number in range(1, 102)])
    assert (measured.count, round(measured.p50), round(measured.p99), round(measured.longest)) == (101, 51, 100, 101)


@pytest.mark.runtimes
async def test_a_small_run() -> None:
    try:
        report = await sandbox.run(SandboxPlan(wanted=3, launching=2, rounds=1, docker_runs=0), lambda _: None)
    except BenchError as error:
        pytest.skip(str(error))
    assert (report.cold.count, report.ready.count, report.docker) == (3, 3, None)
    told = msgspec.json.decode(sandbox_report.as_json(report))
    assert told["cold"]["p50"] == report.cold.p50
    assert len(told["promises"]) == 3
    shown = io.StringIO()
    sandbox_report.show(report, Console(file=shown, width=120))
    assert "docker was not measured" in shown.getvalue()
