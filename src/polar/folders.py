"""Folders on this machine: the user's cache, and private folders and files."""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from polar.errors import ConfigError

_log = logging.getLogger(__name__)
_OTHERS_MODE_BITS = stat.S_IRWXG | stat.S_IRWXO


def get_user_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The cache folder for downloaded models and harnesses."""
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    except RuntimeError:
        raise ConfigError("This user has no home folder for a cache: set HOME, or XDG_CACHE_HOME.") from None
    return home / "polar"


def make_private_folder(folder: Path) -> None:
    """Creates a folder that only this user can access. Logs a warning if an existing one is readable by others."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.stat().st_mode & _OTHERS_MODE_BITS:
            _log.warning("Other users can read the data folder %s: run `chmod 700` on it.", folder)


def make_private_file(path: Path) -> None:
    """Creates an empty file that only this user can access, unless it exists."""
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
