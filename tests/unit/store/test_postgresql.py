"""What is PostgreSQL's own: every query on a real server, addresses, passwords, settings."""

import asyncio
import socket
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from polar.config import StoreSettings
from polar.errors import StoreError
from polar.records.exchange import StartedCall
from polar.records.session import Verdict
from polar.store import open_store, session_copy
from polar.store.postgres import open_postgres_store
from polar.store.reader import Reader
from polar.store.recorder import Recorder
from polar.store.relational import LINEAGE_MEMORY_BYTES
from polar.store.sql import SCHEMA_VERSION, Queries, load_queries, load_schema
from tests.unit.store.samples import conversation, exchange, fingerprint, session
from tests.unit.store.servers import Server


class Recording:
    """A connection that notes which statements ran."""

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection
        self.ran: set[str] = set()

    def execute(self, query: str, parameters: Any) -> Any:
        self.ran.add(query)
        return self._connection.execute(query, parameters)

    def executemany(self, query: str, parameters: Any) -> None:
        self.ran.add(query)
        self._connection.cursor().executemany(query, parameters)


def test_everything_runs_on_postgresql(server: Server) -> None:
    named = load_queries("pyformat")
    with psycopg.connect(server.new_database()) as connection:
        for statement in load_schema():
            connection.execute(statement)
        db = Recording(connection)
        recorder, reader = Recorder(db, named, max_lineage_bytes=LINEAGE_MEMORY_BYTES), Reader(db, named)

        for name, created_at in (("s", 1.0), ("t", 2.0), ("u", 3.0)):
            recorder.create_session(session(name, created_at=created_at))
        assert reader.session("t") == session("t", created_at=2.0)
        assert reader.session_by_key(session("u").key_hash) == session("u", created_at=3.0)
        assert [it.session_id for it in reader.sessions(2, None)] == ["u", "t"]
        assert [it.session_id for it in reader.sessions(2, "t")] == ["s"]
        ended = session("u", created_at=3.0, status="ended", ended_at=4.0, reward=0.5)
        assert recorder.end_session("u", 4.0, Verdict()) is not None
        assert recorder.end_session("u", 5.0, Verdict(0.5)) == ended
        assert reader.session("u") == ended

        turns = list(conversation("s", 30))
        forks = [
            exchange("s", 30, [b"1"], prompt_ids=None),
            exchange("s", 31, [bytes(it) for it in turns[9].raw_request.items]),
        ]
        for turn in turns + forks:
            if turn.seq in (7, 20):  # as after a restart
                recorder = Recorder(db, named, max_lineage_bytes=LINEAGE_MEMORY_BYTES)
            turn.parent = recorder.append(turn)
            recorder.flush_pieces()
        recorder.amend(turns[4].exchange_id, "partial", 12)
        turns[4].status, turns[4].delivered = "partial", 12
        recorder.on_rollback(outcome_unknown=True)
        assert recorder.append(forks[1]) == forks[1].parent  # it is there already
        assert reader.next_seq("s") == 32
        assert reader.next_seq("t") == 0
        answered = [turn for turn in turns + forks if turn.status == "complete"]
        assert reader.usage_totals("s").sampled == sum(turn.usage.completion for turn in turns + forks)
        assert reader.usage_totals("s").uncounted == sum(not turn.usage.prompt for turn in answered)
        for version in (1, 2):
            recorder.set_policy_versions({"http://a": version, "http://b": 7})
        assert reader.policy_versions() == {"http://a": 2, "http://b": 7}
        reading = reader.scan_exchanges("s")
        assert [fingerprint(it) for it in iter(reading.read_next, None)] == [fingerprint(it) for it in turns + forks]

        assert recorder.import_copy(session_copy.unpack(reader.export_session("s"))) == "s"  # and so is this

        assert recorder.store_id() == recorder.store_id()
        for _ in range(2):
            recorder.write_probe()
        assert reader.accepted_session("default", "t", 1) is None
        recorder.revoke_session_reward("s", "superseded")
        disowned = reader.session("s")
        assert disowned is not None
        assert (disowned.reward, disowned.reason) == (None, "superseded")

        calls = [
            StartedCall(f"x-{number}", "s", 1000 + number, "openai_chat", "messages", "m", 1.0, 2) for number in (1, 2)
        ]
        assert recorder.record_interrupted(calls) == ["x-1", "x-2"]
        assert recorder.record_interrupted(calls) == []

        assert db.execute(named.schema_version, {}).fetchone() == (SCHEMA_VERSION,)
        assert db.ran == {getattr(named, field.name) for field in fields(Queries)}


# Errors


def refused(url: str) -> str:
    with pytest.raises(StoreError) as error:
        open_store(url)
    assert "secret" not in str(error.value)
    return str(error.value)


def test_addresses_that_lead_nowhere(server: Server, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        nobody = refused(f"postgresql://me:secret@127.0.0.1:{port}/polar")
    assert f"postgresql://me@127.0.0.1:{port}/polar: no server listens there" in nobody
    assert "no server listens there" in refused(f"postgresql://me:secret@/polar?host={tmp_path}")
    assert "no such host" in refused("postgresql://me:secret@nowhere.invalid/polar")
    assert "no such database" in refused(server.url.replace("/postgres?", "/missing?"))
    assert "can't be read" in refused("postgresql://me:secret@host:port with spaces/polar")
    assert "can't be read" in refused("postgresql://me:secret@[::1/polar")


def test_a_wrong_password(server: Server) -> None:
    with server.asks_password("careful", "right"):
        url = server.url.replace("postgres:@", "careful:{}@")
        for password in ("secret", ""):
            assert "the user or password is wrong" in refused(url.format(password))
        with psycopg.connect(url.format("right")):
            pass


def test_settings_do_not_show_the_password() -> None:
    settings = StoreSettings(url="postgresql://me:secret@host/polar")
    assert "secret" not in f"{settings!r} {settings}"


def test_a_user_who_may_not_make_tables(server: Server) -> None:
    with server.asks_password("weak", "secret"):
        url = server.url.replace("postgres:@", "weak:secret@")
        assert "may not do this" in refused(url)  # the schema `public` is its owner's


async def test_a_standby_is_not_written(server: Server) -> None:
    url = server.new_database()
    await open_store(url).close()
    store = open_store(url + quote(" -c default_transaction_read_only=on"))
    with pytest.raises(StoreError, match="read-only"):
        await store.create_session(session("s"))
    await store.close()


def test_without_psycopg(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "psycopg" or "store.postgres" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "polar-rl[postgres]" in refused("postgresql://me:secret@127.0.0.1/polar")


async def test_a_nul_character_fails_alone(server: Server) -> None:
    store = open_store(server.new_database())
    made = [store.create_session(session(f"s{n}", run="a\0b" if n == 1 else "ab")) for n in range(3)]
    results = await asyncio.gather(*made, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), StoreError, type(None)]
    assert "NUL" in str(results[1])
    assert await store.session("a\0b") is None
    assert await store.end_session("a\0b", ended_at=1.0, verdict=Verdict()) is None
    assert [it.session_id for it in await store.sessions()] == ["s2", "s0"]
    await store.close()


# What it is told


async def test_a_commit_is_never_asynchronous(server: Server) -> None:
    url = server.new_database()
    for asked, used in (("off", "on"), ("remote_apply", "remote_apply")):
        store = open_postgres_store(url + quote(f" -c synchronous_commit={asked}"))
        await store.create_session(session(asked))
        assert store._recorder._db.execute("SHOW synchronous_commit").fetchone() == (used,)
        await store.close()
