import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from polar.errors import StoreError
from polar.store import open_store
from polar.store.base import Exchange, Store, Verdict
from polar.store.sqlite import SqliteStore
from tests import captures
from tests.unit.store.samples import conversation, exchange, fingerprint, session, wire


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore.open(tmp_path / "polar.db", lock_timeout_s=0.05)
    yield opened
    await opened.close()


async def read(store: Store, session_id: str) -> list[Exchange]:
    return [found async for found in store.exchanges(session_id)]


async def check(store: Store, session_id: str, expected: list[Exchange]) -> None:
    found = await read(store, session_id)
    assert [fingerprint(it) for it in found] == [fingerprint(it) for it in expected]


# Sessions


async def test_sessions_round_trip(store: SqliteStore) -> None:
    plain = session("s1", created_at=5.0)
    rich = session("s2", created_at=6.0, run="r", metadata={"a": {"b": [1, "ü", None]}}, reward=-0.5)
    await store.create_session(plain)
    await store.create_session(rich)
    assert await store.session("s1") == plain
    assert await store.session("s2") == rich
    assert await store.session("s3") is None
    assert await store.session_by_key(rich.key_hash) == rich
    assert await store.session_by_key(b"?") is None


async def test_sessions_are_listed_newest_first_in_pages(store: SqliteStore) -> None:
    ages = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 2.0, "e": 9.0}
    for name, created_at in ages.items():
        await store.create_session(session(name, created_at=created_at))
    assert [it.session_id for it in await store.sessions()] == ["e", "a", "d", "c", "b"]
    pages, before = [], None
    while page := await store.sessions(limit=2, before=before):
        pages.append([it.session_id for it in page])
        before = page[-1].session_id
    assert pages == [["e", "a"], ["d", "c"], ["b"]]
    with pytest.raises(StoreError, match="no session nobody"):
        await store.sessions(before="nobody")


