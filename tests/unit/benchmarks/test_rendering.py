"""The measurement of a turn in a long conversation, on a shorter one."""

import io

from rich.console import Console

from benchmarks.trajectory import benchmark as trajectory
from benchmarks.trajectory import rendering
from benchmarks.trajectory.benchmark import TrajectoryReport
from benchmarks.trajectory.rendering import RenderingCost


async def test_turns_near_the_context_are_measured() -> None:
    measured = await rendering.measure(None, context=11_000, window=1_000)
    assert measured.context == 11_000
    assert measured.turns >= 2
    assert measured.messages > 4
    assert measured.incremental > 0
    assert measured.whole > 0


def test_the_promise_is_judged_by_the_ratio() -> None:
    report = TrajectoryReport(rendered=RenderingCost("a model's", 30_000, 90, 9, 2.0, 29.0, 4.0, 8.0))
    (promise,) = trajectory.list_promises(report)
    assert (promise.measured, promise.reached) == ("14.5 times cheaper", False)
    small = TrajectoryReport(rendered=RenderingCost(rendering.OWN, 30_000, 90, 9, 2.0, 29.0, 4.0, 8.0))
    assert not trajectory.list_promises(small)  # a tokenizer that no model has says nothing of the promise
    console = Console(record=True, width=160, file=io.StringIO())
    trajectory.print_report(report, console)
    assert "a model's" in console.export_text()
