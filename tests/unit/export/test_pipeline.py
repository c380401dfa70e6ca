"""Which sessions go out, and that all others are counted."""

import math
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.export import tree
from polar.export.areal import ArealExporter
from polar.export.base import Exporter, SessionItem
from polar.export.parquet import ParquetExporter
from polar.export.pipeline import ExportTally, Selection, export, has_trainable_traces, restrict_to_roles, select_items
from polar.export.polar import PolarExporter
from polar.export.prime_rl import PrimeRlExporter
from polar.export.sft import SftExporter
from polar.export.tree import TreeExporter
from polar.records.session import Session
from polar.records.trajectory import SessionPaths, Trajectory, TreeTrajectory
from polar.store.relational import RelationalStore
from polar.store.sqlite import open_sqlite_store
from polar.testing.conversations import ConversationBuilder, make_text_parts
from polar.testing.token_paths import make_path
from polar.trajectory.builders import prefix_merging, prefix_tree
from polar.trajectory.checker import SessionChecker
from tests.unit.export.reading import lines
from tests.unit.export.stored import START, fill, session

SESSIONS: list[Session] = [
    session("good", 0, reward=1.0, metadata={"task_id": "t"}),
    session("bad", 1, reward=0.0),
    session("cut", 2, reason="timeout", metadata={"task_id": "t"}),
    session("lost", 3, reason="timeout"),
    session("unjudged", 4),
    session("running", 5, status="open", ended_at=None, reward=1.0),
]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RelationalStore]:
    await fill(tmp_path / "polar.db", SESSIONS)
    opened = open_sqlite_store(tmp_path / "polar.db")
    yield opened
    await opened.close()


async def run(
    store: RelationalStore, make: Callable[[], Exporter] = ArealExporter, selection: Selection | None = None
) -> tuple[list[bytes], Exporter, ExportTally]:
    written: list[bytes] = []
    exporter, tally = make(), ExportTally()
    found = select_items(store, selection or Selection(), exporter.needs, prefix_merging, tally)
    await export(found, exporter, written.append)
    return written, exporter, tally


async def test_sessions_without_a_reward_are_counted_with_their_reason(store: RelationalStore) -> None:
    written, exporter, tally = await run(store)
    assert [row["polar"]["session_id"] for row in lines(b"".join(written))] == ["bad", "bad", "good", "good"]
    assert (tally.sessions, exporter.rows, tally.trainable_tokens) == (2, 4, 12)
    assert tally.describe() == [
        "1 session still open was left out: named with --session they are exported as they are x 1",
        "3 sessions without a reward were left out: timeout x 2, not_evaluated x 1",
    ]


async def test_a_format_that_can_say_so_keeps_them(store: RelationalStore) -> None:
    written, _, tally = await run(store, PolarExporter)
    rows = lines(b"".join(written))
    assert [row["session_id"] for row in rows] == ["unjudged", "lost", "cut", "bad", "good"]
    assert rows[2]["trajectory"]["traces"][0]["reward"] is None
    assert rows[2]["error"] == "timeout"
    assert list(tally.left_out) == ["still open"]


async def test_a_session_that_is_named_need_not_have_ended(store: RelationalStore) -> None:
    written, _, _ = await run(store, ArealExporter, Selection(sessions=("running", "good")))
    assert [row["polar"]["session_id"] for row in lines(b"".join(written))] == ["running", "running", "good", "good"]


async def test_a_session_that_is_not_there(store: RelationalStore) -> None:
    with pytest.raises(ConfigError, match="There is no session nowhere"):
        await run(store, ArealExporter, Selection(sessions=("nowhere",)))


async def test_min_reward(store: RelationalStore) -> None:
    written, _, tally = await run(store, ParquetExporter, Selection(min_reward=0.5))
    assert len(written) > 0
    assert tally.sessions == 1
    assert tally.left_out["of too small a reward"] == {"below 0.5": 1}
    assert tally.left_out["without a reward"] == {"timeout": 2, "not_evaluated": 1}


async def test_sft_takes_accepted_sessions_only(store: RelationalStore) -> None:
    _, _, tally = await run(store, SftExporter)
    assert tally.sessions == 1
    assert tally.left_out["of too small a reward"] == {"not above 0": 1}
    _, _, tally = await run(store, SftExporter, Selection(min_reward=0.0))
    assert tally.sessions == 2


async def test_since(store: RelationalStore) -> None:
    _, _, tally = await run(store, PolarExporter, Selection(since=START + 2))
    assert tally.sessions == 3


async def test_a_role_trains_alone_and_weighs_all(store: RelationalStore) -> None:
    written, _, tally = await run(store, ArealExporter, Selection(sessions=("good",), roles=frozenset(("subagent",))))
    rows = lines(b"".join(written))
    assert [row["polar"]["role"] for row in rows] == ["subagent"]
    assert [row["polar"]["weight"] for row in rows] == [1.0]
    assert tally.describe() == ["3 tokens of other roles were left out: main x 3"]


