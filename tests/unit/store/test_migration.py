"""A store of an older Polar is made a new one when it is opened, and loses nothing."""

import asyncio

from polar.records.session import Evidence, Verdict
from polar.store.relational import RelationalStore
from tests.unit.store.places import Place
from tests.unit.store.samples import exchange, fingerprint, session

SIXTH_VERSION = (
    "DROP TABLE replaced_sessions",
    "UPDATE polar_schema SET version = 6",
)

FOURTH_VERSION = (
    *SIXTH_VERSION,
    "DROP INDEX work_marked",
    *(f"ALTER TABLE work DROP COLUMN {name}" for name in ("exposure", "control", "control_deaths")),
    "UPDATE polar_schema SET version = 4",
)

THIRD_VERSION = (
    *FOURTH_VERSION,
    "ALTER TABLE sessions DROP COLUMN evidence",
    "UPDATE polar_schema SET version = 3",
)

SECOND_VERSION = (
    *THIRD_VERSION,
    *(f"DROP TABLE {name}" for name in ("work", "tasks", "runs", "consumers", "counters", "facts")),
    "UPDATE polar_schema SET version = 2",
)

FIRST_VERSION = (
    *SECOND_VERSION,
    "ALTER TABLE sessions DROP COLUMN reason",
    "ALTER TABLE sessions DROP COLUMN turn_rewards",
    "ALTER TABLE exchanges DROP COLUMN checksum",
    "ALTER TABLE exchanges ADD COLUMN role TEXT NOT NULL DEFAULT 'main'",
    "ALTER TABLE exchanges ADD COLUMN agent_id TEXT",
    "UPDATE polar_schema SET version = 1",
)


async def test_from_the_first_version(place: Place) -> None:
    store = place.open()
    await store.create_session(session("s"))
    first = exchange("s", 0, [b"1"])
    await store.append(first)
    await store.close()
    place.execute(*FIRST_VERSION)

    store, *others = await asyncio.gather(*(asyncio.to_thread(place.open) for _ in range(3)))
    for other in others:
        await other.close()
    (found,) = [it async for it in store.read_exchanges("s")]
    assert found.checksum is None
    assert fingerprint(found) == fingerprint(first)
    second = exchange("s", 1, [b"1", b"2"])
    await store.append(second)
    ended = await store.end_session("s", ended_at=3.0, verdict=Verdict(None, "timeout", {first.exchange_id: 0.5}))
    assert ended is not None
    assert (ended.reward, ended.reason, ended.turn_rewards) == (None, "timeout", {first.exchange_id: 0.5})
    assert [it.checksum is None async for it in store.read_exchanges("s")] == [True, False]
    await store.close()
    await place.open().close()


async def test_sessions_of_the_third_version_have_no_evidence(place: Place) -> None:
    store = place.open()
    await store.create_session(session("old"))
    await store.end_session("old", ended_at=1.0, verdict=Verdict(1.0))
    await store.create_session(session("running"))
    await store.close()
    place.execute(*THIRD_VERSION)

    store = place.open()
    old = await store.find_session("old")
    assert old is not None
    assert (old.reward, old.evidence) == (1.0, [])
    found = [Evidence("test_edited", "tests/test_a.py", True, "changed"), Evidence("grader_path", "/tests", count=3)]
    await store.end_session("running", ended_at=2.0, verdict=Verdict(0.0, evidence=found))
    await store.close()

    store = place.open()
    running = await store.find_session("running")
    assert running is not None
    assert running.evidence == found
    await store.close()


async def test_the_same_tables_whether_new_or_made_new(place: Place) -> None:
    await place.open().close()
    tables = place.schema()
    place.execute(*SECOND_VERSION)
    await place.open().close()
    assert place.schema() == tables


async def test_a_verdict_is_a_reward_or_a_reason(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    await store.end_session("s", ended_at=1.0, verdict=Verdict(reason="node_lost"))
    graded = await store.end_session("s", ended_at=2.0, verdict=Verdict(0.25))
    assert graded is not None
    assert (graded.reward, graded.reason, graded.ended_at) == (0.25, None, 1.0)
