"""JSON as models write it: a call is taken apart, and never written anew.

The arguments of a call are the very characters that the model wrote.
"""

import re

import msgspec
from msgspec import Raw, Struct

from polar.rendering.families.base import ParsedCall

_WHOLE_STRINGS = re.compile(r'(?:[^"]++|"(?:[^"\\\x00-\x1f]|\\.)*+")*+')
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\.)*+')


class _WrittenCall(Struct):
    name: str
    arguments: Raw = Raw()
    parameters: Raw = Raw()


def is_json(text: str) -> bool:
    """One JSON value, white space around it allowed."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def read_call(text: str, key: str = "arguments") -> ParsedCall | None:
    """`{"name": ..., key: ...}`; other keys beside them are let pass."""
    calls = read_calls(f"[{text}]", key)
    return calls[0] if calls is not None and len(calls) == 1 else None


def read_calls(text: str, key: str = "arguments") -> list[ParsedCall] | None:
    """A list of calls."""
    try:
        written = msgspec.json.decode(text, type=list[_WrittenCall])
    except (msgspec.DecodeError, RecursionError):
        return None
    calls = []
    for call in written:
        arguments = bytes(call.arguments if key == "arguments" else call.parameters)
        if not call.name or not arguments:
            return None
        calls.append(ParsedCall(call.name, arguments.decode().strip()))
    return calls or None


class OpenStringTracker:
    """Whether growing JSON text ends within a string, so that markup which follows is part of it. A line break within
    a string is no JSON: there is no such string then."""

    def __init__(self) -> None:
        self._inside = False

    def feed(self, text: str) -> bool:
        """`text` is what has come since this was last asked."""
        at = 0
        if self._inside:
            at = _end(_IN_STRING, text, 0)
            if at == len(text):
                return True
            self._inside = False
            at += 1
        at = _end(_WHOLE_STRINGS, text, at)
        self._inside = at < len(text) and _end(_IN_STRING, text, at + 1) == len(text)
        return self._inside


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start
