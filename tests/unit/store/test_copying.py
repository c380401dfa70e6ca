"""A session copied from one store to another is the same there, to the bit."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import StoreError
from polar.records.exchange import Exchange
from polar.records.session import Evidence, Verdict
from polar.store import session_copy
from polar.store.checksum import compute_checksum
from polar.store.relational import RelationalStore
from polar.store.rows import ExchangeRow, SessionRow
from tests.unit.store.places import Place
from tests.unit.store.samples import conversation, exchange, fingerprint, session
from tests.unit.store.servers import Server
from tests.unit.store.test_store import check, read
from tests.unit.store.test_trees import Step, made, plans


@pytest.fixture(params=["sqlite", "postgresql"])
def other_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(f"sqlite:{tmp_path / 'other.db'}")
    running: Server = request.getfixturevalue("server")
    return Place(running.new_database())


@pytest_asyncio.fixture
async def other(other_place: Place) -> AsyncIterator[RelationalStore]:
    opened = other_place.open()
    yield opened
    await opened.close()


async def write(store: RelationalStore, turns: list[Exchange]) -> None:
    await store.create_session(session(turns[0].session_id))
    for turn in turns:
        await store.append(turn)


async def everything(store: RelationalStore) -> list[object]:
    """What is in the store."""
    kept: list[object] = [await store.query(lambda db: db.execute("SELECT count(*) FROM blobs").fetchone()[0])]
    for known in await store.list_sessions():
        kept += [known, *(fingerprint(it) for it in await read(store, known.session_id))]
    return kept


# Copies


async def test_a_copy_is_the_same_and_goes_on(store: RelationalStore, other: RelationalStore) -> None:
    turns = list(conversation("s", 8))
    forks = [
        exchange("s", 8, [b"1"], prompt_ids=None),
        exchange("s", 9, [bytes(it) for it in turns[3].raw_request.items]),
    ]
    await write(store, turns[:6] + forks)
    data = await store.export_session("s")
    assert await other.import_session(data) == "s"
    assert await other.export_session("s") == data
    assert await other.find_session("s") == session("s")
    assert await other.find_session_by_key(session("s").key_hash) == session("s")
    assert await other.read_next_seq("s") == 10
    late = msgspec.structs.replace(turns[6], seq=10)
    await other.append(late)
    assert late.parent == turns[5].exchange_id
    await check(other, "s", [*turns[:6], *forks, late])
    ended = await other.end_session("s", ended_at=7.0, verdict=Verdict(0.5, turn_rewards={"x-s-0": 1.0}))
    assert ended == session("s", status="ended", ended_at=7.0, reward=0.5, turn_rewards={"x-s-0": 1.0})


async def test_a_copy_is_as_large_as_what_is_new(store: RelationalStore) -> None:
    sizes = []
    for turns in (20, 40, 80):
        await write(store, list(conversation(f"s{turns}", turns)))
        sizes.append(len(await store.export_session(f"s{turns}")))
    assert 1.8 < (sizes[2] - sizes[1]) / (sizes[1] - sizes[0]) < 2.2


async def test_pieces_that_are_there_already_are_shared(store: RelationalStore, other: RelationalStore) -> None:
    for name in ("s", "t"):
        await write(store, list(conversation(name, 3)))
    await write(other, list(conversation("u", 3)))
    for name in ("s", "t"):
        await other.import_session(await store.export_session(name))
        await check(other, name, await read(store, name))
    blobs = await everything(other)
    await other.import_session(await store.export_session("t"))
    assert await everything(other) == blobs


async def test_a_copy_may_come_again_and_later_ones_add(store: RelationalStore, other: RelationalStore) -> None:
    turns = list(conversation("s", 6))
    await write(store, turns[:4])
    first = await store.export_session("s")
    await other.import_session(first)
    for turn in turns[4:]:
        await store.append(turn)
    await store.amend(turns[1].exchange_id, status="partial", delivered=7)
    found = [Evidence("link_out", "a -> /etc/passwd", True), Evidence("grader_path", "/tests", detail="asked for")]
    await store.end_session("s", ended_at=5.0, verdict=Verdict(1.0, evidence=found))
    second = await store.export_session("s")
    await asyncio.gather(*(other.import_session(second) for _ in range(3)))
    wanted = await everything(store)
    assert await everything(other) == wanted
    await other.end_session("s", ended_at=9.0, verdict=Verdict(turn_rewards={"x-s-0": 2.0}))
    wanted = await everything(other)
    await other.import_session(second)
    assert await everything(other) == wanted


async def test_other_content_is_refused(store: RelationalStore, other: RelationalStore) -> None:
    turns = list(conversation("s", 3))
    await write(store, turns)
    await store.end_session("s", ended_at=5.0, verdict=Verdict(1.0))
    data = await store.export_session("s")
    await other.create_session(session("s"))
    for turn in turns[:2]:
        await other.append(turn)
    await other.append(exchange("s", 2, [b"1"]))
    before = await everything(other)
    with pytest.raises(StoreError, match="Session s is in this store already, with other content"):
        await other.import_session(data)
    assert await everything(other) == before


OTHER_EVIDENCE = [Evidence("canary_passed", "test_b", True)]


@pytest.mark.parametrize(
    "change",
    [{"run": "r"}, {"metadata": {}}, {"created_at": 1.0}, {"reward": 0.5}, {"evidence": OTHER_EVIDENCE}],
)
async def test_another_session_of_this_id_is_refused(
    store: RelationalStore, other: RelationalStore, change: dict[str, object]
) -> None:
    known = {"reward": 0.25, "evidence": [Evidence("canary_passed", "test_a", True)]}
    await store.create_session(session("s", **known))
    await other.create_session(session("s", **known | change))
    with pytest.raises(StoreError, match="other content"):
        await other.import_session(await store.export_session("s"))


async def test_sessions_that_are_not_there(store: RelationalStore) -> None:
    for name in ("nobody", "a\0b", "\ud800"):
        with pytest.raises(StoreError, match="no session"):
            await store.export_session(name)


# Damage


async def test_damage_is_found_and_nothing_is_written(store: RelationalStore, other: RelationalStore) -> None:
    await write(store, list(conversation("s", 3)))
    data = await store.export_session("s")
    places = Random(0)
    broken = [b"", b"hello", data[:-1], data + b"x", data[: len(data) // 2]]
    for _ in range(50):
        place = places.randrange(len(data))
        broken.append(data[:place] + bytes([data[place] ^ (1 << places.randrange(8))]) + data[place + 1 :])
    for it in broken:
        with pytest.raises(StoreError, match=r"copy of a session (is damaged|has version)"):
            await other.import_session(it)
    assert await everything(other) == [0]


async def test_rows_that_do_not_fit_together(store: RelationalStore, other: RelationalStore) -> None:
    """With the right checksum: whoever made it made a mistake."""
    await write(store, list(conversation("s", 3)))
    data = await store.export_session("s")

    def changed(copy: session_copy.SessionCopy) -> list[session_copy.SessionCopy]:
        replace = msgspec.structs.replace
        first, *rest = copy.exchanges
        return [
            replace(copy, pieces=dict(list(copy.pieces.items())[1:])),
            replace(copy, exchanges=rest),
            replace(copy, exchanges=[first, first, *rest]),
            replace(copy, exchanges=[*rest, first]),
            replace(copy, exchanges=[replace(first, session_id="t"), *rest]),
            replace(copy, exchanges=[replace(first, fields=b"\xc1"), *rest]),
            replace(copy, session=replace(copy.session, metadata="{")),
            replace(copy, session=replace(copy.session, session_id="a\0b")),
            replace(copy, session=replace(copy.session, evidence='[{"kind": "magic", "subject": "a"}]')),
        ]

    for copy in changed(session_copy.unpack(data)):
        with pytest.raises(StoreError, match="copy of a session is damaged"):
            await other.import_session(session_copy.pack(copy))
    assert await everything(other) == [0]


async def test_another_version_is_refused(store: RelationalStore) -> None:
    await store.create_session(session("s"))
    _, *rest = msgspec.msgpack.decode(await store.export_session("s"))
    with pytest.raises(StoreError, match="has version 99, and this Polar knows version 2"):
        await store.import_session(msgspec.msgpack.encode([99, *rest]))


async def test_a_copy_of_the_first_version_has_no_evidence(store: RelationalStore) -> None:
    await store.create_session(session("s", reward=0.25))
    _, _, body = msgspec.msgpack.decode(await store.export_session("s"))
    row, *rest = msgspec.msgpack.decode(body)
    older = msgspec.msgpack.encode([[*row[:-1]], *rest])
    copy = session_copy.unpack(msgspec.msgpack.encode([1, sha256(older).digest(), older]))
    assert (copy.session.reward, copy.session.evidence) == (0.25, None)


def test_the_version_stands_for_these_columns() -> None:
    """Whoever changes the columns gives the format a new version."""
    assert session_copy.FORMAT_VERSION == 2
    assert (len(SessionRow.__struct_fields__), len(ExchangeRow.__struct_fields__)) == (11, 30)


# Any tree


def check_copy(plan: list[Step], shuffle: Random, source: Place, target: Place) -> None:
    seqs = list(range(len(plan)))
    shuffle.shuffle(seqs)
    exchanges = made(plan, seqs)

    async def run() -> None:
        stores = [source.open(), target.open()]
        await write(stores[0], exchanges)
        data = await stores[0].export_session("s")
        await stores[1].import_session(data)
        found = await read(stores[1], "s")
        assert [fingerprint(it) for it in found] == [fingerprint(it) for it in await read(stores[0], "s")]
        assert [it.checksum for it in found] == [compute_checksum(it) for it in found]
        assert await stores[1].export_session("s") == data
        for store in stores:
            await store.close()

    asyncio.run(run())


@given(plan=plans, shuffle=st.randoms())
def test_any_tree_is_copied(plan: list[Step], shuffle: Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_copy(plan, shuffle, Place(f"sqlite:{folder}/a.db"), Place(f"sqlite:{folder}/b.db"))


@settings(max_examples=10, deadline=None)
@given(plan=plans, shuffle=st.randoms(), there=st.booleans(), back=st.booleans())
def test_any_tree_is_copied_with_postgresql(
    server: Server, plan: list[Step], shuffle: Random, there: bool, back: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Place(server.new_database()) if there else Place(f"sqlite:{folder}/a.db")
        target = Place(server.new_database()) if back or not there else Place(f"sqlite:{folder}/b.db")
        check_copy(plan, shuffle, source, target)
