"""What goes into a pass of the model, where not everything fits."""

import pytest

from polar.engines.embedded.batching import _fitting, _Part, _Sequence
from polar.engines.embedded.choosing import Row
from polar.engines.embedded.generation import Choosing
from polar.engines.embedded.slots import Slot


def parts(*counts: int) -> list[_Part]:
    """In the order in which they came."""
    return [
        _Part(_Sequence(str(number), [0] * count, 1, frozenset(), Row(Choosing(), None)), Slot(number), 0, count)
        for number, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "room", "expected"),
    [
        ((), 10, {}),
        ((30,), 10, {0: 10}),
        ((4, 3), 10, {0: 4, 1: 3}),
        ((30, 40, 2), 10, {0: 5, 1: 3, 2: 2}),  # the last one is short: it waits for nobody
        ((30, 2, 1), 10, {0: 7, 1: 2, 2: 1}),  # what nobody else needs is the oldest one's
        ((30, 9, 9), 10, {0: 5, 1: 5}),
        ((2, 9, 40), 10, {0: 2, 1: 8}),
        ((30, 30), 1, {0: 1}),
    ],
)
def test_the_oldest_and_the_shortest_come_first(counts: tuple[int, ...], room: int, expected: dict[int, int]) -> None:
    found = _fitting(parts(*counts), room)
    assert {int(part.sequence.name): part.count for part in found} == expected
