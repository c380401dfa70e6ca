"""Ids that the gateway issues.

Every id that a harness may echo (tool calls, messages, items, signatures) carries the exchange's id, so that an echoed
turn names the exchange it came from. Exchange ids sort by time of creation.
"""

import re
import secrets
import time

_EXCHANGE_ID = re.compile(r"x[0-9a-z]{24}")
_CALL_ID = re.compile(r"x[0-9a-z]{24}_\d+")


def _get_milliseconds() -> int:
    return time.time_ns() // 1_000_000


def new_exchange_id() -> str:
    """An x, then 48 bits of milliseconds and 48 random ones in hexadecimal: 25 characters."""
    return f"x{_get_milliseconds():012x}{secrets.token_hex(6)}"


def new_session_id() -> str:
    return f"s{_get_milliseconds():012x}{secrets.token_hex(4)}"


def new_session_key() -> str:
    """A session's key: random, and unrelated to the session's id. The prefix keeps harnesses content that check it."""
    return "sk-polar-" + secrets.token_urlsafe(24)


def make_call_id(exchange_id: str, index: int) -> str:
    """The id of an exchange's tool call number `index`, before the dialect's prefix."""
    return f"{exchange_id}_{index}"


def make_seal(exchange_id: str, index: int) -> str:
    """The opaque string that goes out with reasoning number `index` (a signature, encrypted content)."""
    return f"polar.{exchange_id}.{index}"


def find_call_id(issued: str) -> str | None:
    """The tool call that an echoed id names, without the dialect's prefix; None if it isn't one of ours."""
    match = _CALL_ID.search(issued)
    return match.group() if match else None


def find_exchange_id(issued: str | None) -> str | None:
    """The exchange that an echoed id or seal names, or None if it isn't one of ours."""
    match = _EXCHANGE_ID.search(issued) if issued else None
    return match.group() if match else None
