"""What must not be lost: sessions and their exchanges, durable before anybody is told of them.

    append -> group_commit (one writer thread) -> recorder -> difference: base, parent, what is new -> rows -> SQL
    exchanges -> reading <- links: bases followed, whole requests and prompts again <- rows <- SQL

`base` has the Protocol and the records, `schema.sql` and `queries.sql` all of the SQL, for SQLite and PostgreSQL alike.
Only `sqlite` knows which database it is.
"""

from polar.errors import StoreError
from polar.store.base import Store
from polar.store.sqlite import Durability, SqliteStore

__all__ = ["Durability", "open_store"]


def open_store(url: str, durability: Durability = "process") -> Store:
    """The store at `sqlite:PATH`."""
    scheme, _, place = url.partition(":")
    if scheme == "sqlite" and place:
        return SqliteStore.open(place, durability)
    if scheme in ("postgresql", "postgres"):
        raise StoreError("This version of Polar has no PostgreSQL store yet; use a local file: sqlite:.polar/polar.db.")
    raise StoreError(f"The store's URL {url!r} names no store; write sqlite:PATH, as in sqlite:.polar/polar.db.")
