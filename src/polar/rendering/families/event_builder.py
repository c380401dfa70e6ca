"""The parts of a reply, as events.

White space at the borders of parts is formatting: behind `<think>` and before `</think>`, between the reasoning, the
text and the calls. It is held back until it is known whether more of the part follows, so that no part begins or ends
with it there and none consists of it. Where the turn itself begins or ends within a text, its white space is content.
"""

from polar.rendering.families.base import ParsedCall
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart

_SPACE = " \t\r\n"


class EventBuilder:
    def __init__(self, kind: type[TextDelta] | type[ReasoningDelta], after_border: bool) -> None:
        self._events: list[ReplyEvent] = []
        self._new: list[str] = []  # of the part that is open, not yet an event
        self._space = ""
        self._kind = kind
        self._trim = after_border
        self.is_empty = True
        """Nothing of the open part has come yet."""
        self.is_first = True
        """No part has come before the open one."""

    def begin(self, kind: type[TextDelta] | type[ReasoningDelta]) -> None:
        """The open part ends and another begins."""
        self._make_event()
        self._kind = kind
        self._space = ""
        self._trim = self.is_empty = True
        self.is_first = False

    def add(self, text: str) -> None:
        """More of the open part."""
        content = text.rstrip(_SPACE)
        if not content:
            self._space += text
            return
        lead = self._space + content
        self._space = text[len(content) :]
        if self.is_empty:
            self.is_empty = False
            if self._trim:
                lead = lead.lstrip(_SPACE)
        self._new.append(lead)

    def add_call(self, call: ParsedCall) -> None:
        """The open part ends, and a call comes. What follows is text again."""
        self.begin(TextDelta)
        self._events += (ToolCallStart("", call.name, written=call.id), ToolCallDelta(call.arguments))

    def add_events(self, events: list[ReplyEvent]) -> None:
        """Events that were made elsewhere, where a part begins."""
        self._events += events

    def take_events(self) -> list[ReplyEvent]:
        """The events since this was last asked."""
        self._make_event()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ReplyEvent]:
        if not self.is_empty:
            self._new.append(self._space)
        self._space = ""
        return self.take_events()

    def _make_event(self) -> None:
        if text := "".join(self._new):
            self._events.append(self._kind(text))
        self._new.clear()
