"""The SQL files, read once: the schema's statements, and the named queries in a driver's own style of parameters.

Queries are written with `:name` parameters, one query per `-- name:` line. Each is a field of `Queries`, so that a name
that is misspelt, missing or left over is found at once.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Protocol, TypeVar, cast

T = TypeVar("T")

SCHEMA_VERSION = 7

ParameterStyle = Literal["named", "pyformat"]
"""`:name` (sqlite3) or `%(name)s` (psycopg)."""

_NAME = re.compile(r"^-- name: *(\w+) *\n", re.MULTILINE)
_MIGRATION = re.compile(r"^-- from: *(\d+) *\n", re.MULTILINE)
_COMMENT = re.compile(r"--(?! name:| from:)[^\n]*")
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")  # not the type in a cast, x::text


class Cursor(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> Sequence[Any]: ...


class Connection(Protocol):
    """What reading needs of a database. sqlite3's connections implement it; `postgres` has its own."""

    def execute(self, query: str, parameters: Mapping[str, Any] = ..., /) -> Cursor: ...


class WritingConnection(Connection, Protocol):
    """What writing needs of a database. A statement may be deferred until a result is fetched or the transaction ends,
    and may fail only then."""

    def executemany(self, query: str, parameters: Iterable[Mapping[str, Any]], /) -> object: ...


@dataclass(frozen=True)
class Queries:
    schema_version: str
    store_id: str
    make_store_id: str
    write_probe: str
    insert_session: str
    end_session: str
    disown_session: str
    standing_session: str
    session: str
    session_by_key: str
    newest_sessions: str
    sessions_before: str
    insert_blob: str
    blob: str
    blobs: str
    insert_exchange: str
    stored_exchange: str
    amend_exchange: str
    next_exchanges: str
    details: str
    next_seq: str
    latest_request_links: str
    request_link: str
    token_link: str
    set_policy: str
    policies: str
    session_exchanges: str
    can_record_interrupted: str


@cache
def load_queries(style: ParameterStyle) -> Queries:
    return parse_queries(Queries, _read_store_sql("queries.sql"), style)


def parse_queries(query_class: type[T], text: str, style: ParameterStyle) -> T:
    """Parses a file's queries into a dataclass, whose fields are their names."""
    _, *parts = _NAME.split(text)
    queries = {name: _translate(query, style) for name, query in zip(parts[::2], parts[1::2], strict=True)}
    names = {field.name for field in fields(cast(Any, query_class))}
    if queries.keys() != names or len(parts) != 2 * len(queries):
        raise ValueError(
            f"{query_class.__name__} and its SQL differ, or a name occurs twice: {sorted(queries.keys() ^ names)}"
        )
    return query_class(**queries)


def load_schema() -> list[str]:
    """Loads the statements that create the tables."""
    return [text for statement in _read_store_sql("schema.sql").split(";") if (text := statement.strip())]


def load_migrations() -> dict[int, list[str]]:
    """Loads for each schema version the statements that migrate it to the next one."""
    _, *parts = _MIGRATION.split(_read_store_sql("migrations.sql"))
    return {
        int(version): [text for statement in body.split(";") if (text := statement.strip())]
        for version, body in zip(parts[::2], parts[1::2], strict=True)
    }


def read_sql(package: str, name: str) -> str:
    """Reads a file of SQL, without its comments."""
    return _COMMENT.sub("", (files(package) / name).read_text("utf-8"))


def _read_store_sql(name: str) -> str:
    return read_sql(__package__, name)


def _translate(text: str, style: ParameterStyle) -> str:
    statement = text.strip().removesuffix(";")
    if style == "named":
        return statement
    return _PARAMETER.sub(r"%(\1)s", statement.replace("%", "%%"))
