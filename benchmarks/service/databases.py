"""Databases for `make bench-service`: a new and empty one for each measurement, and what their server spends.

SQLite is a file, in the process that uses it. PostgreSQL is a server that somebody names, or one that is started here
(pgserver), whose CPU time can then be counted.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

SQLITE, POSTGRES = "SQLite", "PostgreSQL"


class DatabaseBackend(Struct, frozen=True):
    name: str
    new: Callable[[], contextlib.AbstractContextManager[str | None]]  # its URL; None where the data folder holds it
    cpu: Callable[[], float] | None = None  # seconds that its server has spent; None where there is none to be seen


@contextlib.contextmanager
def open_backends(postgres: str | None, folder: Path) -> Iterator[tuple[list[DatabaseBackend], dict[str, str]]]:
    """Those that there are, and why others are not. `postgres` is the URL of a server where databases may be made."""
    found, absent = [DatabaseBackend(SQLITE, open_sqlite)], {}
    with contextlib.ExitStack() as stack:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            absent[POSTGRES] = "its driver is not installed: pip install 'polar-rl[postgres]'"
            yield found, absent
            return
        pid = None
        if postgres is None:
            try:
                from pgserver.postgres_server import get_server
            except ImportError:
                absent[POSTGRES] = "name a server with --postgres URL, or pip install pgserver"
                yield found, absent
                return
            server = stack.enter_context(get_server(folder / "postgres", cleanup_mode="delete"))
            postgres, pid = server.get_uri(), server.get_pid()
        url = postgres
        found.append(
            DatabaseBackend(
                POSTGRES, lambda: _create_database(url), None if pid is None else lambda: read_family_cpu(pid)
            )
        )
        yield found, absent


def open_sqlite() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _create_database(server: str) -> Iterator[str]:
    import psycopg

    name = f"polar_bench_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield urlsplit(server)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def read_family_cpu(pid: int) -> float:
    """Seconds of user and system time of a process and its children, those that have ended included."""
    tick = os.sysconf("SC_CLK_TCK")
    own = _read_times(pid)
    spent = sum(own[11:15])  # its own, and that of children that it has seen end
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may just have ended
                times = _read_times(int(entry.name))
                if times[1] == pid:
                    spent += times[11] + times[12]
    return spent / tick


def _read_times(pid: int) -> list[int]:
    """The numbers in /proc/PID/stat behind its name; the first of them is for the state, which is no number."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return [0, *(int(field) for field in fields[1:])]
