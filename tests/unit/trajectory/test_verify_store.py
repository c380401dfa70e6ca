"""Whatever changes in the database itself, one byte or one version at a time, is seen when the rows are checked."""

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.errors import StoreError
from polar.records.exchange import VersionSpan
from polar.store.sqlite import open_sqlite_store
from polar.trajectory.verify import Problem, check_records
from tests.unit.store.samples import conversation, session

TURNS = 6


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation, stored by difference as all are, with a fork and a call that must not train."""
    path = tmp_path_factory.mktemp("store") / "polar.db"

    async def fill() -> None:
        store = open_sqlite_store(path)
        await store.create_session(session("s"))
        turns = list(conversation("s", TURNS))
        fork = msgspec.structs.replace(turns[2], exchange_id="fork", seq=TURNS)
        for exchange in [*turns, fork]:
            exchange.versions = [VersionSpan(3, 0, 100), VersionSpan(4, 100, 300)]
            exchange.untrainable = "structured_output" if exchange.seq == 3 else None
            await store.append(exchange)
        await store.close()

    asyncio.run(fill())
    return path


def check(path: Path) -> list[Problem]:
    async def read() -> list[Problem]:
        store = open_sqlite_store(path)
        try:
            return check_records([exchange async for exchange in store.read_exchanges("s")])
        finally:
            await store.close()

    return asyncio.run(read())


def seen(path: Path) -> bool:
    try:
        return any(problem.kind == "checksum" for problem in check(path))
    except StoreError as error:  # it can't even be put together again
        return "damaged" in str(error)


def columns(path: Path, seq: int) -> dict[str, bytes]:
    with closing(sqlite3.connect(path)) as db:
        query = "SELECT prompt, sampled, logprobs, detail FROM exchanges WHERE seq = ?"
        prompt, sampled, logprobs, detail = db.execute(query, (seq,)).fetchone()
    return {"prompt": prompt, "sampled": sampled, "logprobs": logprobs, "detail": detail}


def store(path: Path, seq: int, column: str, value: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"UPDATE exchanges SET {column} = ? WHERE seq = ?", (value, seq))


def test_what_was_stored_is_in_order(database: Path) -> None:
    assert check(database) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seq=st.integers(0, TURNS),
    column=st.sampled_from(["prompt", "sampled", "logprobs"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_bit_of_a_token_or_log_probability_is_seen(
    database: Path, seq: int, column: str, place: float, bit: int
) -> None:
    was = columns(database, seq)[column]
    if not was:  # a fork's prompt is all its base's
        column, was = "sampled", columns(database, seq)["sampled"]
    spoilt = bytearray(was)
    spoilt[int(place * len(was))] ^= 1 << bit
    store(database, seq, column, bytes(spoilt))
    try:
        assert seq in {_seq(problem) for problem in check(database) if problem.kind == "checksum"}
    finally:
        store(database, seq, column, was)


@pytest.mark.parametrize("seed", range(10))
def test_any_version_is_seen(database: Path, seed: int) -> None:
    chance = random.Random(seed)
    seq = chance.randrange(TURNS + 1)
    was = columns(database, seq)["detail"]
    detail = msgspec.json.decode(was)
    detail["versions"][chance.randrange(2)][chance.randrange(3)] += chance.choice([-1, 1, 50])
    store(database, seq, "detail", msgspec.json.encode(detail).decode())
    try:
        assert {_seq(problem) for problem in check(database) if problem.kind == "checksum"} == {seq}
    finally:
        store(database, seq, "detail", was)


@pytest.mark.parametrize(
    "change", ["shared_tokens = shared_tokens - 1", "base = 0", "untrainable = NULL", "logprob_kind = 'raw'"]
)
def test_so_is_how_it_is_put_together_and_what_is_said_of_it(database: Path, tmp_path: Path, change: str) -> None:
    copy = tmp_path / "polar.db"
    with closing(sqlite3.connect(database)) as db, closing(sqlite3.connect(copy)) as other:
        db.backup(other)
        other.execute(f"UPDATE exchanges SET {change} WHERE seq = 3")
        other.commit()
    assert seen(copy)


def test_rows_of_an_older_store_have_no_checksum_and_no_problem(database: Path, tmp_path: Path) -> None:
    copy = tmp_path / "polar.db"
    with closing(sqlite3.connect(database)) as db, closing(sqlite3.connect(copy)) as other:
        db.backup(other)
        other.execute("UPDATE exchanges SET checksum = NULL")
        other.commit()
    assert check(copy) == []


def _seq(problem: Problem) -> int:
    assert problem.exchange_id is not None
    return TURNS if problem.exchange_id == "fork" else int(problem.exchange_id.rpartition("-")[2])
