"""A real PostgreSQL server, to be started, stopped and shared."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

WHY_NOT = "pgserver has no build for this Python: run the tests on 3.11"
_numbers = count()


class Server:
    def __init__(self, running: Any) -> None:
        self._running = running
        self.url: str = running.get_uri()

    def new_database(self) -> str:
        """The URL of an empty one: a schema of its own, which takes a tenth of the time of a whole database."""
        name = f"test_{next(_numbers)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return f"{self.url}&options={quote(f'-c search_path={name}')}"

    @contextmanager
    def asks_password(self, user: str, password: str) -> Iterator[None]:
        """There is this user, who must give it; nobody else must."""
        rules = self._running.pgdata / "pg_hba.conf"
        before = rules.read_text()
        rules.write_text(f"local all {user} scram-sha-256\n{before}")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'".encode())
            connection.execute("SELECT pg_reload_conf()")
            try:
                yield
            finally:
                rules.write_text(before)
                connection.execute(f"DROP ROLE {user}".encode())
                connection.execute("SELECT pg_reload_conf()")

    def stop(self) -> None:
        """As in a crash: nobody is waited for, and nothing is put in order."""
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        folder = self._running.pgdata
        self._control("-w", "-o", '-h ""', "-o", f"-k {folder}", "-l", str(self._running.log), "start")

    def _control(self, *arguments: str) -> None:
        from pgserver._commands import pg_ctl  # type: ignore[attr-defined]

        pg_ctl(list(arguments), pgdata=self._running.pgdata, user=self._running.system_user, timeout=60)


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Run by root, it belongs to another user, who may not enter pytest's own temporary folders."""
    if sys.version_info >= (3, 13):
        pytest.skip(WHY_NOT)
    locks = Path(tempfile.gettempdir(), f"polar-pgserver-{os.getuid()}")  # for all processes that run tests
    locks.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="polar-pg-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(locks))  # pgserver warns on import where it is not set
        from pgserver.postgres_server import get_server

        running = get_server(f"{folder}/data", cleanup_mode="delete")
        server = Server(running)
        try:
            yield server
        finally:
            running.ensure_postgres_running()  # a server that a test has started anew is another process
            running.cleanup()
