"""Schedules in which everything goes wrong that can, and all is well in the end.

A schedule is a function of its seed: `python -m tests.simulation SEED` shows everything that happens in one, and
`python -m tests.simulation FIRST COUNT` runs many thousands, where there are a few hundred here.
"""

import re

import pytest

from tests.simulation.mutants import MUTANTS, broken
from tests.simulation.world import Parts, problems, simulate

_SEEDS = 100  # in one test
_QUICK = ("no fence", "ends twice", "never in doubt")  # mutants that few seeds find
_BOUND = 2000  # seeds within which each fault is found


@pytest.mark.parametrize("first", range(0, 3 * _SEEDS, _SEEDS))
def test_all_is_well_in_the_end(first: int) -> None:
    assert list(problems(range(first, first + _SEEDS))) == []


def test_a_seed_says_all_that_happens() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        simulate(17, say=lines.append)
    assert told[0] == told[1]
    assert len(told[0]) > 20


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_faults_are_found(name: str) -> None:
    """As what they are: a crash would only show that the mutant itself is broken."""
    kinds = []
    with broken(name) as worker:
        for found in problems(range(_BOUND), Parts(worker=worker)):
            assert " crashes: " not in found
            kinds.append(found)
            if re.match(rf"seed \d+: {MUTANTS[name]}", found):
                return
    pytest.fail(f"None of these is of the kind that was expected: {kinds}")


def test_a_crash_is_said_to_be_one() -> None:
    def worker(*_: object) -> None:
        raise ZeroDivisionError

    assert "crashes: ZeroDivisionError()" in next(problems(range(1), Parts(worker=worker)))
