"""What every store does, wherever it is."""

import asyncio

import msgspec
import numpy as np
import pytest

from polar.errors import StoreError
from polar.records.exchange import Exchange
from polar.records.session import Verdict
from polar.store.base import Store
from polar.store.lineage import Lineage
from polar.store.relational import RelationalStore
from tests import captures
from tests.unit.store.places import Place
from tests.unit.store.samples import conversation, exchange, fingerprint, session, wire


async def read(store: Store, session_id: str) -> list[Exchange]:
    return [found async for found in store.read_exchanges(session_id)]


async def check(store: Store, session_id: str, expected: list[Exchange]) -> None:
    found = await read(store, session_id)
    assert [fingerprint(it) for it in found] == [fingerprint(it) for it in expected]


# Sessions


async def test_sessions_round_trip(store: RelationalStore) -> None:
    plain = session("s1", created_at=5.0)
    rich = session("s2", created_at=6.0, run="r", metadata={"a": {"b": [1, "ü", None]}}, reward=-0.5)
    await store.create_session(plain)
    await store.create_session(rich)
    assert await store.find_session("s1") == plain
    assert await store.find_session("s2") == rich
    assert await store.find_session("s3") is None
    assert await store.find_session_by_key(rich.key_hash) == rich
    assert await store.find_session_by_key(b"?") is None


async def test_sessions_are_listed_newest_first_in_pages(store: RelationalStore) -> None:
    ages = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 2.0, "e": 9.0}
    for name, created_at in ages.items():
        await store.create_session(session(name, created_at=created_at))
    assert [it.session_id for it in await store.list_sessions()] == ["e", "a", "d", "c", "b"]
    pages, before = [], None
    while page := await store.list_sessions(limit=2, before=before):
        pages.append([it.session_id for it in page])
        before = page[-1].session_id
    assert pages == [["e", "a"], ["d", "c"], ["b"]]
    with pytest.raises(StoreError, match="no session nobody"):
        await store.list_sessions(before="nobody")