async def test_a_role_that_nobody_has_leaves_nothing_to_train(store: RelationalStore) -> None:
    _, exporter, tally = await run(
        store, ArealExporter, Selection(sessions=("good",), roles=frozenset(("compaction",)))
    )
    assert exporter.rows == 0
    assert tally.left_out["with nothing to train"] == {"role_main and role_subagent": 1}


async def test_pictures_that_stay_behind_are_counted(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    talk = ConversationBuilder("seen")
    talk.add_call([{"role": "user", "content": [picture]}], make_text_parts("A cat."))
    opened = open_sqlite_store(tmp_path / "polar.db")
    try:
        await opened.create_session(session("seen", 0, reward=1.0))
        await opened.append(talk.exchanges[0])
        _, _, tally = await run(opened)
        assert tally.without_pictures == 1
        _, _, tally = await run(opened, SftExporter)
        assert tally.without_pictures == 0
    finally:
        await opened.close()


async def test_groups_come_together(store: RelationalStore) -> None:
    written, _, _ = await run(store, TreeExporter)
    trees = {row["task_id"]: [one["session_id"] for one in row["sessions"]] for row in lines(b"".join(written))}
    assert trees == {"t": ["cut", "good"], "bad": ["bad"], "lost": ["lost"], "unjudged": ["unjudged"]}


async def test_more_sessions_than_a_page(tmp_path: Path) -> None:
    await fill(tmp_path / "polar.db", [session(f"s{index}", index, reward=1.0) for index in range(230)])
    opened = open_sqlite_store(tmp_path / "polar.db")
    try:
        _, exporter, tally = await run(opened)
    finally:
        await opened.close()
    assert (tally.sessions, exporter.rows) == (230, 460)


def test_no_logprobs_where_a_format_needs_them() -> None:
    """A session is whole or not there: half of it would carry the weight of all."""
    one = SessionPaths("s", [make_path(0, [1], [2]), make_path(1, [5], [6], logprobs=False)], 1.0)
    tally = ExportTally()
    assert not has_trainable_traces(
        SessionItem(SESSIONS[0].summary, one, prefix_merging(one)), PrimeRlExporter.needs, tally
    )
    assert list(tally.left_out) == ["without log-probabilities"]


def test_roles_are_taken_out_of_the_training_not_of_the_context() -> None:
    """A sub-agent's tokens that the main agent's prompt holds are still there, and excluded by name."""
    paths = [
        make_path(0, [1], [2, 3], role="subagent"),
        make_path(1, [1, 2, 3, 4], [5]),
        make_path(2, [7], [8], role="auxiliary"),
    ]
    tally = ExportTally()
    kept = restrict_to_roles(SessionPaths("s", paths, 1.0), frozenset(("main",)), tally)
    built = prefix_merging(kept)
    assert [trace.prompt_ids.tolist() for trace in built.traces] == [[1, 2, 3, 4]]
    assert math.isclose(sum(trace.weight for trace in built.traces), 1)
    assert [(one.exchange_id, one.start, one.stop, one.reason) for one in built.excluded] == [
        ("s-x0", 0, 2, "role_subagent"),
        ("s-x2", 0, 1, "role_auxiliary"),
    ]
    assert dict(tally.other_roles) == {"subagent": 2, "auxiliary": 1}
    assert restrict_to_roles(kept, frozenset(), tally) is kept


async def test_a_damaged_session_is_held_back(tmp_path: Path, store: RelationalStore) -> None:
    with closing(sqlite3.connect(tmp_path / "polar.db", isolation_level=None)) as db:
        db.execute("UPDATE exchanges SET logprobs = zeroblob(length(logprobs)) WHERE session_id = 'good'")
    written, _, tally = await run(store, PolarExporter)
    assert "good" not in {line["session_id"] for line in lines(b"".join(written))}
    (reason,) = tally.left_out["held back by verification"]
    assert "checksum" in reason
    assert "polar verify good" in reason
    unchecked: list[bytes] = []
    found = select_items(
        store, Selection(), PolarExporter.needs, prefix_merging, ExportTally(), SessionChecker(share=0)
    )
    await export(found, PolarExporter(), unchecked.append)
    assert "good" in {line["session_id"] for line in lines(b"".join(unchecked))}


async def test_what_a_builder_got_wrong_is_held_back(store: RelationalStore) -> None:
    def wrong(sampled: SessionPaths) -> Trajectory:
        built = prefix_merging(sampled)
        built.traces[0].loss_mask = 1 - built.traces[0].loss_mask
        return built

    tally = ExportTally()
    assert [item async for item in select_items(store, Selection(), PolarExporter.needs, wrong, tally)] == []
    assert tally.left_out["held back by verification"].total() == 5


async def test_a_tree_with_a_mistake_is_held_back(store: RelationalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(sessions: Sequence[SessionPaths]) -> TreeTrajectory:
        built = prefix_tree(sessions)
        built.ids = built.ids + 1
        return built

    monkeypatch.setattr(tree, "prefix_tree", wrong)
    written, exporter, _ = await run(store, TreeExporter)
    assert b"".join(written) == b""
    assert any("held back" in reason for reason in exporter.left_out)
