"""One collection at a time in a data folder: two would run the same samples, and both would be exported."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from polar.errors import ConfigError
from polar.folders import make_private_folder

_LOCK_FILE = "collecting.lock"


@contextlib.contextmanager
def lock_collection(data: Path) -> Iterator[None]:
    """Raises ConfigError where another process collects there. What is killed holds nothing."""
    make_private_folder(data)
    with (data / _LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another `polar run --resume` is at work in {data}: wait for it, or give this one a folder of its own "
                "(--data)."
            ) from None
        yield
