"""Sessions with proven evidence of tampering: marked in what is exported, and filtered."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from polar.cli.export import command
from polar.export.base import SessionItem, trace_metadata
from polar.records.result import SessionResult
from polar.records.session import Evidence
from tests.unit.export.stored import fill, session

PROVEN = Evidence("test_edited", "tests/test_a.py", True)
CANARY = Evidence("canary_passed", "test_canary", True)
UNPROVEN = Evidence("grader_path", "/tests")
TASK: dict[str, Any] = {"task_id": "t"}

SESSIONS = [
    session("honest", 0, reward=0.5, metadata=TASK),
    session("cheat", 1, reward=1.0, metadata=TASK, evidence=[CANARY, PROVEN]),
    session("curious", 2, reward=0.25, metadata=TASK, evidence=[UNPROVEN]),
]


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    await fill(tmp_path / "polar.db", SESSIONS)
    return tmp_path


def export(data: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(command, ["--data", str(data), *arguments])
    assert result.exception is None, result.output
    return result


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("wanted", "names", "said"),
    [
        ("keep", ["curious", "cheat", "honest"], ""),
        (
            "exclude",
            ["curious", "honest"],
            "1 session whose agent tampered with its grading was left out: canary_passed and test_edited x 1",
        ),
        ("only", ["cheat"], "2 sessions without proven tampering were left out: not suspicious x 2"),
    ],
)
def test_the_filter(data: Path, wanted: str, names: list[str], said: str) -> None:
    result = export(data, "--format", "polar", "--suspicious", wanted)
    assert [row["session_id"] for row in lines(result)] == names
    assert said in result.stderr
    for each in ("sft", "slime", "tree"):  # whatever the way that they come by
        found = export(data, "--format", each, "--suspicious", wanted, "-o", str(data / f"{each}-out"), "--json")
        assert json.loads(found.stdout)["sessions"] == len(names)


def test_the_best_are_chosen_among_those_that_pass(data: Path) -> None:
    result = export(data, "--format", "polar", "--best", "1", "--suspicious", "exclude")
    assert [row["session_id"] for row in lines(result)] == ["honest"]


WHERE = {
    "polar": lambda row: {row["session_id"]: row["metadata"]["suspicious"]},
    "slime": lambda row: {row["session_id"]: row["metadata"]["suspicious"]},
    "trl": lambda row: {row["session_id"]: row["suspicious"]},
    "verl": lambda row: {row["extra_fields"]["session_id"]: row["extra_fields"]["suspicious"]},
    "areal": lambda row: {row["polar"]["session_id"]: row["polar"]["suspicious"]},
    "atif": lambda row: {row["session_id"]: row["extra"]["suspicious"]},
    "sft": lambda row: {row["metadata"]["session_id"]: row["metadata"]["suspicious"]},
    "sft-tokens": lambda row: {row["metadata"]["session_id"]: row["metadata"]["suspicious"]},
    "tree": lambda row: {one["session_id"]: one["suspicious"] for one in row["sessions"]},
    "preference": lambda row: {
        row["metadata"][f"{side}_session_id"]: row["metadata"][f"{side}_suspicious"] for side in ("chosen", "rejected")
    },
}
MARKED = {"honest": False, "cheat": True, "curious": False}


@pytest.mark.parametrize("name", WHERE)
def test_rows_say_whether_their_session_is_suspicious(data: Path, name: str) -> None:
    found: dict[str, bool] = {}
    for row in lines(export(data, "--format", name)):
        found |= WHERE[name](row)
    assert found
    assert found.items() <= MARKED.items()
    assert found["cheat"]


@pytest.mark.parametrize("name", ["parquet", "huggingface"])
def test_columns_say_so_too(data: Path, name: str) -> None:
    output = data / "out"
    export(data, "--format", name, "-o", str(output))
    table = pq.read_table(next(output.rglob("*.parquet")) if output.is_dir() else output)
    assert dict(zip(*(table.column(one).to_pylist() for one in ("session_id", "suspicious")), strict=True)) == MARKED


def test_a_live_session_says_what_its_export_does(data: Path) -> None:
    for row in lines(export(data, "--format", "polar")):
        item = SessionItem.from_result(SessionResult.model_validate(row))
        assert msgspec.to_builtins(item.session.evidence) == row["evidence"]
        assert trace_metadata(item, 0, item.trajectory.traces[0])["suspicious"] == MARKED[row["session_id"]]
