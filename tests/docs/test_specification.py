"""docs/SPECIFICATION.md cites tests and benchmarks that exist."""

import re
from pathlib import Path

import pytest

from tests.docs.static_checks import is_make_target

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "SPECIFICATION.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE)))
TARGETS = sorted(set(re.findall(r"`make ([\w-]+)`", PAGE)) - {"bench-NAME"})


@pytest.mark.parametrize("cited", TESTS)
def test_cited_tests_exist(cited: str) -> None:
    file, _, name = cited.partition("::")
    text = (ROOT / file).read_text()
    assert not name or re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE), f"{file} has no {name}"


@pytest.mark.parametrize("target", TARGETS)
def test_cited_targets_exist(target: str) -> None:
    assert is_make_target(target)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_each_promise_is_held_by_something(row: str) -> None:
    held = row.split("|")[2]
    assert "`tests/" in held or "`make " in held


def test_suites_of_marked_tests_are_named() -> None:
    """A test that `make test` leaves out is cited with the target that runs it."""
    marks = {"faults": "test-faults", "cluster": "test-cluster", "runtimes": "test-runtimes"}
    for row in ROWS:
        for file in re.findall(r"`(tests/[\w/]+\.py)", row):
            text = (ROOT / file).read_text()
            for mark, target in marks.items():
                if re.search(rf"^pytestmark\b.*pytest\.mark\.{mark}\b", text, re.MULTILINE):
                    assert f"make {target}" in row, f"{file} is run by make {target}"
