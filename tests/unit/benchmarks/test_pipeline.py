"""`make bench-pipeline`: what is counted as busy, what is promised, and a small run through the real node."""

import io
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from benchmarks.pipeline import benchmark as pipeline
from benchmarks.pipeline.benchmark import PipelinePlan, PipelineReport, Side, compute_refill_seconds
from benchmarks.pipeline.engine import EngineCall, Slots, Utilization, Window, compute_slot_series, compute_utilization
from benchmarks.pipeline.runtime import SessionTimeline
from benchmarks.pipeline.workload import make_sessions
from benchmarks.report import LatencySummary


def test_calls_beyond_the_slots_wait_in_order() -> None:
    slots = Slots(2)
    calls = [slots.take(arrived, seconds) for arrived, seconds in ((10, 3), (10, 1), (10.5, 2), (10.6, 1), (20, 1))]
    assert [call.began for call in calls] == [10, 10, 11, 13, 20]


def test_busy_is_the_share_of_slots_within_the_window() -> None:
    calls = [
        EngineCall(0, 0, 4),
        EngineCall(0, 0, 2),
        EngineCall(1, 2, 1),
        EngineCall(6, 6, 9),
    ]  # two slots; the last ends far outside
    told = compute_utilization(calls, 2, Window(1, 7))
    assert told.seconds == 6
    assert told.slots == pytest.approx((3 + 1 + 1 + 1) / 12)
    assert told.full == pytest.approx(2 / 6)  # from 1 to 3, though a slot went from one call to the next at 2
    assert told.waiting == pytest.approx(1 / 6)
    assert compute_slot_series(calls, Window(0, 8), 2) == pytest.approx([2, 1.5, 0, 2 / 2])


def test_a_slot_is_refilled_from_one_run_s_end_to_the_next_call() -> None:
    lives = [SessionTimeline(0, 5), SessionTimeline(1, 3), SessionTimeline(3.5, 9), SessionTimeline(5.25, 6)]
    assert compute_refill_seconds(lives, 2) == [0.5, 0.25]


def test_sessions_have_the_tail_that_is_wanted() -> None:
    work = make_sessions(400, run=2.0, tools=0.25, grading=1.0, seed=3)
    seconds = [session.seconds for session in work]
    p50, p99 = np.percentile(seconds, [50, 99])
    assert p50 == pytest.approx(2.0, rel=0.05)
    assert 8 < p99 / p50 < 11
    tools = sum(turn.tool_seconds for session in work for turn in session.turns)
    assert tools / sum(seconds) == pytest.approx(0.25, abs=0.01)
    assert seconds != sorted(seconds)
    assert work == make_sessions(400, run=2.0, tools=0.25, grading=1.0, seed=3)


def side(slots: float) -> Side:
    return Side("a < b", 4, Utilization(10, slots, 0.9, 1.5), Utilization(20, 0.5, 0.4, 1), 60, 9, [0, 2, 4], 0.25, 0.5)


def report(slots: float) -> PipelineReport:
    return PipelineReport(
        PipelinePlan(slots=4), 1, 10, side(slots), side(0.4), side(0.9), LatencySummary(5, 2, 8, 9), 0.875
    )


def test_the_promise_is_judged_by_the_slots_in_use() -> None:
    assert [promise.reached for promise in pipeline.list_promises(report(0.951))] == [True]
    assert [promise.reached for promise in pipeline.list_promises(report(0.949))] == [False]


def test_the_picture_shows_every_side() -> None:
    drawn = ElementTree.fromstring(pipeline.draw_svg(report(0.96)))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and "busy" in text] == [
        f"a < b: {share} busy, 50.0% of the whole run" for share in ("96.0%", "40.0%", "90.0%")
    ]


@pytest.mark.slow
async def test_a_small_run() -> None:
    told: list[tuple[str, int, int]] = []
    plan = PipelinePlan(
        slots=2,
        sessions=20,
        run_seconds=0.1,
        start_seconds=0.05,
        grading_seconds=0.05,
        init_workers=2,
        ready_buffer=1,
        run_workers=3,
        postrun_workers=2,
        prewarm=2,
    )
    measured = await pipeline.run(plan, lambda *what: told.append(what))
    sides = (measured.stages, measured.one_by_one, measured.as_many_workers)
    assert [side.workers for side in sides] == [3, 3, 8]
    engine_seconds = {round(side.whole.slots * side.whole.seconds, 6) for side in sides}
    assert len(engine_seconds) == 1  # all sides had the same calls, and every one of them was counted
    assert all(0 < side.steady.slots <= 1 for side in sides)
    assert measured.refill.count == 17
    assert [what for what in told if what[1] == 20] == [(side.name, 20, 20) for side in sides]
    decoded = msgspec.json.decode(pipeline.to_json(measured))
    assert decoded["stages"]["steady"]["slots"] == measured.stages.steady.slots
    shown = io.StringIO()
    pipeline.print_report(measured, Console(file=shown, width=150))
    assert "one by one, 8 workers" in shown.getvalue()
