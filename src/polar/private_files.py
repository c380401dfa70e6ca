"""Folders, files and variables that nobody else on the machine may read."""

import ctypes
import logging
import os
import stat
from collections.abc import Collection
from pathlib import Path

_log = logging.getLogger(__name__)
_OTHERS_MODE_BITS = stat.S_IRWXG | stat.S_IRWXO


def make_private_folder(folder: Path) -> None:
    """For this user alone. One that others can enter stays as it is, since they may be meant to, but is told of."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.stat().st_mode & _OTHERS_MODE_BITS:
            _log.warning("Other users can read the data folder %s: run `chmod 700` on it.", folder)


def make_private_file(path: Path) -> None:
    """An empty file for this user alone, unless there is one."""
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def erase_variables(prefix: str, secrets: Collection[str]) -> None:
    """Takes variables that hold a secret out of this process's environment, so that no child inherits them, and out of
    the memory that /proc/PID/environ shows. Call it before there are threads."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    for name, value in list(os.environ.items()):
        if name.startswith(prefix) and any(secret in value for secret in secrets):
            if (at := getenv(os.fsencode(name))) is not None:
                ctypes.memset(at, 0, len(os.fsencode(value)))
            del os.environ[name]
