"""Sessions read whole, several at a time."""

from polar.records.session import SessionRecord
from polar.store.relational import RelationalStore
from tests.unit.store.samples import conversation, fingerprint, session


async def read(store: RelationalStore, *session_ids: str | None) -> list[list[SessionRecord]]:
    return [some async for some in store.read_sessions(session_ids)]


async def test_each_session_comes_whole_and_in_its_place(store: RelationalStore) -> None:
    turns = {"short": 3, "long": 40, "none": 0, "other": 2}
    for session_id, count in turns.items():
        await store.create_session(session(session_id))
        for turn in conversation(session_id, count):
            await store.append(turn)
    wanted = ["short", None, "long", "gone", "none", "other", "short"]
    found = [one for some in await read(store, *wanted) for one in some]
    known = [name if name in turns else None for name in wanted]
    assert [one.session and one.session.session_id for one in found] == known
    for name, one in zip(known, found, strict=True):
        alone = [] if name is None else [exchange async for exchange in store.read_exchanges(name)]
        assert len(one.exchanges) == (0 if name is None else turns[name])
        assert [fingerprint(exchange) for exchange in one.exchanges] == [fingerprint(exchange) for exchange in alone]


async def test_short_ones_come_together_but_not_all_at_once(store: RelationalStore) -> None:
    for number in range(100):
        await store.create_session(session(f"s{number}"))
    sizes = [len(some) for some in await read(store, *(f"s{number}" for number in range(100)))]
    assert sum(sizes) == 100
    assert 1 < max(sizes) < 100


async def test_nothing_is_read_where_nothing_is_asked_for(store: RelationalStore) -> None:
    assert await read(store) == []
