"""The parts of a reply, as events.

White space at the borders of parts is formatting: behind `<think>` and before `</think>`, between the reasoning, the
text and the calls. It is held back until it is known whether more of the part follows, so that no part begins or ends
with it there and none consists of it. Where the turn itself begins or ends within a text, its white space is content.
"""

from polar.rendering.families.base import Call
from polar.types import CallDelta, CallStart, Event, ReasoningDelta, TextDelta

_SPACE = " \t\r\n"


class Parts:
    def __init__(self, kind: type[TextDelta] | type[ReasoningDelta], after_border: bool) -> None:
        self._events: list[Event] = []
        self._new: list[str] = []  # of the part that is open, not yet an event
        self._space = ""
        self._kind = kind
        self._trim = after_border
        self.empty = True
        """Nothing of the open part has come yet."""
        self.first = True
        """No part has come before the open one."""

    def begin(self, kind: type[TextDelta] | type[ReasoningDelta]) -> None:
        """The open part ends and another begins."""
        self._make_event()
        self._kind = kind
        self._space = ""
        self._trim = self.empty = True
        self.first = False

    def add(self, text: str) -> None:
        """More of the open part."""
        content = text.rstrip(_SPACE)
        if not content:
            self._space += text
            return
        lead = self._space + content
        self._space = text[len(content) :]
        if self.empty:
            self.empty = False
            if self._trim:
                lead = lead.lstrip(_SPACE)
        self._new.append(lead)

    def call(self, call: Call) -> None:
        """The open part ends, and a call comes. What follows is text again."""
        self.begin(TextDelta)
        self._events += (CallStart("", call.name, written=call.id), CallDelta(call.arguments))

    def insert(self, events: list[Event]) -> None:
        """Events that were made elsewhere, where a part begins."""
        self._events += events

    def take(self) -> list[Event]:
        """The events since this was last asked."""
        self._make_event()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        if not self.empty:
            self._new.append(self._space)
        self._space = ""
        return self.take()

    def _make_event(self) -> None:
        if text := "".join(self._new):
            self._events.append(self._kind(text))
        self._new.clear()
