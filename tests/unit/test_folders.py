"""What Polar keeps, and what it was told, is for its own user alone."""

import logging
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from polar.folders import make_private_folder
from polar.store.sqlite import open_sqlite_store


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_data_folder_is_made_for_its_user_and_an_open_one_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "above" / "data"
    for _ in range(2):
        make_private_folder(data)
        assert permissions(data) == 0o700
    assert caplog.records == []
    data.chmod(0o755)
    make_private_folder(data)
    assert permissions(data) == 0o755
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{data}: run `chmod 700`" in caplog.text


async def test_a_database_and_the_files_beside_it_are_for_its_user(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        store = open_sqlite_store(tmp_path / "polar.db")
        beside = sqlite3.connect(tmp_path / "polar.db")
        beside.execute("CREATE TABLE written (x)")
        found = {path.name: permissions(path) for path in tmp_path.iterdir()}  # noqa: ASYNC240
        beside.close()
        await store.close()
    finally:
        os.umask(mask)
    assert found == dict.fromkeys(("polar.db", "polar.db-shm", "polar.db-wal"), 0o600)


ERASE = """
import os, subprocess, sys
from polar.telemetry.redaction import erase_variables
erase_variables("POLAR_", {"hunter2-token", "hunter2-key"})
seen = open("/proc/self/environ", "rb").read()
child = subprocess.run(["env"], capture_output=True).stdout
print(b"hunter2" in seen, b"hunter2" in child, b"KEPT" in child, os.environ.get("POLAR_SERVER__TOKEN"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/PID/environ is Linux's")
def test_secrets_are_erased_from_the_environment() -> None:
    variables = {"POLAR_SERVER__TOKEN": "hunter2-token", "POLAR_JUDGES": '{"a": "hunter2-key"}', "POLAR_KEPT": "1"}
    told = subprocess.run(
        [sys.executable, "-c", ERASE], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert told.stdout == "False False True None\n"
