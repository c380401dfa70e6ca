"""gpt-oss: a turn is a row of messages, each with a header that says its channel and whom it is for.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

The analysis channel is reasoning; the others are text; a message for a function is a call of it. A message for anyone
else (a tool that is built into a service) can't be handed on as a call: it is text, flagged. `<|call|>` ends the turn,
and an engine may keep the token that stopped it to itself: so the end of the turn closes a call, if its JSON is whole.
"""

import re
from collections.abc import Sequence

from polar.rendering.families.base import Family, FamilySigns, ParsedCall
from polar.rendering.families.event_builder import EventBuilder
from polar.rendering.families.json_text import is_json
from polar.rendering.families.scanner import (
    END_MARKER,
    FoundMarker,
    Piece,
    Scanner,
    Vocabulary,
    join_pieces,
    split_at_marker,
)
from polar.rendering.tokenizer import Tokenizer
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, Tool

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END)
_MARKER = re.compile("(" + "|".join(map(re.escape, _MARKERS)) + ")")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_FUNCTION = re.compile(r"functions\.(\S+)")


class Harmony(Family):
    name = "harmony"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = Vocabulary(tokenizer, _MARKERS, end_tokens=("<|return|>", "<|call|>"))

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return all(marker in signs.tokens for marker in (_CHANNEL, _MESSAGE, "<|call|>"))

    def make_parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> "HarmonyParser":
        return HarmonyParser(self, prompt_end, tools or ())


class HarmonyParser:
    """A header is open, or a call, whose header and body are held; or else text or reasoning is given out."""

    def __init__(self, family: Harmony, prompt_end: str, tools: Sequence[Tool]) -> None:
        self.malformed = False
        self._tools = tools
        self._scanner = Scanner(family.vocabulary)
        self._parts = EventBuilder(TextDelta, after_border=False)
        self._header: list[Piece] | None = []
        self._held: list[Piece] = []  # all of a header and a call that the model wrote itself
        self._body: list[Piece] | None = None
        self._function = ""
        _, _, header = prompt_end.rpartition(_START)
        for text in filter(None, _MARKER.split(header)):
            self._read_piece(FoundMarker(text) if text in _MARKERS else text)
        self._held.clear()

    def feed(self, ids: Sequence[int]) -> list[ReplyEvent]:
        for piece in self._scanner.feed(ids):
            self._read_piece(piece)
        return self._parts.take_events()

    def finish(self) -> list[ReplyEvent]:
        for piece in self._scanner.flush():
            self._read_piece(piece)
        self._read_piece(END_MARKER)
        return self._parts.finish()

    def _read_piece(self, piece: Piece) -> None:
        mark = piece.text if isinstance(piece, FoundMarker) else None
        if piece is END_MARKER:
            self._close_message(whole=True)
        elif mark == _START:
            self._close_message(whole=False)
            self._parts.begin(TextDelta)
            self._header, self._held = [], [piece]
        elif mark == _END and self._header is None:
            if self._body is not None:
                self._held.append(piece)
            self._close_message(whole=False)
            self._parts.begin(TextDelta)
        elif self._body is not None:
            self._body.append(piece)
            self._held.append(piece)
        elif self._header is not None:
            self._held.append(piece)
            if mark == _MESSAGE:
                self._open_message(self._header)
            else:
                self._header.append(piece)
        else:
            self._parts.add(join_pieces([piece]))

    def _open_message(self, header: list[Piece]) -> None:
        """The header is whole: a message begins."""
        self._header = None
        role, *rest = split_at_marker(header, _CHANNEL)
        channel = join_pieces(split_at_marker(rest[0], _CONSTRAIN)[0]) if rest else ""
        recipient = _RECIPIENT.search(f"{join_pieces(role)} {channel}")
        if recipient and self._tools:
            function = _FUNCTION.fullmatch(recipient.group(1))
            self._function = function.group(1) if function else ""
            self._body = []
        else:
            self._held.clear()
            self._parts.begin(ReasoningDelta if channel.split()[:1] == ["analysis"] else TextDelta)

    def _close_message(self, whole: bool) -> None:
        """What is held is a call now, if it is one and its message was `whole`; text otherwise."""
        body, header = self._body, self._header
        self._body = self._header = None
        held, self._held = join_pieces(self._held), []
        if body is not None:
            arguments = join_pieces(body).strip()
            if whole and self._function and is_json(arguments):
                self._parts.add_call(ParsedCall(self._function, arguments))
                return
            self.malformed = True
        elif header is not None and self._tools and _RECIPIENT.search(join_pieces(header)):
            self.malformed = True
        self._parts.add(held)
