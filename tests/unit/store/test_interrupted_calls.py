"""Calls whose gateway was killed, as the store records them."""

from polar.records.exchange import StartedCall
from polar.store.relational import RelationalStore
from tests.unit.store.samples import exchange, session


def start_call(exchange_id: str, seq: int, session_id: str = "s") -> StartedCall:
    return StartedCall(exchange_id, session_id, seq, "openai_chat", "messages", "m", 17.0, 2)


async def test_calls_of_a_killed_gateway_are_recorded_once(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    recorded = exchange("s", 0, [b"1"])
    await store.append(recorded)
    calls = [
        start_call(recorded.exchange_id, 0),
        start_call("lost", 1),
        start_call("of no session", 0, "gone"),
        start_call("in another call's place", 0),
    ]
    assert await store.record_interrupted(calls) == ["lost"]
    assert await store.record_interrupted(calls) == []
    _, found = [it async for it in store.read_exchanges("s")]
    assert (found.exchange_id, found.status, found.untrainable, found.started_at) == (
        "lost",
        "interrupted",
        "no_reply",
        17.0,
    )
    assert bytes(found.raw_request.fields["model"]) == b'"m"'
    assert found.error is not None
    assert "2 bytes" in found.error
    assert await store.read_next_seq("s") == 2
