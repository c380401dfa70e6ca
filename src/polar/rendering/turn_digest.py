"""Digests of what a model's turn says, whatever its spelling, to recognize a turn that a harness echoes.

Harnesses re-serialise arguments, reorder keys, trim text and split or join parts. None of that changes the digest.
Turns with equal digests have equal thinking, equal text up to white space at the edges, and calls of the same names in
the same order, with arguments that are equal as JSON (1.0 is 1).
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from polar.rendering.memo import Memo
from polar.types import Part, Reasoning, Text, ToolCall

EMPTY_DIGEST = b""
_DIGEST_BYTES = 8

_CALL_CACHE_BYTES = 32 * 1024 * 1024
"""Size of the cache of calls with their digests. Arguments may be whole files."""


class TurnDigest(Struct, frozen=True, gc=False):
    """Digests of a turn's thinking, text and calls; empty where it has none."""

    thinking: bytes = EMPTY_DIGEST
    text: bytes = EMPTY_DIGEST
    calls: bytes = EMPTY_DIGEST

    @property
    def combined(self) -> bytes:
        return _digest((self.thinking, self.text, self.calls))


def digest_turn(parts: Iterable[Part]) -> TurnDigest:
    thinking, text, calls = [], [], []
    for part in parts:
        match part:
            case Reasoning():
                thinking.append(part.text)
            case Text():
                text.append(part.text)
            case ToolCall():
                calls.append(_call_memo((part.namespace, part.name, part.kind, part.arguments)))
    return TurnDigest(_digest_text(thinking), _digest_text(text), _digest(calls) if calls else EMPTY_DIGEST)


def chain_digest(chain: bytes, turn: bytes) -> bytes:
    """Extends the digest of a sequence of turns by one turn."""
    return _digest((chain, turn))


def parse_arguments(arguments: str) -> Any:
    """Parses arguments as JSON; returns the text itself if it is no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _digest_text(pieces: Sequence[str]) -> bytes:
    joined = "".join(pieces).strip()
    return _digest((joined.encode("utf-8", "surrogatepass"),)) if joined else EMPTY_DIGEST


def _digest_call(call: tuple[str | None, str, str, str]) -> bytes:
    namespace, name, kind, arguments = call
    value = parse_arguments(arguments) if kind == "function" and arguments else arguments or {}
    try:
        canonical = json.dumps(_normalize_numbers(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:  # too deep to be compared by value
        canonical = arguments
    return _digest(text.encode("utf-8", "surrogatepass") for text in (namespace or "", name, canonical))


_call_memo = Memo(_digest_call, _CALL_CACHE_BYTES)


def _normalize_numbers(value: Any) -> Any:
    """Replaces whole floats by integers, so that a number has one spelling."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _normalize_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(inner) for inner in value]
    return value


def _digest(pieces: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()
