"""Whether work has killed the nodes that died under it: the arithmetic."""

import math

import pytest

from polar.rollout.queue.selection import ISOLATION_KILLS, SuspectRecord, compute_poisson_tail


@pytest.mark.parametrize(("events", "expected"), [(1, 0.01), (3, 0.5), (4, 4.0), (9, 0.8), (20, 5.0)])
def test_the_chance_of_so_many_deaths(events: int, expected: float) -> None:
    exact = math.fsum(math.exp(-expected) * expected**n / math.factorial(n) for n in range(events, events + 120))
    assert compute_poisson_tail(events, expected) == pytest.approx(exact, rel=1e-9)


def test_no_events_are_certain_and_none_are_expected_of_nothing() -> None:
    assert compute_poisson_tail(0, 3.0) == 1.0
    assert compute_poisson_tail(2, 0.0) == 0.0


def test_work_under_which_nodes_die_while_others_live_is_guilty() -> None:
    assert SuspectRecord(kills=4, exposure=40, control=4000, control_deaths=0).is_proven


def test_work_is_innocent_where_nodes_die_as_often_without_it() -> None:
    assert not SuspectRecord(kills=4, exposure=40, control=4000, control_deaths=200).is_proven
    assert not SuspectRecord(kills=8, exposure=3600, control=36000, control_deaths=60).is_proven


def test_nothing_is_proven_without_a_comparison_or_by_few_deaths() -> None:
    assert not SuspectRecord(kills=50, exposure=10, control=0, control_deaths=0).is_proven
    assert not SuspectRecord(kills=ISOLATION_KILLS - 1, exposure=0.001, control=1e9, control_deaths=0).is_proven
