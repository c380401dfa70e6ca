import json
from pathlib import Path
from typing import Any

import pytest

from polar.cli.demo import DemoResult, print_result
from polar.cli.verify import VerifyFindings
from polar.trajectory.teacher import LogprobComparison
from polar.trajectory.verify import Problem


def ended(**changes: Any) -> DemoResult:
    known = {
        "reward_before": 0.25,
        "reward_after": 0.875,
        "picture": Path("demo/reward.png"),
        "output": Path("demo"),
        "verified": VerifyFindings(sessions=384),
        "recomputed": VerifyFindings(sessions=8, comparison=LogprobComparison(tokens=100, largest=1e-5)),
    }
    return DemoResult(**known | changes)


def test_one_line_of_json_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_result(ended(), 321.04, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "held_out_before": 0.25,
        "held_out_after": 0.875,
        "seconds": 321.0,
        "sessions": 384,
        "verified": True,
        "largest_difference": 1e-5,
        "picture": "demo/reward.png",
    }


def test_people_are_told_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_result(ended(), 321, as_json=False) == 0
    said = capsys.readouterr().out
    assert "25% correct before, 88% after" in said
    assert "384 of 384 sessions verified" in said


def test_a_trajectory_that_is_wrong_fails_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    found = VerifyFindings(sessions=384)
    found.add([Problem("s1", None, "context", "It was never sampled there.")])
    assert print_result(ended(verified=found), 1, as_json=True) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verified"] is False
    assert "never sampled there" in captured.err


def test_log_probabilities_that_are_wrong_fail_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = VerifyFindings(sessions=8, comparison=LogprobComparison(tokens=100, largest=0.3))
    assert print_result(ended(recomputed=found), 1, as_json=True) == 1
    assert "differ" in capsys.readouterr().err
