"""What must not be lost: sessions and their exchanges, durable before anybody hears of them.

    append -> group_commit (one writer thread) -> recorder -> lineage: base, parent, what is new -> rows -> SQL
    export_session -> session_copy -> bytes -> session_copy -> import_session (another store's)
    exchanges -> reader <- base_link: bases followed, whole requests and prompts again <- rows <- SQL

`base` has the Protocol, `schema.sql` and `queries.sql` all of the SQL, for SQLite and PostgreSQL alike.
`RelationalStore` is the store over either of them; only `sqlite` and `postgres` know which one it is.
"""

from polar.distribution import install_hint
from polar.errors import StoreError
from polar.store.relational import RelationalStore
from polar.store.sqlite import Durability, open_sqlite_store

__all__ = ["Durability", "open_store"]


def open_store(url: str, durability: Durability = "process") -> RelationalStore:
    """The store at `sqlite:PATH` or `postgresql://...`. What PostgreSQL has committed survives loss of power too,
    whatever `durability` asks for."""
    scheme, _, place = url.partition(":")
    if scheme == "sqlite" and place:
        return open_sqlite_store(place, durability)
    if scheme in ("postgresql", "postgres"):
        try:
            from polar.store.postgres import open_postgres_store
        except ImportError as error:
            raise StoreError(f"A store on PostgreSQL needs psycopg ({error}): {install_hint('postgres')}.") from error
        return open_postgres_store(url)
    raise StoreError(  # the rest may hold a password
        f"The store's URL, which begins with {scheme!r}, names no store; "
        f"write sqlite:PATH, as in sqlite:.polar/polar.db, or postgresql://USER:PASSWORD@HOST/DATABASE."
    )
