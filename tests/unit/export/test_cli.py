"""polar export, from the command line."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from polar.cli.export import command, parse_since
from polar.errors import ConfigError
from polar.plugins import list_names
from tests.unit.export.stored import fill, session

FORMATS = (
    "areal art atif nemo-gym openrlhf parquet polar prime-rl sft skyrl slime tinker tree trl verl".split()  # noqa: SIM905
)


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    made = [session("good", 0, reward=1.0), session("bad", 1, reward=0.0), session("cut", 2, reason="timeout")]
    await fill(tmp_path / "polar.db", made)
    return tmp_path


def export(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--data", str(data), *arguments])


def test_who_stops_reading_ends_it_quietly(data: Path) -> None:
    command = [sys.executable, "-c", "from polar.cli.main import main; main()", "export", "--data", str(data)]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*command, "--format", "polar"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_contract(data: Path, name: str) -> None:
    file = data / "out"
    result = export(data, "--format", name, "-o", str(file))
    assert result.exit_code == 0, result.output
    assert "Exported " in result.stderr
    if name == "parquet":
        assert pq.read_table(file).num_rows == 6
    else:
        assert all(json.loads(line) for line in file.read_bytes().splitlines())
    assert [one.name for one in data.iterdir() if one.name.endswith(".partial")] == []


def test_they_are_all_there() -> None:
    assert set(FORMATS) <= set(list_names("exporters"))


def test_rows_on_stdout_and_the_rest_on_stderr(data: Path) -> None:
    result = export(data, "--format", "areal")
    assert [json.loads(line)["polar"]["session_id"] for line in result.stdout.splitlines()] == [
        "bad",
        "bad",
        "good",
        "good",
    ]
    assert result.stderr.splitlines() == [
        "1 session without a reward was left out: timeout x 1",
        "Set a session's reward with `polar session end ID --reward R` while the server runs.",
        "Exported 2 sessions, 4 rows, 12 trainable tokens.",
    ]


def test_a_summary_for_machines(data: Path) -> None:
    result = export(data, "--format", "areal", "-o", str(data / "out"), "--role", "main", "--json")
    assert json.loads(result.stdout) == {
        "format": "areal",
        "sessions": 2,
        "rows": 2,
        "tokens": 6,
        "left_out": {"without a reward": {"timeout": 1}},
        "without_pictures": 0,
        "other_roles": {"subagent": 6},
        "excluded": {},
        "unfit": {},
        "output": str(data / "out"),
    }


def test_filters(data: Path) -> None:
    result = export(data, "--format", "polar", "--min-reward", "0.5", "--builder", "per_request")
    assert [json.loads(line)["session_id"] for line in result.stdout.splitlines()] == ["good"]
    result = export(data, "--format", "polar", "--session", "bad", "--session", "good")
    assert [json.loads(line)["session_id"] for line in result.stdout.splitlines()] == ["bad", "good"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "nothing"], "Among the exporters there is no 'nothing'"),
        (["--format", "slime", "--builder", "nothing"], "Unknown builder 'nothing'"),
        (["--format", "slime", "--builder", "prefix_tree"], "use --format tree"),
        (["--format", "tree", "--builder", "per_request"], "is a tree"),
        (["--format", "slime", "--session", "nobody"], "There is no session nobody"),
        (["--format", "slime", "--since", "yesterday"], "is neither a time"),
        (["--format", "slime", "--since", "1s"], "Nothing was exported"),
        (["--format", "slime", "-o", "no/such/folder"], "Can't write no/such/folder"),
    ],
)
def test_errors_say_what_to_do(data: Path, arguments: list[str], said: str) -> None:
    result = export(data, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_an_empty_store(tmp_path: Path) -> None:
    result = export(tmp_path, "--format", "slime")
    assert "Nothing has been captured" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays_when_an_export_fails(data: Path) -> None:
    """A file is whole or it is the one from before."""
    file = data / "out"
    file.write_text("before")
    result = export(data, "--format", "slime", "-o", str(file), "--session", "good", "--session", "nobody")
    assert result.exception is not None
    assert file.read_text() == "before"
    result = export(data, "--format", "slime", "-o", str(file), "--since", "1s")
    assert "Nothing was exported" in str(result.exception)
    assert file.read_text() == "before"
    assert sorted(one.suffix for one in data.iterdir() if "partial" in one.name) == []


def test_times() -> None:
    now = time.time()
    assert parse_since("90m", now) == now - 5400
    assert parse_since("1.5d", now) == now - 129_600
    assert parse_since("2026-01-31T12:00+00:00", now) == 1_769_860_800
    with pytest.raises(ConfigError):
        parse_since("soon", now)


def test_a_pipe_is_written_to_and_stays_one(data: Path, tmp_path: Path) -> None:
    """Renaming a finished file over it would put a file in the place of the pipe, or of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = export(data, "--format", "slime", "-o", str(pipe))
        assert result.exit_code == 0
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert os.read(reader, 1 << 16).startswith(b"{")
    finally:
        os.close(reader)
