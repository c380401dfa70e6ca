"""What k turns cost in the file: what is new in each, not what each repeats."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from polar.records.exchange import Exchange
from polar.store.sqlite import open_sqlite_store
from tests.unit.store.samples import conversation, session


async def write(path: Path, *talks: list[Exchange]) -> None:
    store = open_sqlite_store(path)
    for talk in talks:
        await store.create_session(session(talk[0].session_id))
        for turn in talk:
            await store.append(turn)
    await store.close()


def payload(path: Path) -> int:
    """Bytes in all columns of all exchanges, and in all blobs."""
    db = sqlite3.connect(path)
    columns = [row[1] for row in db.execute("PRAGMA table_info(exchanges)")]
    lengths = " + ".join(f"COALESCE(LENGTH({column}), 0)" for column in columns)
    blobs = db.execute("SELECT COALESCE(SUM(LENGTH(data)), 0) FROM blobs").fetchone()[0]
    rows = db.execute(f"SELECT COALESCE(SUM({lengths}), 0) FROM exchanges").fetchone()[0]
    db.close()
    return int(blobs + rows)


async def test_growth_is_linear_in_turns(tmp_path: Path) -> None:
    turns = list(conversation("s", 200))
    sizes, files = {}, {}
    for count in (10, 50, 100, 200):
        path = tmp_path / f"{count}.db"
        await write(path, turns[:count])
        sizes[count] = payload(path)
        files[count] = path.stat().st_size
    per_turn = (sizes[200] - sizes[10]) / 190
    for fewer, more in ((10, 50), (50, 100), (100, 200)):
        assert (sizes[more] - sizes[fewer]) / (more - fewer) == pytest.approx(per_turn, rel=0.02)
        assert (files[more] - files[fewer]) / (more - fewer) < 2 * per_turn
    new = 2 * 1_500 + 200 * 4 + 300 * 4 + 300 * 4  # items, context, sampled ids, log-probabilities
    assert per_turn < 1.25 * new


async def test_sessions_share_tools_and_system_prompt(tmp_path: Path) -> None:
    first, second = list(conversation("s1", 5)), list(conversation("s2", 5))
    await write(tmp_path / "one.db", first)
    await write(tmp_path / "two.db", first, second)
    whole = payload(tmp_path / "one.db")
    added = payload(tmp_path / "two.db") - whole
    assert whole - added == pytest.approx(30_000 + 10_000, rel=0.01)


async def test_a_call_that_failed_early_does_not_break_the_chain(tmp_path: Path) -> None:
    """Turn 3 failed before its prompt's ids were known, and was tried again."""
    plain = list(conversation("s", 8))
    broken = [*plain[:3], Exchange("x-failed", "s", 3, "openai_chat", {}, {}, plain[3].raw_request, "failed", 1.0, 2.0)]
    for turn in conversation("s", 8):
        if turn.seq >= 3:
            turn.seq += 1
            broken.append(turn)
    await write(tmp_path / "plain.db", plain)
    await write(tmp_path / "broken.db", broken)
    assert payload(tmp_path / "broken.db") - payload(tmp_path / "plain.db") < 500


async def test_a_drifting_prompt_costs_its_own_tail_only(tmp_path: Path) -> None:
    plain, drifted = list(conversation("s", 20)), list(conversation("s", 20))
    for turn in drifted:
        assert turn.prompt_ids is not None
        turn.prompt_ids = np.concatenate((turn.prompt_ids[:-50], np.array([turn.seq], np.int32), turn.prompt_ids[-50:]))
    await write(tmp_path / "plain.db", plain)
    await write(tmp_path / "drifted.db", drifted)
    # Each prompt goes its own way 50 ids before the sampled ones, so these and the sampled ones are stored again.
    assert payload(tmp_path / "drifted.db") - payload(tmp_path / "plain.db") < 20 * 4 * (50 + 1 + 300 + 10)
