"""Stores that earlier versions left open in this one, which makes the same of every session in them, byte by byte."""

import asyncio
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import recorded_stores
from tests.unit.store.servers import Server


@pytest.mark.parametrize("recording", sorted(recorded_stores.FOLDER.iterdir()), ids=lambda folder: folder.name)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_recorded_store(request: pytest.FixtureRequest, tmp_path: Path, recording: Path, kind: str) -> None:
    server: Server | None = request.getfixturevalue("server") if kind == "postgresql" else None
    expected = recorded_stores.expected_documents(recording, kind)
    url = recorded_stores.restore(recording, tmp_path, None if server is None else server.url)
    work = tmp_path / "documents"
    work.mkdir()
    made = recorded_stores.exports_and_verdicts(url, work)
    made |= asyncio.run(recorded_stores.shown_documents(url, tmp_path / "data"))

    assert made.keys() >= expected.keys()  # there may be exporters that were not there yet
    differing = [name for name, data in expected.items() if not _are_equal(name, made[name], data)]
    assert differing == []
    problems = json.loads(made["verify.json"])["problems"]
    assert [problem["session_id"] for problem in problems] == [recorded_stores.DAMAGED]


def _are_equal(name: str, made: bytes, expected: bytes) -> bool:
    """A Parquet file also tells the version of the library that wrote it, so its table is what counts."""
    if made == expected or not expected.startswith(b"PAR1"):
        return made == expected
    tables = [pq.read_table(io.BytesIO(data)) for data in (made, expected)]
    return bool(tables[0].equals(tables[1], check_metadata=True))
