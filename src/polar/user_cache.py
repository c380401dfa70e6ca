"""Where a user's own caches are: models and harnesses that are fetched once."""

import os
from collections.abc import Mapping
from pathlib import Path

from polar.errors import ConfigError


def user_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    except RuntimeError:
        raise ConfigError("This user has no home folder for a cache: set HOME, or XDG_CACHE_HOME.") from None
    return home / "polar"
