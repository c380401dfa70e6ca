"""Families whose replies are text with marked places: a think block, and calls between markers.

A family of this kind is a table (its markers) and one function (what stands between a call's markers). The parser
holds a call back until it is whole, so that nothing has to be taken back: a call that is cut short or does not parse
becomes text, its markers included.

Decisions: what stands before the closing marker of the reasoning is reasoning, a call in it is a thought about calls.
Reasoning that is never closed is all reasoning, unless the model went on to a call without closing it, as some do: then
it ends where that call begins. A think marker that is no token of its own counts only where the turn begins, since
prose may spell it. A marker in a JSON string is a part of that string.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from polar.rendering.families.base import Call, Family, Signs
from polar.rendering.families.json_text import OpenString
from polar.rendering.families.parts import Parts
from polar.rendering.families.scanner import END, Mark, Piece, Scanner, Vocabulary, spelled
from polar.rendering.tokenizer import Tokenizer
from polar.types import CallStart, Event, ReasoningDelta, TextDelta, Tool

_THINK_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
_NONE = ("", "")  # no such markers: what is found is never empty


class Markup(Family):
    """A family by its markers. `think` is found in the template and the tokens."""

    name: ClassVar[str]
    call: ClassVar[tuple[str, str]] = _NONE
    """What opens and closes a call. Without a closing marker, a call ends at the next one or with the turn."""
    section: ClassVar[tuple[str, str]] = _NONE
    """What stands around all calls, if anything does."""
    inner: ClassVar[Sequence[str]] = ()
    """Markers within a call."""
    json: ClassVar[bool] = True
    """Calls hold JSON, whose strings may spell markers."""
    ends: ClassVar[Sequence[str]] = ()
    """End tokens that other families don't have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        signs = Signs(tokenizer)
        self.think = next((pair for pair in _THINK_MARKERS if signs.show(pair[0])), _NONE)
        markers = (*self.think, *self.call, *self.section, *self.inner)
        self.vocabulary = Vocabulary(tokenizer, [marker for marker in markers if marker], self.ends)

    @classmethod
    @abstractmethod
    def fits(cls, signs: Signs) -> bool: ...

    def read(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[Call] | None:  # noqa: ARG002
        """The calls that stand between the markers; None if that isn't what stands there, or no calls are known."""
        return None

    def parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> "MarkupParser":
        return MarkupParser(self, prompt_end, tools or ())


class MarkupParser:
    def __init__(self, family: Markup, prompt_end: str, tools: Sequence[Tool]) -> None:
        self.malformed = False
        self._family = family
        self._tools = tools
        self._scanner = Scanner(family.vocabulary)
        self._think, self._think_end = family.think
        self._open, self._close = family.call
        end = prompt_end.rstrip()
        self._reasons = bool(self._think) and end.endswith(self._think)
        reasoned = bool(self._think) and end.endswith(self._think_end)
        self._parts = Parts(ReasoningDelta if self._reasons else TextDelta, self._reasons or reasoned)
        self._body: list[Piece] | None = None  # of the call that is open
        self._marker: list[Piece] = []  # what opened it
        self._string = OpenString()
        self._asked = 0  # pieces of the body that `_string` has seen
        self._lead = ""  # what opened a section: formatting if a call follows, text otherwise
        self._in_section = False  # a call did follow
        self._aside: list[Piece] = []  # reasoning from where a call begins: the call itself if the reasoning never ends

    def feed(self, ids: Sequence[int]) -> list[Event]:
        for piece in self._scanner.feed(ids):
            self._take(piece)
        return self._parts.take()

    def finish(self) -> list[Event]:
        for piece in self._scanner.flush():
            self._take(piece)
        self._end()
        return self._parts.finish()

    def _take(self, piece: Piece) -> None:
        if not isinstance(piece, str):
            self._mark(piece)
        elif self._body is not None:
            self._body.append(piece)
        elif self._aside:
            self._aside.append(piece)
        else:
            self._text(piece)

    def _mark(self, mark: Mark) -> None:
        if mark is END:
            self._end()
        elif self._body is not None:
            self._mark_in_call(self._body, mark)
        elif self._reasons:
            self._mark_in_reasoning(mark)
        elif mark.text == self._think and (mark.token or (self._parts.empty and self._parts.first)):
            self._reasons = True
            self._parts.begin(ReasoningDelta)
        elif self._tools and mark.text == self._open:
            self._open_call([mark])
        elif self._tools and mark.text == self._family.section[0]:
            self._show_lead()
            self._lead = mark.text
        elif self._in_section and mark.text == self._family.section[1]:
            self._in_section = False
        else:
            self._text(mark.text)

    def _mark_in_reasoning(self, mark: Mark) -> None:
        if mark.text == self._think_end:
            self._parts.add(spelled(self._aside))
            self._aside = []
            self._reasons = False
            self._parts.begin(TextDelta)
        elif self._aside or (self._tools and mark.token and mark.text in (self._open, self._family.section[0])):
            self._aside.append(mark)
        else:
            self._parts.add(mark.text)

    def _mark_in_call(self, body: list[Piece], mark: Mark) -> None:
        if mark.text != (self._close or self._open) or self._in_string(body):
            body.append(mark)
        elif self._close:
            self._close_call(body, [mark])
        else:
            self._close_call(body, [])
            self._open_call([mark])

    def _open_call(self, marker: list[Piece]) -> None:
        self._marker = marker
        self._body = []
        self._string = OpenString()
        self._asked = 0

    def _close_call(self, body: list[Piece], marker: list[Piece]) -> None:
        calls = self._family.read(body, self._tools)
        self._body = None
        if calls is None:
            self.malformed = True
            self._text(spelled([*self._marker, *body, *marker]))
            return
        if self._lead:
            self._lead, self._in_section = "", True
        for call in calls:
            self._parts.call(call)

    def _end(self) -> None:
        """The turn ends here, whatever is open."""
        if self._aside:
            self._end_reasoning(self._aside)
        if self._body is not None and not self._close:
            self._close_call(self._body, [])
        elif self._body is not None:
            self.malformed = True
            text, self._body = spelled([*self._marker, *self._body]), None
            self._text(text)
        self._show_lead()

    def _end_reasoning(self, aside: list[Piece]) -> None:
        """The turn ends in reasoning that holds what may be a call."""
        self._aside = []
        parser = self._family.parser(prompt_end="", tools=self._tools)
        for piece in aside:
            parser._take(piece)
        events = parser.finish()
        if any(isinstance(event, CallStart) for event in events):
            self._reasons = False
            self.malformed |= parser.malformed
            self._parts.begin(TextDelta)
            self._parts.insert(events)
        else:
            self._parts.add(spelled(aside))

    def _text(self, text: str) -> None:
        """Text or reasoning, whichever it is now."""
        if self._lead:
            if text.isspace():
                self._lead += text
                return
            self._show_lead()
        self._parts.add(text)

    def _show_lead(self) -> None:
        """A section that no call follows."""
        if self._lead:
            self.malformed = True
            self._parts.add(self._lead)
            self._lead = ""

    def _in_string(self, body: list[Piece]) -> bool:
        if not self._family.json:
            return False
        new, self._asked = spelled(body[self._asked :]), len(body)
        return self._string.after(new)
