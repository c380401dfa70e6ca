"""Which cases of a parametrized test `make test` runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def leave_to_slow(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Marks all cases `slow`, but for those that stay in `make test`. Each of those must be among the cases."""
    given = list(cases)
    missing = [case for case in but if case not in given]
    if missing:
        raise ValueError(f"No such cases: {missing}.")
    return [case if case in but else pytest.param(case, marks=pytest.mark.slow) for case in given]
