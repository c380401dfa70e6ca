"""Creates the tables of an empty database, and migrates an older one.

Several processes may open one database at the same moment: a process that finds something to do looks again once it has
the exclusive lock.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from polar.errors import StoreError
from polar.store.sql import SCHEMA_VERSION, Connection, Queries, load_migrations, load_schema


class SchemaSql(Struct, frozen=True):
    """The statements that differ between databases."""

    begin_exclusive: Sequence[str]  # begins a transaction that no other process is in
    select_tables: str  # selects the names of all tables
    alternative: str  # what to choose where a database is not ours


def ensure_schema(db: Connection, queries: Queries, schema_sql: SchemaSql, location: str) -> None:
    """Creates or migrates the schema. Raises StoreError for a database of another program, or one that is newer than
    this version of Polar."""
    if not _list_tables(db, schema_sql):
        with _open_exclusive_transaction(db, schema_sql):
            if not _list_tables(db, schema_sql):
                _run(db, load_schema())
    if "polar_schema" not in _list_tables(db, schema_sql):
        raise StoreError(f"{location} is a database, but not one of Polar's; choose {schema_sql.alternative}.")
    steps = load_migrations()
    if _read_version(db, queries) in steps:
        with _open_exclusive_transaction(db, schema_sql):
            while (version := _read_version(db, queries)) in steps:
                _run(db, steps[version])
    version = _read_version(db, queries)
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{location} has schema version {version}, and this Polar knows version {SCHEMA_VERSION}; "
            f"use the Polar that wrote it, or {schema_sql.alternative}."
        )


def _list_tables(db: Connection, schema_sql: SchemaSql) -> set[str]:
    return {name for (name,) in db.execute(schema_sql.select_tables).fetchall()}


def _read_version(db: Connection, queries: Queries) -> int:
    version: int = db.execute(queries.schema_version).fetchone()[0]
    return version


def _run(db: Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        db.execute(statement)


@contextmanager
def _open_exclusive_transaction(db: Connection, schema_sql: SchemaSql) -> Iterator[None]:
    """Opens a transaction. If it fails, closing the connection rolls it back, which the caller does then."""
    _run(db, schema_sql.begin_exclusive)
    yield
    db.execute("COMMIT")
