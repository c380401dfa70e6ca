"""Making a database ours: the tables of an empty one, and the steps that make an older one new.

Several processes may open one database at the same moment: whoever finds something to do looks again once it alone
may write.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from polar.errors import StoreError
from polar.store.sql import SCHEMA_VERSION, Connection, Queries, migrations, schema


class Words(Struct, frozen=True):
    """What databases say differently."""

    begin_alone: Sequence[str]  # begins a transaction that no other process is in
    tables: str  # selects the names of all tables
    elsewhere: str  # what to choose where a database is not ours


def settle_schema(db: Connection, queries: Queries, words: Words, place: str) -> None:
    """Refuses a database that is somebody else's, or newer than this version of Polar."""
    if not _tables(db, words):
        with _alone(db, words):
            if not _tables(db, words):
                _run(db, schema())
    if "polar_schema" not in _tables(db, words):
        raise StoreError(f"{place} is a database, but not one of Polar's; choose {words.elsewhere}.")
    steps = migrations()
    if _version(db, queries) in steps:
        with _alone(db, words):
            while (version := _version(db, queries)) in steps:
                _run(db, steps[version])
    version = _version(db, queries)
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{place} has schema version {version}, and this Polar knows version {SCHEMA_VERSION}; "
            f"use the Polar that wrote it, or {words.elsewhere}."
        )


def _tables(db: Connection, words: Words) -> set[str]:
    return {name for (name,) in db.execute(words.tables).fetchall()}


def _version(db: Connection, queries: Queries) -> int:
    version: int = db.execute(queries.schema_version).fetchone()[0]
    return version


def _run(db: Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        db.execute(statement)


@contextmanager
def _alone(db: Connection, words: Words) -> Iterator[None]:
    """A transaction. One that fails is rolled back when its connection is closed, since nothing else comes of it."""
    _run(db, words.begin_alone)
    yield
    db.execute("COMMIT")