async def test_the_first_end_stays_and_a_reward_may_be_added(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    ended = await store.end_session("s", ended_at=7.0, verdict=Verdict())
    assert ended == session("s", status="ended", ended_at=7.0)
    await store.end_session("s", ended_at=8.0, verdict=Verdict(0.25))
    assert await store.end_session("s", ended_at=9.0, verdict=Verdict(1.0)) == session(
        "s", status="ended", ended_at=7.0, reward=0.25
    )
    assert await store.find_session("s") == session("s", status="ended", ended_at=7.0, reward=0.25)
    assert await store.end_session("nobody", ended_at=1.0, verdict=Verdict()) is None


async def test_a_reward_is_a_number(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    for reward in (float("nan"), float("inf")):
        with pytest.raises(StoreError, match="finite"):
            await store.end_session("s", ended_at=1.0, verdict=Verdict(reward))


async def test_keys_are_used_once(store: RelationalStore) -> None:
    await store.create_session(session("s1"))
    with pytest.raises(StoreError, match="already"):
        await store.create_session(session("s2", key_hash=session("s1").key_hash))


# Exchanges


async def test_every_field_comes_back(store: RelationalStore) -> None:
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


async def test_arrays_that_are_read_belong_to_the_reader(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    await store.append(exchange("s", 0, [b"1"]))
    await store.append(exchange("s", 1, [b"1", b"2"]))
    seen = []
    async for found in store.read_exchanges("s"):
        assert found.prompt_ids is not None
        seen.append(found.prompt_ids.tolist())
        found.prompt_ids[:] = 0
    assert seen == [list(range(10))] * 2


async def test_a_caller_may_reuse_its_arrays_and_bodies(store: RelationalStore) -> None:
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


async def test_parents_are_filled_in_and_kept(store: RelationalStore) -> None:
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


async def test_amend(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    turn = exchange("s", 0, [b"1"])
    await store.append(turn)
    await store.amend(turn.exchange_id, status="partial", delivered=1)
    await check(store, "s", [msgspec.structs.replace(turn, status="partial", delivered=1)])
    with pytest.raises(StoreError, match="no exchange nobody"):
        await store.amend("nobody", status="partial", delivered=1)


async def test_next_seq_and_order(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    assert await store.read_next_seq("s") == 0
    turns = [exchange("s", seq, [b"%d" % n for n in range(seq + 1)]) for seq in range(4)]
    for seq in (2, 0, 3, 1):
        await store.append(turns[seq])
    assert await store.read_next_seq("s") == 4
    assert [it.seq for it in await read(store, "s")] == [0, 1, 2, 3]
    assert await read(store, "nobody") == []


@pytest.mark.parametrize("name", captures.names())
async def test_requests_of_real_harnesses(store: RelationalStore, name: str) -> None:
    await store.create_session(session("s"))
    turns: list[Exchange] = []
    for record in captures.load(name):
        body = record["body"]
        grows = next((key for key in ("messages", "input", "contents") if key in body), None)
        if grows is not None:
            fields = {key: msgspec.json.encode(value) for key, value in body.items() if key != grows}
            turns.append(
                exchange(
                    "s", len(turns), [], raw_request=wire([msgspec.json.encode(item) for item in body[grows]], **fields)
                )
            )
    assert turns
    for turn in turns:
        await store.append(turn)
    await check(store, "s", turns)


async def test_a_long_session_across_a_restart(place: Place) -> None:
    turns = list(conversation("s", 200))
    store = place.open()
    await store.create_session(session("s"))
    for turn in turns[:120]:
        await store.append(turn)
    await store.close()
    store = place.open()
    for turn in turns[120:]:
        await store.append(turn)
    assert [turn.parent for turn in turns[1:]] == [turn.exchange_id for turn in turns[:-1]]
    await check(store, "s", turns)
    await store.close()


# Many at once


async def test_concurrent_appends_share_transactions(store: RelationalStore) -> None:
    turns = [exchange(f"s{n}", 0, [b"%d" % n]) for n in range(200)]
    await asyncio.gather(*(store.create_session(session(turn.session_id)) for turn in turns))
    before = store.commits
    await asyncio.gather(*(store.append(turn) for turn in turns))
    assert store.commits - before <= 20
    for turn in turns:
        await check(store, turn.session_id, [turn])


async def test_one_bad_record_fails_alone(store: RelationalStore) -> None:
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


async def test_a_cancelled_caller_does_not_lose_the_write(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    turns = [exchange("s", seq, [b"%d" % n for n in range(seq + 1)]) for seq in range(20)]
    tasks = [asyncio.create_task(store.append(turn)) for turn in turns]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.amend(turns[-1].exchange_id, status="complete", delivered=2)  # behind the others in the queue
    assert [it.exchange_id for it in await read(store, "s")] == [turn.exchange_id for turn in turns]


async def test_reading_while_writes_go_on(store: RelationalStore) -> None:
    turns = list(conversation("s", 40))
    await store.create_session(session("s"))
    for turn in turns[:20]:
        await store.append(turn)
    found = []
    async for it in store.read_exchanges("s"):
        found.append(it)
        if len(found) <= 20:
            await store.append(turns[19 + len(found)])
    assert [fingerprint(it) for it in found] == [fingerprint(turn) for turn in turns]


def test_one_store_in_several_event_loops(place: Place) -> None:
    store = place.open()
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


async def test_memory_is_bounded_however_many_sessions_are_open(place: Place) -> None:
    store = place.open(memory=1_000_000)
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


async def test_a_session_of_huge_requests_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is loaded for it after a restart."""
    monkeypatch.setattr(Lineage, "MAX_TRIE_BYTES", 100_000)  # about 430 items
    bound = 100_000 + 300 * 250
    store = place.open()
    await store.create_session(session("s"))
    turns = []
    for seq in range(12):
        items = [msgspec.json.encode(f"message {n} of call {seq}") for n in range(300)]
        turns.append(exchange("s", seq, [], raw_request=wire(items)))
        await store.append(turns[-1])
        assert store.lineage_bytes <= bound
        if seq == 8:
            await store.close()
            store = place.open()
    await check(store, "s", turns)
    await store.close()


async def test_sessions_that_ended_are_not_in_memory(place: Place) -> None:
    store = place.open()
    held = []
    for number in range(5):
        name = f"s{number}"
        *turns, late = conversation(name, 4)
        await store.create_session(session(name))
        for turn in turns:
            await store.append(turn)
        await store.end_session(name, ended_at=1.0, verdict=Verdict())
        held.append(store.memory_bytes)
        await store.append(late)  # it was given up when its session ended
        held.append(store.memory_bytes)
        await check(store, name, [*turns, late])
    assert set(held) == {len(bytes(late.raw_request.fields["tools"]))}, "tools are kept: sessions share them"
    await store.close()


# Closing and failing


async def test_close_writes_what_is_waiting(place: Place) -> None:
    store = place.open()
    await store.create_session(session("s"))
    turns = list(conversation("s", 30))
    tasks = [asyncio.create_task(store.append(turn)) for turn in turns]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*tasks)
    await store.close()
    for use in (store.append(turns[0]), store.find_session("s"), read(store, "s"), store.read_next_seq("s")):
        with pytest.raises(StoreError, match="closed"):
            await use
    store = place.open()
    await check(store, "s", turns)
    await store.close()


async def test_a_reading_ends_with_an_error_when_the_store_is_closed(place: Place) -> None:
    store = place.open()
    await store.create_session(session("s"))
    for turn in conversation("s", 2):
        await store.append(turn)
    reading = store.read_exchanges("s")
    await anext(reading)
    await store.close()
    with pytest.raises(StoreError, match="closed"):  # what was read ahead may still come
        _ = [exchange async for exchange in reading]


async def test_damage_is_reported(store: RelationalStore, place: Place) -> None:
    await store.create_session(session("s"))
    for turn in conversation("s", 3):
        await store.append(turn)
    for damage in (
        "UPDATE exchanges SET detail = '{' WHERE seq = 2",
        "UPDATE exchanges SET shared_tokens = 1000000 WHERE seq = 1",
        "DELETE FROM blobs WHERE length(data) < 2000",
    ):
        place.execute(damage)
        with pytest.raises(StoreError, match="damaged"):
            await read(store, "s")


# Opening


def test_somebody_elses_database_is_left_alone(place: Place) -> None:
    place.execute("CREATE TABLE things (a INTEGER)")
    with pytest.raises(StoreError, match="not one of Polar's"):
        place.open()
    with pytest.raises(Exception, match="sessions"):
        place.execute("SELECT session_id FROM sessions")


async def test_a_newer_schema_is_refused(place: Place) -> None:
    await place.open().close()
    place.execute("UPDATE polar_schema SET version = 99")
    with pytest.raises(StoreError, match="schema version 99"):
        place.open()


async def test_several_open_the_same_new_database_at_once(place: Place) -> None:
    stores = await asyncio.gather(*(asyncio.to_thread(place.open) for _ in range(8)))
    await asyncio.gather(*(store.create_session(session(f"s{n}")) for n, store in enumerate(stores)))
    assert len(await stores[0].list_sessions()) == 8
    assert place.execute("SELECT count(*) FROM polar_schema") == [1]
    for store in stores:
        await store.close()


async def test_a_session_is_found_by_its_key_in_another_process(place: Place) -> None:
    """What one has written, another goes on from."""
    one, other = place.open(), place.open()
    turns = list(conversation("s", 6))
    await one.create_session(session("s"))
    for turn in turns[:3]:
        await one.append(turn)
    found = await other.find_session_by_key(session("s").key_hash)
    assert found == session("s")
    assert await other.read_next_seq("s") == 3
    for turn in turns[3:]:
        await other.append(turn)
    assert turns[3].parent == turns[2].exchange_id
    await check(one, "s", turns)
    await one.close()
    await other.close()


async def test_policies(store: RelationalStore) -> None:
    await store.set_policy_versions({"http://a": 1, "http://b": 7})
    await store.set_policy_versions({"http://a": 2})
    assert await store.read_policy_versions() == {"http://a": 2, "http://b": 7}
