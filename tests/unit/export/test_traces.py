"""Formats of traces: whatever was sampled, the trainer finds the same tokens, the same mask and the same
log-probabilities, to the bit; and every row is what the trainer's class takes."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.export.areal import ArealExporter
from polar.export.art import ArtExporter
from polar.export.base import Exporter, SessionItem, compute_stable_number
from polar.export.nemo_gym import NemoGymExporter
from polar.export.openrlhf import OpenRlhfExporter
from polar.export.polar import PolarExporter
from polar.export.prime_rl import PrimeRlExporter
from polar.export.skyrl import SkyRlExporter
from polar.export.slime import SlimeExporter
from polar.export.tinker import TinkerExporter
from polar.export.tree import TreeExporter
from polar.export.trl import TrlExporter, to_rollout_columns
from polar.export.verl import VerlExporter
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import export_items, make_session_item
from polar.testing.exporters import ExportedTrace
from polar.testing.token_paths import make_path, make_session_paths, sampled_sessions
from polar.trajectory.builders import per_request, prefix_merging
from tests.unit.export import reading, schemas
from tests.unit.export.test_messages import two_turns

FORMATS: list[Callable[[], Exporter]] = [
    PolarExporter,
    SlimeExporter,
    VerlExporter,
    TrlExporter,
    SkyRlExporter,
    NemoGymExporter,
    PrimeRlExporter,
    OpenRlhfExporter,
    ArealExporter,
    TinkerExporter,
    ArtExporter,
]


def fits(one: SessionItem, exporter: Exporter) -> bool:
    """What the pipeline lets through."""
    traces = one.trajectory.traces
    if "reward" in exporter.needs and one.session.reward is None:
        return False
    if "traces" in exporter.needs and not traces:
        return False
    return "logprobs" not in exporter.needs or all(trace.logprobs is not None for trace in traces)


@st.composite
def items(draw: st.DrawFn) -> list[SessionItem]:
    build = draw(st.sampled_from([per_request, prefix_merging]))
    reward = draw(st.sampled_from([0.0, 1.0, -0.25, None]))
    sessions = [draw(sampled_sessions(f"s{index}")) for index in range(draw(st.integers(1, 3)))]
    return [make_session_item(SessionPaths(one.session_id, one.paths, reward), build, task_id="t") for one in sessions]


@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.name)
@given(sessions=items())
def test_a_trainer_reads_the_traces(make: Callable[[], Exporter], sessions: list[SessionItem]) -> None:
    exporter = make()
    sessions = [one for one in sessions if fits(one, exporter)]
    data = export_items(exporter, sessions)
    expected = [ExportedTrace.from_trace(trace) for one in sessions for trace in one.trajectory.traces]
    if exporter.name == "tinker":  # nothing comes before the first token of such a trace
        expected = [ExportedTrace.from_trace(t) for one in sessions for t in one.trajectory.traces if len(t.prompt_ids)]
        assert exporter.left_out.total() == sum(not len(t.prompt_ids) for o in sessions for t in o.trajectory.traces)
    if exporter.name == "skyrl":  # log-probabilities for all rows of a session, or for none
        whole = [all(trace.logprobs is not None for trace in one.trajectory.traces) for one in sessions]
        known = [ok for one, ok in zip(sessions, whole, strict=True) for _ in one.trajectory.traces]
        expected = [one if ok else one._replace(logprobs=None) for one, ok in zip(expected, known, strict=True)]
    assert reading.read(exporter.name, data) == expected
    schemas.check(exporter.name, data)
    assert exporter.rows == len(data.splitlines())


def test_float32_comes_back_to_the_bit() -> None:
    """The values that a decimal spelling would lose first."""
    hard = np.array(
        [-1 / 3, -np.finfo(np.float32).tiny, np.nextafter(np.float32(-1), np.float32(-2)), -0.0], np.float32
    )
    one = make_path(0, [1, 2], [3, 4, 5, 6])
    one.logprobs = hard
    for make in FORMATS:
        exporter = make()
        found = reading.read(exporter.name, export_items(exporter, [make_session_item(make_session_paths(one))]))
        assert found[0].logprobs is not None
        assert np.frombuffer(found[0].logprobs, np.float32)[2:].tobytes() == hard.tobytes(), exporter.name


def forked() -> SessionPaths:
    """Two traces: the second call went on from the first, the third began anew."""
    return make_session_paths(
        make_path(0, [1, 2], [3, 4]),
        make_path(1, [1, 2, 3, 4, 5], [6]),
        make_path(2, [9], [8, 7, 6], role="subagent"),
        reward=0.5,
    )


def test_slime_ties_a_session_together_and_leaves_the_weight_alone() -> None:
    sessions = [
        make_session_item(forked(), task_id="t"),
        make_session_item(SessionPaths("other", [make_path(0, [1], [2])], 1.0), task_id="t"),
    ]
    first, second, third = reading.lines(export_items(SlimeExporter(), sessions))
    assert first["rollout_id"] == second["rollout_id"] != third["rollout_id"]
    assert first["group_index"] == second["group_index"] == third["group_index"] == compute_stable_number("t")
    assert len({row["index"] for row in (first, second, third)}) == 3
    # The trainer divides by the rollout's mask sum: masks are plain ones, and each token gets 1 / 6 that way.
    assert sum(sum(row["loss_mask"]) for row in (first, second)) == 6
    assert set(first["loss_mask"]) <= {0, 1}
    assert [row["metadata"]["weight"] for row in (first, second)] == [0.5, 0.5]
    assert first["weight_versions"] == ["0", "1"]


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_slime_says_how_it_ended(reason: str, status: str) -> None:
    one = make_path(0, [1], [2])
    one.finish_reason = reason
    assert (
        reading.lines(export_items(SlimeExporter(), [make_session_item(make_session_paths(one))]))[0]["status"]
        == status
    )


def test_verl_counts_turns() -> None:
    rows = reading.lines(export_items(VerlExporter(), [make_session_item(forked())]))
    assert [row["num_turns"] for row in rows] == [4, 2]  # prompt, model, tool, model; prompt, model


def test_verl_may_have_no_reward() -> None:
    sampled = forked()
    sampled.reward, sampled.reason = None, "grader_crashed"
    row = reading.lines(export_items(VerlExporter(), [make_session_item(sampled)]))[0]
    assert row["reward_score"] is None
    assert row["extra_fields"]["reason"] == "grader_crashed"


def test_trl_lines_become_lists() -> None:
    rows = reading.lines(export_items(TrlExporter(), [make_session_item(forked())]))
    lists = to_rollout_columns(rows)
    assert lists["prompt_ids"] == [[1, 2], [9]]
    assert lists["env_mask"] == [[1, 1, 0, 1], [1, 1, 1]]
    assert [len(values) for values in lists["logprobs"]] == [4, 3]
    rows[1]["logprobs"] = None
    assert to_rollout_columns(rows)["logprobs"] is None


def test_skyrl_marks_the_last_row_of_a_session() -> None:
    lines = reading.lines(export_items(SkyRlExporter(), [make_session_item(forked(), task_id="t")]))
    assert len(lines) == 1
    assert lines[0]["is_last_step"] == [False, True]
    assert lines[0]["trajectory_ids"] == [{"instance_id": "t", "repetition_id": compute_stable_number("s")}] * 2


def test_nemo_gym_prompts_grow() -> None:
    row = reading.lines(export_items(NemoGymExporter(), [make_session_item(forked())]))[0]
    prompts = [item["prompt_token_ids"] for item in row["response"]["output"]]
    assert prompts == [[1, 2], [1, 2, 3, 4, 5]]
    assert row["reward"] == 0.5


def test_prime_rl_names_session_and_trace() -> None:
    rows = reading.lines(export_items(PrimeRlExporter(), [make_session_item(forked())]))
    assert [row[14:16] for row in rows] == [["s", 0], ["s", 1]]
    assert rows[0][12] == [0.0, 0.0, 0.5, 0.5, 0.0, 0.5]


def test_prime_rl_knows_the_temperature_of_each_turn() -> None:
    row = reading.lines(export_items(PrimeRlExporter(), [make_session_item(forked())]))[0]
    assert row[3] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.1]


def test_areal_marks_context_by_version() -> None:
    row = reading.lines(export_items(ArealExporter(), [make_session_item(forked())]))[0]
    assert row["versions"] == [[-1, -1, 0, 0, -1, 1]]


def test_weights_of_a_session_add_up_in_every_format() -> None:
    for make in (
        SlimeExporter,
        VerlExporter,
        TrlExporter,
        OpenRlhfExporter,
        ArealExporter,
        TinkerExporter,
        ArtExporter,
        NemoGymExporter,
    ):
        exporter = make()
        rows = reading.lines(export_items(exporter, [make_session_item(forked())]))
        found = [next(_facts(row))["weight"] for row in rows]
        assert math.isclose(sum(found), 1), exporter.name


def _facts(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (row[key] for key in ("polar", "metadata", "extra_fields") if key in row)
    yield row


def test_a_tree_for_each_group() -> None:
    sessions = [
        make_session_item(SessionPaths("a", [make_path(0, [1, 2], [3], session_id="a")], 1.0), task_id="t"),
        make_session_item(SessionPaths("b", [make_path(0, [1, 2], [4], session_id="b")], None, "timeout"), task_id="t"),
        make_session_item(SessionPaths("c", [make_path(0, [1, 2], [5], session_id="c")], 0.0)),
    ]
    exporter = TreeExporter()
    group, alone = reading.lines(export_items(exporter, sessions))
    assert group["task_id"] == "t"
    assert sorted(tuple(node["ids"]) for node in group["nodes"]) == [(1, 2), (3,), (4,)]
    assert [one["reason"] for one in group["sessions"]] == [None, "timeout"]
    assert alone["task_id"] == "c"
    assert exporter.rows == 2


def test_the_documented_exporter_of_your_own_works() -> None:
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    example = page.rpartition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    rows = reading.lines(export_items(names["Mine"](), [two_turns().build_item(1.0)]))
    assert all(row["ids"] and row["reward"] == 1.0 for row in rows)
    assert rows
