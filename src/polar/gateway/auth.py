"""Which session a request belongs to: by its key alone, read from where a provider's clients put it."""

import re
from collections.abc import Mapping
from urllib.parse import unquote

from multidict import CIMultiDictProxy

_PREFIX = "/s/"
_KEY = re.compile(r"sk-polar-[\w-]+")  # as `ids.new_key` makes them

_NO_HINTS = frozenset(
    {
        "authorization",
        "x-api-key",
        "x-goog-api-key",
        "api-key",
        "cookie",
        "proxy-authorization",
        "host",
        "connection",
        "content-length",
        "content-type",
        "content-encoding",
        "transfer-encoding",
        "accept",
        "accept-encoding",
        "accept-language",
    }
)
"""Headers that say nothing of the harness, or too much: credentials are never recorded."""


def split_path(path: str) -> tuple[str | None, str]:
    """`/s/{key}/v1/...` into the key and the rest, for harnesses that can't carry a key elsewhere."""
    if not path.startswith(_PREFIX):
        return None, path
    key, _, rest = path[len(_PREFIX) :].partition("/")
    return unquote(key), "/" + rest


def find_key(headers: CIMultiDictProxy[str], query: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key")


def shown(path: str) -> str:
    """A path as it may be logged, or told: a key may stand where we don't look for one."""
    return _KEY.sub("(key)", path)


def hints(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    """What the request's headers say of the harness: its threads, agents and retries."""
    found = {}
    for name, value in headers.items():
        name = name.lower()
        if name not in _NO_HINTS and _KEY.search(value) is None:
            found[name] = value.encode("utf-8", "replace").decode()  # bytes that are no text stay out of the store
    return found
