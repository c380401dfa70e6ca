"""What must not be lost: sessions and their exchanges, durable before anybody is told of them.

    append -> group_commit (one writer thread) -> recorder -> difference: base, parent, what is new -> rows -> SQL
    export_session -> copying -> bytes -> copying -> import_session (another store's)
    exchanges -> reading <- links: bases followed, whole requests and prompts again <- rows <- SQL

`base` has the Protocol, `schema.sql` and `queries.sql` all of the SQL, for SQLite and PostgreSQL alike.
`relational` is the store over either of them; only `sqlite` and `postgres` know which one it is.
"""

from typing import TYPE_CHECKING

from polar.errors import StoreError
from polar.store.relational import RelationalStore
from polar.store.sqlite import Durability, SqliteStore

if TYPE_CHECKING:
    from polar.store.postgres import PostgresStore

__all__ = ["Durability", "open_store"]


def open_store(url: str, durability: Durability = "process") -> RelationalStore:
    """The store at `sqlite:PATH` or `postgresql://...`. What PostgreSQL has committed survives loss of power too,
    whatever `durability` asks for."""
    scheme, _, place = url.partition(":")
    if scheme == "sqlite" and place:
        return SqliteStore.open(place, durability)
    if scheme in ("postgresql", "postgres"):
        return _import_postgres_store().open(url)
    raise StoreError(  # the rest may hold a password
        f"The store's URL, which begins with {scheme!r}, names no store; "
        f"write sqlite:PATH, as in sqlite:.polar/polar.db, or postgresql://USER:PASSWORD@HOST/DATABASE."
    )


def _import_postgres_store() -> "type[PostgresStore]":
    try:
        from polar.store.postgres import PostgresStore
    except ImportError as error:
        raise StoreError(
            f"A store on PostgreSQL needs psycopg: install Polar with its extra, polar[postgres] ({error})."
        ) from error
    return PostgresStore
