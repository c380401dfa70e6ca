import pytest

from tests.selection import leave_to_slow


def test_cases_that_are_not_named_are_slow() -> None:
    marked = leave_to_slow(["a", "b", "c"], but=["b"])
    assert [getattr(case, "values", (case,))[0] for case in marked] == ["a", "b", "c"]
    assert [bool(getattr(case, "marks", ())) for case in marked] == [True, False, True]


def test_a_case_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="'d'"):
        leave_to_slow(["a"], but=["d"])
