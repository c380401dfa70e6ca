"""Which session a request belongs to: by its key alone, read from where a provider's clients put it."""

import re
from collections.abc import Mapping
from urllib.parse import unquote

from multidict import CIMultiDictProxy

_KEY_PATH_PREFIX = "/s/"
_KEY_PATTERN = re.compile(r"sk-polar-[\w-]+")  # as `ids.new_key` makes them

_UNRECORDED_HEADERS = frozenset(
    {
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
"""Headers that say nothing of the harness."""

_CREDENTIAL_NAME = re.compile(r"key|token|secret|auth|cookie|passw|credential|signature|jwt|bearer")
_CREDENTIAL_VALUE = re.compile(r"^\s*(bearer|basic)\s|\bsk-[\w-]{16}", re.IGNORECASE)
"""Credentials are never recorded. Providers and proxies have many headers for them (x-litellm-api-key, helicone-auth),
and no list has all. A header that is left out by mistake costs a hint; one that is recorded is a leak."""


def split_path(path: str) -> tuple[str | None, str]:
    """`/s/{key}/v1/...` into the key and the rest, for harnesses that can't carry a key elsewhere."""
    if not path.startswith(_KEY_PATH_PREFIX):
        return None, path
    key, _, rest = path[len(_KEY_PATH_PREFIX) :].partition("/")
    return unquote(key), "/" + rest


def find_key(headers: CIMultiDictProxy[str], query: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key")


def redact_keys(path: str) -> str:
    """A path as it may be logged, or told: a key may stand where we don't look for one."""
    return _KEY_PATTERN.sub("(key)", path)


def collect_hints(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    """What the request's headers say of the harness: its threads, agents and retries."""
    found = {}
    for name, value in headers.items():
        name = name.lower()
        if name not in _UNRECORDED_HEADERS and not _is_credential(name, value):
            found[name] = value.encode("utf-8", "replace").decode()  # bytes that are no text stay out of the store
    return found


def _is_credential(name: str, value: str) -> bool:
    patterns = ((_CREDENTIAL_NAME, name), (_CREDENTIAL_VALUE, value), (_KEY_PATTERN, value))
    return any(pattern.search(text) for pattern, text in patterns)
