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

from polar.rendering.families.base import Family, FamilySigns, ParsedCall
from polar.rendering.families.event_builder import EventBuilder
from polar.rendering.families.json_text import OpenStringTracker
from polar.rendering.families.scanner import END_MARKER, FoundMarker, Piece, Scanner, Vocabulary, join_pieces
from polar.rendering.tokenizer import Tokenizer
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, Tool, ToolCallStart

_THINK_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
_NO_MARKERS = ("", "")  # no such markers: what is found is never empty


class MarkupFamily(Family):
    """A family by its markers. `think` is found in the template and the tokens."""

    name: ClassVar[str]
    call_markers: ClassVar[tuple[str, str]] = _NO_MARKERS
    """What opens and closes a call. Without a closing marker, a call ends at the next one or with the turn."""
    section_markers: ClassVar[tuple[str, str]] = _NO_MARKERS
    """What stands around all calls, if anything does."""
    inner_markers: ClassVar[Sequence[str]] = ()
    """Markers within a call."""
    calls_are_json: ClassVar[bool] = True
    """Calls hold JSON, whose strings may spell markers."""
    end_tokens: ClassVar[Sequence[str]] = ()
    """End tokens that other families don't have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        signs = FamilySigns(tokenizer)
        self.think_markers = next((pair for pair in _THINK_MARKERS if signs.has_marker(pair[0])), _NO_MARKERS)
        markers = (*self.think_markers, *self.call_markers, *self.section_markers, *self.inner_markers)
        self.vocabulary = Vocabulary(tokenizer, [marker for marker in markers if marker], self.end_tokens)

    @classmethod
    @abstractmethod
    def matches(cls, signs: FamilySigns) -> bool: ...

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        """The calls that stand between the markers; None if that isn't what stands there, or no calls are known."""
        return None

    def make_parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> "MarkupParser":
        return MarkupParser(self, prompt_end, tools or ())


class Generic(MarkupFamily):
    """Any other model: text, with a think block where the template or the tokens have one."""

    name = "generic"

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:  # noqa: ARG003
        return True


class MarkupParser:
    def __init__(self, family: MarkupFamily, prompt_end: str, tools: Sequence[Tool]) -> None:
        self.malformed = False
        self._family = family
        self._tools = tools
        self._scanner = Scanner(family.vocabulary)
        self._think, self._think_end = family.think_markers
        self._call_open, self._call_close = family.call_markers
        end = prompt_end.rstrip()
        self._in_reasoning = bool(self._think) and end.endswith(self._think)
        reasoned = bool(self._think) and end.endswith(self._think_end)
        self._parts = EventBuilder(ReasoningDelta if self._in_reasoning else TextDelta, self._in_reasoning or reasoned)
        self._body: list[Piece] | None = None  # of the call that is open
        self._marker: list[Piece] = []  # what opened it
        self._string = OpenStringTracker()
        self._checked_pieces = 0  # pieces of the body that `_string` has seen
        self._section_lead = ""  # what opened a section: formatting if a call follows, text otherwise
        self._in_section = False  # a call did follow
        self._aside: list[Piece] = []  # reasoning from where a call begins: the call itself if the reasoning never ends

    def feed(self, ids: Sequence[int]) -> list[ReplyEvent]:
        for piece in self._scanner.feed(ids):
            self._read_piece(piece)
        return self._parts.take_events()

    def finish(self) -> list[ReplyEvent]:
        for piece in self._scanner.flush():
            self._read_piece(piece)
        self._end_turn()
        return self._parts.finish()

    def _read_piece(self, piece: Piece) -> None:
        if not isinstance(piece, str):
            self._read_marker(piece)
        elif self._body is not None:
            self._body.append(piece)
        elif self._aside:
            self._aside.append(piece)
        else:
            self._add_text(piece)

    def _read_marker(self, mark: FoundMarker) -> None:
        if mark is END_MARKER:
            self._end_turn()
        elif self._body is not None:
            self._read_marker_in_call(self._body, mark)
        elif self._in_reasoning:
            self._read_marker_in_reasoning(mark)
        elif mark.text == self._think and (mark.is_token or (self._parts.is_empty and self._parts.is_first)):
            self._in_reasoning = True
            self._parts.begin(ReasoningDelta)
        elif self._tools and mark.text == self._call_open:
            self._open_call([mark])
        elif self._tools and mark.text == self._family.section_markers[0]:
            self._flush_section_lead()
            self._section_lead = mark.text
        elif self._in_section and mark.text == self._family.section_markers[1]:
            self._in_section = False
        else:
            self._add_text(mark.text)

    def _read_marker_in_reasoning(self, mark: FoundMarker) -> None:
        if mark.text == self._think_end:
            self._parts.add(join_pieces(self._aside))
            self._aside = []
            self._in_reasoning = False
            self._parts.begin(TextDelta)
        elif self._aside or (
            self._tools and mark.is_token and mark.text in (self._call_open, self._family.section_markers[0])
        ):
            self._aside.append(mark)
        else:
            self._parts.add(mark.text)

    def _read_marker_in_call(self, body: list[Piece], mark: FoundMarker) -> None:
        if mark.text != (self._call_close or self._call_open) or self._in_string(body):
            body.append(mark)
        elif self._call_close:
            self._close_call(body, [mark])
        else:
            self._close_call(body, [])
            self._open_call([mark])

    def _open_call(self, marker: list[Piece]) -> None:
        self._marker = marker
        self._body = []
        self._string = OpenStringTracker()
        self._checked_pieces = 0

    def _close_call(self, body: list[Piece], marker: list[Piece]) -> None:
        calls = self._family.parse_calls(body, self._tools)
        self._body = None
        if calls is None:
            self.malformed = True
            self._add_text(join_pieces([*self._marker, *body, *marker]))
            return
        if self._section_lead:
            self._section_lead, self._in_section = "", True
        for call in calls:
            self._parts.add_call(call)

    def _end_turn(self) -> None:
        """The turn ends here, whatever is open."""
        if self._aside:
            self._finish_inside_reasoning(self._aside)
        if self._body is not None and not self._call_close:
            self._close_call(self._body, [])
        elif self._body is not None:
            self.malformed = True
            text, self._body = join_pieces([*self._marker, *self._body]), None
            self._add_text(text)
        self._flush_section_lead()

    def _finish_inside_reasoning(self, held_pieces: list[Piece]) -> None:
        """The turn ends in reasoning that holds what may be a call."""
        self._aside = []
        parser = self._family.make_parser(prompt_end="", tools=self._tools)
        for piece in held_pieces:
            parser._read_piece(piece)
        events = parser.finish()
        if any(isinstance(event, ToolCallStart) for event in events):
            self._in_reasoning = False
            self.malformed |= parser.malformed
            self._parts.begin(TextDelta)
            self._parts.add_events(events)
        else:
            self._parts.add(join_pieces(held_pieces))

    def _add_text(self, text: str) -> None:
        """Text or reasoning, whichever it is now."""
        if self._section_lead:
            if text.isspace():
                self._section_lead += text
                return
            self._flush_section_lead()
        self._parts.add(text)

    def _flush_section_lead(self) -> None:
        """A section that no call follows."""
        if self._section_lead:
            self.malformed = True
            self._parts.add(self._section_lead)
            self._section_lead = ""

    def _in_string(self, body: list[Piece]) -> bool:
        if not self._family.calls_are_json:
            return False
        new, self._checked_pieces = join_pieces(body[self._checked_pieces :]), len(body)
        return self._string.feed(new)
