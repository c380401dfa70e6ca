"""What harnesses make of a model's turn when they send it back."""

import json
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from polar.types import Message, Part, Reasoning, Text, ToolCall

Echo = Callable[[Message], Message]


def _parts(change: Callable[[Part], Part | None]) -> Echo:
    def echo(turn: Message) -> Message:
        return replace(turn, parts=[new for part in turn.parts if (new := change(part)) is not None])

    return echo


def _respelled(part: Part) -> Part:
    """Keys in another order, other white space, 1.0 as 1."""
    if not isinstance(part, ToolCall):
        return part
    value = json.loads(part.arguments or "{}")
    turned = {key: int(inner) if _whole(inner) else inner for key, inner in reversed(value.items())}
    return replace(part, arguments=json.dumps(turned, separators=(",", ":")))


def _whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**53


def _trimmed(part: Part) -> Part:
    return replace(part, text=f"\n{part.text.strip()}  ") if isinstance(part, Text | Reasoning) else part


def _anonymous(part: Part) -> Part:
    """The harness's own ids, or none."""
    if isinstance(part, ToolCall):
        return replace(part, id=f"own_{hash(part.id) % 1000}", seal=None)
    return replace(part, seal=None) if isinstance(part, Reasoning) else part


def _halved(turn: Message) -> Message:
    parts: list[Part] = []
    for part in turn.parts:
        if isinstance(part, Text) and (cut := part.text[: len(part.text) // 2].rstrip()) and part.text[len(cut)] != " ":
            parts += [Text(cut), Text(part.text[len(cut) :])]
        else:
            parts.append(part)
    return replace(turn, parts=parts)


SAME: dict[str, Echo] = {
    "whole": lambda turn: turn,
    "respelled": _parts(_respelled),
    "trimmed": _parts(_trimmed),
    "halved": _halved,
    "anonymous": _parts(_anonymous),
}
"""None of these changes what was said."""

CHANGED: dict[str, Echo] = {
    "thinking_dropped_by_harness": _parts(lambda part: None if isinstance(part, Reasoning) else part),
    "thinking_changed": _parts(lambda part: replace(part, text="No.") if isinstance(part, Reasoning) else part),
    "text_changed": _parts(lambda part: replace(part, text=part.text + "!") if isinstance(part, Text) else part),
    "calls_changed": _parts(
        lambda part: replace(part, arguments='{"text": "rm"}') if isinstance(part, ToolCall) else part
    ),
}
"""By the reason that the next prompt must give, if the turn has such a part."""
