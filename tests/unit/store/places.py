"""Where a store may be: a file of SQLite's, or a database of a PostgreSQL server."""

import re
import sqlite3
from contextlib import closing
from typing import Any

import psycopg

from polar.store.postgres import open_postgres_store
from polar.store.relational import LINEAGE_MEMORY_BYTES, RelationalStore
from polar.store.sqlite import open_sqlite_store


class Place:
    def __init__(self, url: str) -> None:
        self.url = url
        self._file = url.removeprefix("sqlite:") if url.startswith("sqlite:") else None

    def open(self, *, memory: int = LINEAGE_MEMORY_BYTES) -> RelationalStore:
        if self._file is not None:
            return open_sqlite_store(self._file, lock_timeout_s=5, max_lineage_bytes=memory)
        return open_postgres_store(self.url, max_lineage_bytes=memory)

    def execute(self, *statements: str) -> list[Any]:
        """By somebody else, who is not the store. Returns the first column of the last one's rows."""
        if self._file is not None:
            with closing(sqlite3.connect(self._file, isolation_level=None)) as file:
                for statement in statements:
                    rows = file.execute(statement)
                return [row[0] for row in rows]
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return [row[0] for row in cursor] if cursor.description else []

    def schema(self) -> list[str]:
        """Every table with its columns, and every index, in words."""
        if self._file is not None:
            return sorted(map(_normalised, self.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")))
        columns = self.execute(
            "SELECT table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable "
            "FROM information_schema.columns WHERE table_schema = current_schema()"
        )
        indexes = self.execute("SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema()")
        return sorted([*columns, *indexes])


def _normalised(sql: str) -> str:
    """A column that was added later is written on the last line."""
    return re.sub(r"\s*([(),])\s*", r"\1", " ".join(sql.split()))
