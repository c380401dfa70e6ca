"""Reads the model's raw output as vLLM does with a `<think>` reasoning parser and the Hermes tool parser.

Works on text as it grows, and gives out each character as soon as it is known what it belongs to. White space is kept
where the model wrote it. A call's name comes first, then its arguments as written, whether or not they are JSON. Text
between and after calls is dropped, as it is there.
"""

import re
from collections.abc import Callable

from polar.types import CallDelta, CallStart, Event, ReasoningDelta, TextDelta

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(
    r"\s*(?:\}\s*)?\Z"
)  # the brace that closes the call, not the arguments; at the end of what came so far
_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


def _held(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at the text's end may be the beginning of one of the tags."""
    at = text.rfind("<")  # the only one in a tag, and its first character
    return len(text) - at if at >= 0 and any(tag.startswith(text[at:]) for tag in tags) else 0


class OutputParser:
    """Events of one reply. `reasoning` says that the prompt ended in an open `<think>`, `tools` that calls are looked
    for: without tools in the request their markup is text like any other."""

    def __init__(self, reasoning: bool = False, tools: bool = True) -> None:
        self._tags = (_THINK, _CALL) if tools else (_THINK,)
        self._part: Callable[[list[Event]], bool] = self._reasoning if reasoning else self._text
        self._rest = ""
        self._fresh = False  # a call's arguments have not begun
        self.calls = 0

    @property
    def reasons(self) -> bool:
        return self._part == self._reasoning

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        events: list[Event] = []
        while self._part(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What was held back, given that nothing more comes."""
        rest, self._rest = self._rest, ""
        if self._part == self._call_head:
            return [TextDelta(_CALL + rest)]
        if not rest or (self._part == self._text and self.calls):
            return []
        if self._part == self._reasoning:
            return [ReasoningDelta(rest)]
        return [CallDelta(rest) if self._part == self._arguments else TextDelta(rest)]

    # Each part reads from `_rest` what it can, and says whether the next part may go on from there.

    def _text(self, events: list[Event]) -> bool:
        at = min((found for found in map(self._rest.find, self._tags) if found >= 0), default=-1)
        if at < 0:
            self._give(events, TextDelta, len(self._rest) - _held(self._rest, self._tags))
            return False
        self._give(events, TextDelta, at)
        if self._rest.startswith(_THINK):
            self._rest = self._rest[len(_THINK) :]
            self._part = self._reasoning
        else:
            self._rest = self._rest[len(_CALL) :]
            self._part = self._call_head
        return True

    def _reasoning(self, events: list[Event]) -> bool:
        at = self._rest.find(_THINK_END)
        if at < 0:
            self._give(events, ReasoningDelta, len(self._rest) - _held(self._rest, (_THINK_END,)))
            return False
        self._give(events, ReasoningDelta, at)
        self._rest = self._rest[len(_THINK_END) :]
        self._part = self._text
        return True

    def _call_head(self, events: list[Event]) -> bool:
        head = _HEAD.match(self._rest)
        if head is not None:
            events.append(CallStart("", head.group(1)))
            self.calls += 1
            self._fresh = True
            self._rest = self._rest[head.end() :]
            self._part = self._arguments
            return True
        at = self._rest.find(_CALL_END)
        if at < 0:
            return False
        at += len(_CALL_END)
        events.append(TextDelta(_CALL + self._rest[:at]))  # no call at all: handed on as text
        self._rest = self._rest[at:]
        self._part = self._text
        return True

    def _arguments(self, events: list[Event]) -> bool:
        if self._fresh:
            self._rest = self._rest.lstrip()  # between the colon and the value
            self._fresh = not self._rest
        at = self._rest.find(_CALL_END)
        written = self._rest[:at] if at >= 0 else self._rest[: len(self._rest) - _held(self._rest, (_CALL_END,))]
        tail = _TAIL.search(written)
        self._give(events, CallDelta, tail.start() if tail else len(written))
        if at < 0:
            return False
        self._rest = self._rest[self._rest.index(_CALL_END) + len(_CALL_END) :]
        self._part = self._text
        return True

    def _give(
        self, events: list[Event], kind: type[TextDelta] | type[ReasoningDelta] | type[CallDelta], end: int
    ) -> None:
        if end > 0:
            if kind is not TextDelta or not self.calls:
                events.append(kind(self._rest[:end]))
            self._rest = self._rest[end:]
