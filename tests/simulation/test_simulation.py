"""Thousands of schedules in which everything goes wrong that can, and all is well in the end.

A schedule is a function of its seed: `python -m tests.simulation SEED` shows everything that happens in one, and
`python -m tests.simulation FIRST COUNT` runs many more than there are here.
"""

import pytest

from tests.simulation.mutants import MUTANTS, broken
from tests.simulation.world import Parts, problems, simulate

_SEEDS = 60  # in one test
_BOUND = 600  # seeds within which each fault is found


@pytest.mark.parametrize("first", range(0, 5 * _SEEDS, _SEEDS))
def test_all_is_well_in_the_end(first: int) -> None:
    assert list(problems(first, _SEEDS)) == []


def test_a_seed_says_all_that_happens() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        simulate(17, say=lines.append)
    assert told[0] == told[1]
    assert len(told[0]) > 20


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_found(name: str) -> None:
    with broken(name) as worker:
        assert next(problems(0, _BOUND, Parts(worker=worker)), None) is not None
