"""What a model's turn says, apart from how it is spelled: so that a turn that a harness echoes can be known again.

Harnesses re-serialise arguments, reorder keys, trim text and split or join parts. None of that changes what was said.
Equal `Saying`s say the same: equal thinking, equal text up to white space at the edges of its parts, equal calls of the
same names in the same order, with arguments that are equal as JSON (1.0 is 1).
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from polar.rendering.memo import Memo
from polar.types import Part, Reasoning, Text, ToolCall

NOTHING = b""
_SIZE = 8

_CALL_BYTES = 32 * 1024 * 1024
"""For calls with their digests. Arguments may be whole files."""


class Saying(Struct, frozen=True, gc=False):
    """Digests of a turn's thinking, text and calls; empty where it has none."""

    thinking: bytes = NOTHING
    text: bytes = NOTHING
    calls: bytes = NOTHING

    @property
    def digest(self) -> bytes:
        return _digest((self.thinking, self.text, self.calls))


def saying(parts: Iterable[Part]) -> Saying:
    thinking, text, calls = [], [], []
    for part in parts:
        match part:
            case Reasoning():
                thinking.append(part.text)
            case Text():
                text.append(part.text)
            case ToolCall():
                calls.append(_call((part.namespace, part.name, part.kind, part.arguments)))
    return Saying(_joined(thinking), _joined(text), _digest(calls) if calls else NOTHING)


def chained(before: bytes, turn: bytes) -> bytes:
    """A digest of a sequence of turns, one more at a time."""
    return _digest((before, turn))


def arguments_value(arguments: str) -> Any:
    """Arguments as JSON; the text itself where they are none."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _joined(pieces: Sequence[str]) -> bytes:
    joined = "".join(pieces).strip()
    return _digest((joined.encode("utf-8", "surrogatepass"),)) if joined else NOTHING


def _digest_of_call(call: tuple[str | None, str, str, str]) -> bytes:
    namespace, name, kind, arguments = call
    value = arguments_value(arguments) if kind == "function" and arguments else arguments or {}
    try:
        canonical = json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:  # too deep to be compared by value
        canonical = arguments
    return _digest(text.encode("utf-8", "surrogatepass") for text in (namespace or "", name, canonical))


_call = Memo(_digest_of_call, _CALL_BYTES)


def _plain(value: Any) -> Any:
    """The same value with one spelling of each number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value


def _digest(pieces: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=_SIZE)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()
