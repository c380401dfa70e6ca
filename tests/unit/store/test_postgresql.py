"""The one schema and the same queries on a real PostgreSQL: SQLite is not the only one that takes them."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import psycopg
import pytest

from polar.store.base import Verdict
from polar.store.reading import Reader
from polar.store.recorder import Recorder
from polar.store.sql import SCHEMA_VERSION, Queries, queries, schema
from polar.store.sqlite import MEMORY
from tests.unit.store.samples import conversation, exchange, fingerprint, session


class Recording:
    """A connection that notes which statements ran."""

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection
        self.ran: set[str] = set()

    def execute(self, query: str, parameters: Any) -> Any:
        self.ran.add(query)
        return self._connection.execute(query, parameters)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run by root, it belongs to another user, who may not enter pytest's own temporary folders."""
    with tempfile.TemporaryDirectory(prefix="polar-pg-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)  # pgserver warns on import where it is not set
        from pgserver.postgres_server import get_server

        running = get_server(f"{folder}/data", cleanup_mode="delete")
        yield running.get_uri()
        running.cleanup()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="pgserver has no build for this Python: run the tests on 3.11")
def test_everything_runs_on_postgresql(server: str) -> None:
    named = queries("pyformat")
    with psycopg.connect(server) as connection:
        for statement in schema():
            connection.execute(statement)
        db = Recording(connection)
        recorder, reader = Recorder(db, named, memory=MEMORY), Reader(db, named)

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
            exchange("s", 31, [bytes(it) for it in turns[9].wire.items]),
        ]
        for turn in turns + forks:
            if turn.seq in (7, 20):  # as after a restart
                recorder = Recorder(db, named, memory=MEMORY)
            turn.parent = recorder.append(turn)
        recorder.amend(turns[4].exchange_id, "partial", 12)
        turns[4].status, turns[4].delivered = "partial", 12
        assert reader.next_seq("s") == 32
        assert reader.next_seq("t") == 0
        for version in (1, 2):
            recorder.set_policy({"http://a": version, "http://b": 7})
        assert reader.policies() == {"http://a": 2, "http://b": 7}
        reading = reader.exchanges("s")
        assert [fingerprint(it) for it in iter(reading.next, None)] == [fingerprint(it) for it in turns + forks]

        assert db.execute(named.schema_version, {}).fetchone() == (SCHEMA_VERSION,)
        assert db.ran == {getattr(named, field.name) for field in fields(Queries)}
