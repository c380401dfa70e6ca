"""Reads the model's raw output as vLLM does with a `<think>` reasoning parser and the Hermes tool parser.

Works on text as it grows, and gives out each character as soon as it is known what it belongs to. White space is kept
where the model wrote it. A call's name comes first, then its arguments as written, whether or not they are JSON. Text
between and after calls is dropped, as it is there.
"""

import re
from collections.abc import Callable

from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart

_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*')
_CALL_TAIL = re.compile(
    r"\s*(?:\}\s*)?\Z"
)  # the brace that closes the call, not the arguments; at the end of what came so far
_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


def _count_held_characters(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at the text's end may be the beginning of one of the tags."""
    at = text.rfind("<")  # the only one in a tag, and its first character
    return len(text) - at if at >= 0 and any(tag.startswith(text[at:]) for tag in tags) else 0


class OutputParser:
    """Events of one reply. `starts_in_reasoning`: the prompt ended in an open `<think>`. `tools`: the request has
    tools; without any, their markup is text like any other."""

    def __init__(self, starts_in_reasoning: bool = False, tools: bool = True) -> None:
        self._tags = (_THINK, _CALL) if tools else (_THINK,)
        self._part: Callable[[list[ReplyEvent]], bool] = (
            self._parse_reasoning if starts_in_reasoning else self._parse_text
        )
        self._pending_text = ""
        self._arguments_pending = False  # a call's arguments have not begun
        self.calls = 0

    @property
    def is_reasoning(self) -> bool:
        return self._part == self._parse_reasoning

    def feed(self, text: str) -> list[ReplyEvent]:
        self._pending_text += text
        events: list[ReplyEvent] = []
        while self._part(events):
            pass
        return events

    def finish(self) -> list[ReplyEvent]:
        """What was held back, given that nothing more comes."""
        rest, self._pending_text = self._pending_text, ""
        if self._part == self._call_head:
            return [TextDelta(_CALL + rest)]
        if not rest or (self._part == self._parse_text and self.calls):
            return []
        if self._part == self._parse_reasoning:
            return [ReasoningDelta(rest)]
        return [ToolCallDelta(rest) if self._part == self._parse_arguments else TextDelta(rest)]

    # Each part reads what it can from `_pending_text`, and returns whether the next part may go on from there.

    def _parse_text(self, events: list[ReplyEvent]) -> bool:
        at = min((found for found in map(self._pending_text.find, self._tags) if found >= 0), default=-1)
        if at < 0:
            self._emit(
                events, TextDelta, len(self._pending_text) - _count_held_characters(self._pending_text, self._tags)
            )
            return False
        self._emit(events, TextDelta, at)
        if self._pending_text.startswith(_THINK):
            self._pending_text = self._pending_text[len(_THINK) :]
            self._part = self._parse_reasoning
        else:
            self._pending_text = self._pending_text[len(_CALL) :]
            self._part = self._call_head
        return True

    def _parse_reasoning(self, events: list[ReplyEvent]) -> bool:
        at = self._pending_text.find(_THINK_END)
        if at < 0:
            self._emit(
                events,
                ReasoningDelta,
                len(self._pending_text) - _count_held_characters(self._pending_text, (_THINK_END,)),
            )
            return False
        self._emit(events, ReasoningDelta, at)
        self._pending_text = self._pending_text[len(_THINK_END) :]
        self._part = self._parse_text
        return True

    def _call_head(self, events: list[ReplyEvent]) -> bool:
        head = _CALL_HEAD.match(self._pending_text)
        if head is not None:
            events.append(ToolCallStart("", head.group(1)))
            self.calls += 1
            self._arguments_pending = True
            self._pending_text = self._pending_text[head.end() :]
            self._part = self._parse_arguments
            return True
        at = self._pending_text.find(_CALL_END)
        if at < 0:
            return False
        at += len(_CALL_END)
        events.append(TextDelta(_CALL + self._pending_text[:at]))  # no call at all: handed on as text
        self._pending_text = self._pending_text[at:]
        self._part = self._parse_text
        return True

    def _parse_arguments(self, events: list[ReplyEvent]) -> bool:
        if self._arguments_pending:
            self._pending_text = self._pending_text.lstrip()  # between the colon and the value
            self._arguments_pending = not self._pending_text
        at = self._pending_text.find(_CALL_END)
        written = (
            self._pending_text[:at]
            if at >= 0
            else self._pending_text[
                : len(self._pending_text) - _count_held_characters(self._pending_text, (_CALL_END,))
            ]
        )
        tail = _CALL_TAIL.search(written)
        self._emit(events, ToolCallDelta, tail.start() if tail else len(written))
        if at < 0:
            return False
        self._pending_text = self._pending_text[self._pending_text.index(_CALL_END) + len(_CALL_END) :]
        self._part = self._parse_text
        return True

    def _emit(
        self, events: list[ReplyEvent], kind: type[TextDelta] | type[ReasoningDelta] | type[ToolCallDelta], end: int
    ) -> None:
        if end > 0:
            if kind is not TextDelta or not self.calls:
                events.append(kind(self._pending_text[:end]))
            self._pending_text = self._pending_text[end:]
