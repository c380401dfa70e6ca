"""Calls that were under way when their process was killed."""

import asyncio

from polar.store.base import BegunCall
from polar.store.relational import RelationalStore
from tests.conditions import wait_until
from tests.unit.store.samples import exchange, session


def begun(exchange_id: str, seq: int) -> BegunCall:
    return BegunCall(exchange_id, "s", seq, "openai_chat", "messages", "m", 17.0, b"{}")


async def noted(store: RelationalStore) -> set[str]:
    return {
        row[0] for row in await store.query(lambda db: db.execute("SELECT exchange_id FROM begun_calls").fetchall())
    }


async def test_what_was_under_way_is_interrupted(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    store.note_calls_as("gone")
    ended = exchange("s", 0, [b"1"])
    store.note_begun(begun(ended.exchange_id, 0))
    store.note_begun(begun("lost", 1))
    store.note_begun(begun("refused", 2))

    async def all_noted() -> bool:
        return await noted(store) == {ended.exchange_id, "lost", "refused"}

    await wait_until(all_noted)
    await store.append(ended)
    store.drop_begun("refused")

    async def one_left() -> bool:
        return await noted(store) == {"lost"}

    await wait_until(one_left)
    assert await store.record_interrupted("somebody else") == []
    assert await store.record_interrupted("gone") == ["lost"]
    assert await store.record_interrupted("gone") == []
    _, found = [it async for it in store.exchanges("s")]
    assert (found.exchange_id, found.status, found.untrainable, found.started_at) == (
        "lost",
        "interrupted",
        "no_reply",
        17.0,
    )
    assert bytes(found.wire.fields["model"]) == b'"m"'
    assert found.error is not None
    assert "2 bytes" in found.error
    assert await store.next_seq("s") == 2


async def test_a_call_that_ends_at_once_is_never_noted(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    store.note_calls_as("me")
    quick = exchange("s", 0, [b"1"])
    store.note_begun(begun(quick.exchange_id, 0))
    noting = store._noting
    assert noting is not None
    await store.append(quick)
    commits = store.commits
    await asyncio.wait({noting})
    assert store.commits == commits
    assert await noted(store) == set()
