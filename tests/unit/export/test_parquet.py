"""Parquet holds everything: what is read is what the builder made, to the bit."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.export import parquet
from polar.export.base import SessionItem
from polar.export.parquet import ParquetExporter, read
from polar.records.trajectory import SessionPaths, Trajectory
from polar.testing.conversations import export_items, make_session_item
from polar.testing.token_paths import make_path, make_session_paths, sampled_sessions
from polar.trajectory.builders import per_request, prefix_merging


def fingerprint(trajectory: Trajectory) -> list[object]:
    """Equal for two trajectories that are the same to the bit."""
    found: list[object] = [
        trajectory.session_id,
        trajectory.builder,
        trajectory.excluded,
        trajectory.tokens,
        trajectory.reward,
        trajectory.reason,
    ]
    for trace in trajectory.traces:
        for name in trace.__struct_fields__:
            value = getattr(trace, name)
            found.append((value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value)
    return found


@st.composite
def items(draw: st.DrawFn) -> list[SessionItem]:
    build = draw(st.sampled_from([per_request, prefix_merging]))
    sessions = [draw(sampled_sessions(f"s{index}")) for index in range(draw(st.integers(0, 3)))]
    verdicts = st.sampled_from([(0.1, None), (None, "timeout"), (None, None)])
    made = [SessionPaths(one.session_id, one.paths, *draw(verdicts)) for one in sessions]
    return [make_session_item(one, build, task_id=draw(st.sampled_from([None, "t"]))) for one in made]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sessions=items(), size=st.sampled_from([1, 16 * 1024 * 1024]))
def test_every_field_comes_back(tmp_path: Path, sessions: list[SessionItem], size: int) -> None:
    file = tmp_path / "sessions.parquet"
    limit, parquet._ROW_GROUP_BYTES = parquet._ROW_GROUP_BYTES, size  # a row group for each session, or one for all
    try:
        file.write_bytes(export_items(ParquetExporter(), sessions))
    finally:
        parquet._ROW_GROUP_BYTES = limit
    assert [fingerprint(one) for one in read(file)] == [fingerprint(one.trajectory) for one in sessions]


def test_types_are_those_of_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "sessions.parquet"
    file.write_bytes(
        export_items(ParquetExporter(), [make_session_item(make_session_paths(make_path(0, [1, 2], [3])), task_id="t")])
    )
    table = pq.read_table(file)
    assert str(table.schema.field("logprobs").type.value_type) == "float"
    assert str(table.schema.field("prompt_ids").type.value_type) == "int32"
    row = table.to_pylist()[0]
    assert (row["task_id"], row["metadata"]) == ("t", '{"model":"m","task_id":"t"}')


def test_a_session_with_nothing_to_train_is_there(tmp_path: Path) -> None:
    file = tmp_path / "sessions.parquet"
    exporter = ParquetExporter()
    file.write_bytes(
        export_items(exporter, [make_session_item(make_session_paths(make_path(0, [1], [2, 3], trainable=0)))])
    )
    row = pq.read_table(file).to_pylist()[0]
    assert row["trace"] is None
    assert row["excluded"] == [{"exchange_id": "s-x0", "start": 0, "stop": 2, "reason": "undelivered"}]
    assert exporter.rows == 1
