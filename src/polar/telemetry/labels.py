"""Label values that stay few, whatever is sent to us: every value of a label is a series that is kept for ever."""

from urllib.parse import urlsplit

MAX_RUN_LABELS = 100
OTHER_LABEL = "other"


class LabelCap:
    """The first so many values as they are, and all that come later as one."""

    def __init__(self, max_values: int, *known: str) -> None:
        self._max_values = max_values
        self._known = set(known)

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) < self._max_values:
            self._known.add(value)
            return value
        return OTHER_LABEL


def strip_password(url: str) -> str:
    """An address as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
