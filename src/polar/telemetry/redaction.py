"""What must never be written down, nor be inherited by a child: the settings' secrets, and sessions' keys."""

import ctypes
import os
import re
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import BaseModel

_SESSION_KEY_PATTERN = r"sk-polar-[\w-]+"  # as `ids.new_key` makes them
_MIN_SECRET_CHARS = 4  # characters; what is shorter is a word, and hides nothing


def collect_secrets(settings: BaseModel) -> set[str]:
    """Values of all fields that are not shown (`repr=False`), and passwords in addresses."""
    found: set[str] = set()
    for name, field in type(settings).model_fields.items():
        for value in _iter_leaves(getattr(settings, name)):
            if isinstance(value, BaseModel):
                found |= collect_secrets(value)
            elif isinstance(value, str) and "://" in value:
                found |= _find_passwords(value)
            elif isinstance(value, str) and not field.repr:
                found.add(value)
    return {secret for secret in found if len(secret) >= _MIN_SECRET_CHARS}


class SecretRedactor:
    """Puts something else in their place."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        longest_first = sorted(secrets, key=len, reverse=True)  # one may begin with another
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), _SESSION_KEY_PATTERN]))

    def __call__(self, text: str) -> str:
        return self._pattern.sub("(secret)", text)


def _iter_leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _iter_leaves(item)
    else:
        yield value


def _find_passwords(text: str) -> set[str]:
    try:
        parts = urlsplit(text)
    except ValueError:  # something else than an address
        return {text}
    asked = [value for name, values in parse_qs(parts.query).items() if "password" in name for value in values]
    return {*asked} if parts.password is None else {*asked, parts.password, unquote(parts.password)}


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
