"""Where a change of weights within a call is found to be, by log-probabilities."""

import numpy as np
import pytest

from benchmarks.vllm.updates import UpdatePlan, UpdateReport, find_boundaries

LENGTH = 40


def score(version: int) -> np.ndarray:
    return np.random.default_rng(version).normal(-5, 1, LENGTH)


@pytest.mark.parametrize("shift", [-4, -1, 0, 1, 4])
def test_a_misplaced_boundary_is_found(shift: int) -> None:
    scored = {1: score(1), 2: score(2)}
    noise = np.random.default_rng(0).normal(0, 0.02, LENGTH)
    recorded = np.where(np.arange(LENGTH) < 20 + shift, scored[1], scored[2]) + noise
    [boundary] = find_boundaries(recorded, [1] * 20 + [2] * 20, scored)
    assert boundary.best_shift == shift
    report = UpdateReport(UpdatePlan(), boundaries=[boundary])
    assert report.wrong_boundaries == (shift != 0 and boundary.gain > 0.5)
    if abs(shift) == 4:
        assert report.wrong_boundaries == 1


def test_a_boundary_near_the_end_is_looked_at_as_far_as_there_are_tokens() -> None:
    scored = {1: score(1), 2: score(2)}
    recorded = np.where(np.arange(LENGTH) < LENGTH - 1, scored[1], scored[2])
    [boundary] = find_boundaries(recorded, [1] * (LENGTH - 1) + [2], scored)
    assert boundary.best_shift == 0


def test_tokens_without_a_version_make_no_boundary() -> None:
    scored = {1: score(1)}
    assert not list(find_boundaries(scored[1], [1] * 20 + [None] * 20, scored))


def test_a_run_that_recomputed_nothing_has_not_passed() -> None:
    assert not UpdateReport(UpdatePlan()).passed