async def test_the_first_end_stays_and_a_reward_may_be_added(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    ended = await store.end_session("s", ended_at=7.0, verdict=Verdict())
    assert ended == session("s", status="ended", ended_at=7.0)
    await store.end_session("s", ended_at=8.0, verdict=Verdict(0.25))
    assert await store.end_session("s", ended_at=9.0, verdict=Verdict(1.0)) == session(
        "s", status="ended", ended_at=7.0, reward=0.25
    )
    assert await store.session("s") == session("s", status="ended", ended_at=7.0, reward=0.25)
    assert await store.end_session("nobody", ended_at=1.0, verdict=Verdict()) is None


async def test_a_reward_is_a_number(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    for reward in (float("nan"), float("inf")):
        with pytest.raises(StoreError, match="finite"):
            await store.end_session("s", ended_at=1.0, verdict=Verdict(reward))


async def test_keys_are_used_once(store: SqliteStore) -> None:
    await store.create_session(session("s1"))
    with pytest.raises(StoreError, match="already"):
        await store.create_session(session("s2", key_hash=session("s1").key_hash))


# Exchanges


async def test_every_field_comes_back(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    bare = Exchange("x", "s", 1, "google", {}, {}, wire([]), "failed", 1.0, 2.0)
    full = exchange("s", 0, [b'{"role": "user"}', b" [1,\n2] "])
    await store.append(full)
    await store.append(bare)
    await check(store, "s", [full, bare])
    listed, unlisted = await read(store, "s")
    assert listed.reply is not None
    assert listed.reply.logprobs is not None
    assert np.isnan(listed.reply.logprobs[0].logprob)
    assert unlisted.prompt_ids is None


async def test_arrays_that_are_read_belong_to_the_reader(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    await store.append(exchange("s", 0, [b"1"]))
    await store.append(exchange("s", 1, [b"1", b"2"]))
    seen = []
    async for found in store.exchanges("s"):
        assert found.prompt_ids is not None
        seen.append(found.prompt_ids.tolist())
        found.prompt_ids[:] = 0
    assert seen == [list(range(10))] * 2


async def test_a_caller_may_reuse_its_arrays_and_bodies(store: SqliteStore) -> None:
    """What the store keeps for the next difference must not change under it."""
    await store.create_session(session("s"))
    ids = np.arange(100, dtype=np.int32)
    await store.append(exchange("s", 0, [b"1"], prompt_ids=ids, sampled_ids=None))
    ids[:] = 7
    await store.append(exchange("s", 1, [b"1"], prompt_ids=ids))
    first, second = await read(store, "s")
    assert first.prompt_ids is not None
    assert second.prompt_ids is not None
    assert first.prompt_ids.tolist() == list(range(100))
    assert second.prompt_ids.tolist() == [7] * 100


async def test_parents_are_filled_in_and_kept(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    turns = [
        exchange("s", 0, [b"1"]),
        exchange("s", 1, [b"1", b"2"]),
        exchange("s", 2, [b"1", b"2"]),
        exchange("s", 3, [b"1", b"2", b"3"], parent="x-elsewhere"),
    ]
    for turn in turns:
        await store.append(turn)
    assert [turn.parent for turn in turns] == [None, "x-s-0", "x-s-0", "x-elsewhere"]
    await check(store, "s", turns)


async def test_amend(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    turn = exchange("s", 0, [b"1"])
    await store.append(turn)
    await store.amend(turn.exchange_id, status="partial", delivered=1)
    await check(store, "s", [msgspec.structs.replace(turn, status="partial", delivered=1)])
    with pytest.raises(StoreError, match="no exchange nobody"):
        await store.amend("nobody", status="partial", delivered=1)


async def test_next_seq_and_order(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    assert await store.next_seq("s") == 0
    turns = [exchange("s", seq, [b"%d" % n for n in range(seq + 1)]) for seq in range(4)]
    for seq in (2, 0, 3, 1):
        await store.append(turns[seq])
    assert await store.next_seq("s") == 4
    assert [it.seq for it in await read(store, "s")] == [0, 1, 2, 3]
    assert await read(store, "nobody") == []


@pytest.mark.parametrize("name", captures.names())
async def test_requests_of_real_harnesses(store: SqliteStore, name: str) -> None:
    await store.create_session(session("s"))
    turns: list[Exchange] = []
    for record in captures.load(name):
        body = record["body"]
        grows = next((key for key in ("messages", "input", "contents") if key in body), None)
        if grows is not None:
            fields = {key: msgspec.json.encode(value) for key, value in body.items() if key != grows}
            turns.append(
                exchange("s", len(turns), [], wire=wire([msgspec.json.encode(item) for item in body[grows]], **fields))
            )
    assert turns
    for turn in turns:
        await store.append(turn)
    await check(store, "s", turns)


async def test_a_long_session_across_a_restart(tmp_path: Path) -> None:
    turns = list(conversation("s", 200))
    store = SqliteStore.open(tmp_path / "polar.db", "power")
    await store.create_session(session("s"))
    for turn in turns[:120]:
        await store.append(turn)
    await store.close()
    store = SqliteStore.open(tmp_path / "polar.db")
    for turn in turns[120:]:
        await store.append(turn)
    assert [turn.parent for turn in turns[1:]] == [turn.exchange_id for turn in turns[:-1]]
    await check(store, "s", turns)
    await store.close()


# Many at once


async def test_concurrent_appends_share_transactions(store: SqliteStore) -> None:
    turns = [exchange(f"s{n}", 0, [b"%d" % n]) for n in range(200)]
    await asyncio.gather(*(store.create_session(session(turn.session_id)) for turn in turns))
    before = store.commits
    await asyncio.gather(*(store.append(turn) for turn in turns))
    assert store.commits - before <= 20
    for turn in turns:
        await check(store, turn.session_id, [turn])


async def test_one_bad_record_fails_alone(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    turns = [exchange("s", seq, [b"%d" % n for n in range(seq + 1)]) for seq in range(60)]
    bad = {
        10: exchange("nobody", 10, [b"0"]),
        20: exchange("s", 20, [b"0"], prompt_ids=np.arange(3)),  # 64-bit ids
        30: exchange("s", 30, [b"0"], exchange_id=turns[3].exchange_id),
        40: exchange("s", 3, [b"0"], exchange_id="x-other"),
        50: exchange("s", 50, [b"0"], hints={"a": "\udc80"}),
    }
    written = [bad.get(seq, turn) for seq, turn in enumerate(turns)]
    results = await asyncio.gather(*(store.append(turn) for turn in written), return_exceptions=True)
    failed = {seq: str(result) for seq, result in enumerate(results) if isinstance(result, StoreError)}
    assert failed.keys() == bad.keys()
    assert "create the session first" in failed[10]
    assert "int64" in failed[20]
    assert "already" in failed[30]
    assert "already" in failed[40]
    good = [turn for seq, turn in enumerate(turns) if seq not in bad]
    assert [turn.parent for turn in good[1:]] == [turn.exchange_id for turn in good[:-1]]
    await check(store, "s", good)


async def test_a_cancelled_caller_does_not_lose_the_write(store: SqliteStore) -> None:
    await store.create_session(session("s"))
    turns = [exchange("s", seq, [b"%d" % n for n in range(seq + 1)]) for seq in range(20)]
    tasks = [asyncio.create_task(store.append(turn)) for turn in turns]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.amend(turns[-1].exchange_id, status="complete", delivered=2)  # behind the others in the queue
    assert [it.exchange_id for it in await read(store, "s")] == [turn.exchange_id for turn in turns]


async def test_reading_while_writes_go_on(store: SqliteStore) -> None:
    turns = list(conversation("s", 40))
    await store.create_session(session("s"))
    for turn in turns[:20]:
        await store.append(turn)
    found = []
    async for it in store.exchanges("s"):
        found.append(it)
        if len(found) <= 20:
            await store.append(turns[19 + len(found)])
    assert [fingerprint(it) for it in found] == [fingerprint(turn) for turn in turns]


def test_one_store_in_several_event_loops(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "polar.db")
    turns = list(conversation("s", 6))
    asyncio.run(store.create_session(session("s")))
    for turn in turns[:5]:
        asyncio.run(store.append(turn))

    async def leave_early() -> None:
        waiting = asyncio.ensure_future(store.append(turns[5]))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(leave_early())

    async def finish() -> None:
        await store.amend(turns[5].exchange_id, status="complete", delivered=300)
        assert [it.exchange_id for it in await read(store, "s")] == [turn.exchange_id for turn in turns]
        await store.close()

    asyncio.run(finish())


# Memory


async def test_memory_is_bounded_however_many_sessions_are_open(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "polar.db", memory=1_000_000)
    names = [f"s{n}" for n in range(40)]
    talks = {name: list(conversation(name, 3)) for name in names}
    for name in names:
        await store.create_session(session(name))
    for turn in range(3):
        await asyncio.gather(*(store.append(talks[name][turn]) for name in names))
        assert store.lineage_bytes <= 1_000_000
    for name in names:
        assert talks[name][2].parent == talks[name][1].exchange_id
        await check(store, name, talks[name])
    await store.close()


# Closing and failing


async def test_close_writes_what_is_waiting(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "polar.db")
    await store.create_session(session("s"))
    turns = list(conversation("s", 30))
    tasks = [asyncio.create_task(store.append(turn)) for turn in turns]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*tasks)
    await store.close()
    for use in (store.append(turns[0]), store.session("s"), read(store, "s"), store.next_seq("s")):
        with pytest.raises(StoreError, match="closed"):
            await use
    store = SqliteStore.open(tmp_path / "polar.db")
    await check(store, "s", turns)
    await store.close()


async def test_a_reading_ends_with_an_error_when_the_store_is_closed(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "polar.db")
    await store.create_session(session("s"))
    for turn in conversation("s", 2):
        await store.append(turn)
    reading = store.exchanges("s")
    await anext(reading)
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await anext(reading)


async def test_a_full_disk_reaches_the_callers_and_goes_by(store: SqliteStore, tmp_path: Path) -> None:
    turns = list(conversation("s", 12))
    await store.create_session(session("s"))
    for turn in turns[:4]:
        await store.append(turn)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wal = (tmp_path / "polar.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal + 5_000, hard))  # no file may grow beyond this
    try:
        results = await asyncio.gather(*(store.append(turn) for turn in turns[4:8]), return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(isinstance(result, StoreError) and "space" in str(result) for result in results), results
    for turn in turns[4:]:
        await store.append(turn)
    await check(store, "s", turns)


async def test_a_lock_held_by_others_reaches_the_callers_and_goes_by(store: SqliteStore, tmp_path: Path) -> None:
    await store.create_session(session("s"))
    turns = list(conversation("s", 3))
    other = sqlite3.connect(tmp_path / "polar.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    results = await asyncio.gather(*(store.append(turn) for turn in turns), return_exceptions=True)
    assert all(isinstance(result, StoreError) and "locked" in str(result) for result in results), results
    assert await read(store, "s") == []
    other.execute("ROLLBACK")
    other.close()
    for turn in turns:
        await store.append(turn)
    await check(store, "s", turns)


async def test_damage_is_reported(store: SqliteStore, tmp_path: Path) -> None:
    await store.create_session(session("s"))
    for turn in conversation("s", 3):
        await store.append(turn)
    for damage in (
        "UPDATE exchanges SET detail = '{' WHERE seq = 2",
        "UPDATE exchanges SET shared_tokens = 1000000 WHERE seq = 1",
        "DELETE FROM blobs WHERE length(data) < 2000",
    ):
        other = sqlite3.connect(tmp_path / "polar.db")
        with other:
            other.execute(damage)
        other.close()
        with pytest.raises(StoreError, match="damaged"):
            await read(store, "s")


# Opening


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello, this is no database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStore.open(tmp_path / "notes.txt")


def test_somebody_elses_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    with other:
        other.execute("CREATE TABLE things (a)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not one of Polar's"):
        SqliteStore.open(path)
    assert path.read_bytes() == before


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "polar.db"
    await SqliteStore.open(path).close()
    other = sqlite3.connect(path)
    with other:
        other.execute("UPDATE polar_schema SET version = 99")
    other.close()
    with pytest.raises(StoreError, match="schema version 99"):
        SqliteStore.open(path)


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "polar.db", tmp_path):
        with pytest.raises(StoreError, match="can't be opened"):
            SqliteStore.open(path)


async def test_several_open_the_same_new_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "polar.db"
    stores = await asyncio.gather(*(asyncio.to_thread(SqliteStore.open, path) for _ in range(8)))
    await asyncio.gather(*(store.create_session(session(f"s{n}")) for n, store in enumerate(stores)))
    assert len(await stores[0].sessions()) == 8
    for store in stores:
        await store.close()


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
async def test_durability(tmp_path: Path, durability: str, level: int) -> None:
    store = SqliteStore.open(tmp_path / "polar.db", durability)  # type: ignore[arg-type]
    db = store._recorder._db
    assert db.execute("PRAGMA synchronous", {}).fetchone()[0] == level
    assert db.execute("PRAGMA journal_mode", {}).fetchone()[0] == "wal"
    await store.close()


async def test_open_store(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path}/data/polar.db")
    await store.create_session(session("s"))
    await store.close()
    assert (tmp_path / "data" / "polar.db").exists()
    for url, message in (
        ("postgresql://db/polar", "PostgreSQL"),
        ("sqlite:", "sqlite:PATH"),
        ("mysql:x", "sqlite:PATH"),
    ):
        with pytest.raises(StoreError, match=message):
            open_store(url)
