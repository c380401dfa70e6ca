"""Which cases of a parametrized test `make test` runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def leave_to_slow(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Marks all cases `slow`, but for those that stay in `make test`. Each of those must be among the cases. A case of
    several arguments is a tuple."""
    given = list(cases)
    missing = [case for case in but if case not in given]
    if missing:
        raise ValueError(f"No such cases: {missing}.")
    return [case if case in but else _mark_slow(case) for case in given]


def _mark_slow(case: Any) -> Any:
    arguments = case if isinstance(case, tuple) else (case,)
    return pytest.param(*arguments, marks=pytest.mark.slow)
