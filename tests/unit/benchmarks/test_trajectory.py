"""The benchmark's own parts: its sessions have the shapes that they claim, and peers are told apart from their absence.
No figure is asserted."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.client import BenchmarkError
from benchmarks.trajectory import benchmark as trajectory
from benchmarks.trajectory.benchmark import (
    POLAR,
    SHAPES,
    StorageCost,
    TrajectoryPlan,
    TrajectoryReport,
    TreeRate,
    check_peer,
    run,
)
from polar.records.trajectory import SessionPaths
from polar.trajectory.builders import per_request, prefix_merging
from polar.trajectory.tree import build_token_tree

SMALL = TrajectoryPlan(("20 turns to 30k",), rounds=1, turns=(2, 4, 6))


def test_sessions_have_the_shape_of_their_name() -> None:
    linear = SHAPES["20 turns to 30k"](np.random.default_rng(0))
    assert len(linear) == 20
    assert len(linear[-1].prompt) == pytest.approx(30_000, rel=0.1)
    assert len(prefix_merging(SessionPaths("bench", linear)).traces) == 1
    dropping = SHAPES["100 turns to 60k, thinking dropped, shuffled"](np.random.default_rng(0))
    merged, each = prefix_merging(SessionPaths("bench", dropping)), per_request(SessionPaths("bench", dropping))
    assert len(merged.traces) == len(each.traces) == 100  # no prompt has what was sampled before it
    assert merged.tokens.unique < each.tokens.computed / 20
    assert len(build_token_tree(SHAPES["1000 siblings after 8k"](np.random.default_rng(0))).nodes) > 1_000


async def test_a_run_without_peers_says_so() -> None:
    report = await run(SMALL, [], lambda _: None)
    assert [rate.shape for rate in report.rates] == ["20 turns to 30k"] * 2
    assert set(report.absent) == {"TRL", "AReaL"}
    assert [row.turns for row in report.stored] == [2, 4, 6]
    assert all(row.stored < row.whole for row in report.stored[1:])
    told = json.loads(trajectory.to_json(report))
    assert {promise["what"].split(",")[0] for promise in told["promises"]} == {
        "tokens a second into the tree on one core",
        "stored bytes per new token",
    }


async def test_an_interpreter_without_the_peers_is_named(tmp_path: Path) -> None:
    report = await run(SMALL, [tmp_path / "no-python", Path(sys.executable)], lambda _: None)
    absent = ("No module named", "No package metadata")
    assert all(sys.executable in why and any(each in why for each in absent) for why in report.absent.values())


def test_a_peers_figures_count_only_for_the_same_tree() -> None:
    ours = TreeRate(POLAR, "a shape", sequences=10, tokens=1_000, unique=500, seconds=1.0)
    check_peer("TRL", ours, 510)
    with pytest.raises(BenchmarkError, match="TRL made a tree of 400 tokens"):
        check_peer("TRL", ours, 400)


def test_promises_are_judged_by_the_worst_figure() -> None:
    report = TrajectoryReport(
        rates=[
            TreeRate(POLAR, "a", 1, 300_000_000, 1, 1.0),
            TreeRate(POLAR, "b", 1, 150_000_000, 1, 1.0),
            TreeRate("TRL", "a", 1, 2_000_000, 1, 1.0),
            TreeRate("TRL", "b", 1, 2_000_000, 1, 1.0),
        ],
        versions={"TRL": "1.0"},
        stored=[StorageCost(turns, turns, turns, turns**2, turns**2) for turns in (10, 20, 100, 200)],
    )
    assert [(promise.measured, promise.reached) for promise in trajectory.list_promises(report)] == [
        ("150 million (b)", False),
        ("75 times (b)", False),
        ("10.00 times", False),
    ]
