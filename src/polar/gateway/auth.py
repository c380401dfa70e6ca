"""The session key of a request, read from where a provider's clients put it. Nothing else identifies a session."""

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
"""Headers that say nothing about the harness."""

_CREDENTIAL_NAME = re.compile(r"key|token|secret|auth|cookie|passw|credential|signature|jwt|bearer")
_CREDENTIAL_VALUE = re.compile(r"^\s*(bearer|basic)\s|\bsk-[\w-]{16}", re.IGNORECASE)
"""Credentials are never recorded. Providers and proxies have many headers for them (x-litellm-api-key, helicone-auth),
and no list has all of them. A header that is left out by mistake costs a hint; one that is recorded is a leak."""


def split_path(path: str) -> tuple[str | None, str]:
    """Splits `/s/{key}/v1/...` into the key and the path without it. Harnesses that can't send a key elsewhere put it
    there."""
    if not path.startswith(_KEY_PATH_PREFIX):
        return None, path
    key, _, provider_path = path[len(_KEY_PATH_PREFIX) :].partition("/")
    return unquote(key), "/" + provider_path


def find_key(headers: CIMultiDictProxy[str], query: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key")


def redact_keys(path: str) -> str:
    """Returns a path that may be logged or sent back: a key can stand where nobody looks for one."""
    return _KEY_PATTERN.sub("(key)", path)


def collect_hints(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    """Returns the headers that say something about the harness (its threads, agents, retries), without credentials."""
    hints = {}
    for name, value in headers.items():
        name = name.lower()
        if name not in _UNRECORDED_HEADERS and not _is_credential(name, value):
            hints[name] = value.encode("utf-8", "replace").decode()  # the store takes valid text only
    return hints


def _is_credential(name: str, value: str) -> bool:
    patterns = ((_CREDENTIAL_NAME, name), (_CREDENTIAL_VALUE, value), (_KEY_PATTERN, value))
    return any(pattern.search(text) for pattern, text in patterns)
