"""Label values that stay few, whatever is sent to us: every value of a label is a series that is kept for ever."""

from urllib.parse import urlsplit

MOST_RUNS = 100
OTHER = "other"


class Capped:
    """The first so many values as they are, and all that come later as one."""

    def __init__(self, most: int, *known: str) -> None:
        self._most = most
        self._known = set(known)

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) < self._most:
            self._known.add(value)
            return value
        return OTHER


def without_password(url: str) -> str:
    """An address as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
