"""gpt-oss: a turn is a row of messages, each with a header that says its channel and whom it is for.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

The analysis channel is reasoning; the others are text; a message for a function is a call of it. A message for anyone
else (a tool that is built into a service) can't be handed on as a call: it is text, flagged. `<|call|>` ends the turn,
and an engine may keep the token that stopped it to itself: so the end of the turn closes a call, if its JSON is whole.
"""

import re
from collections.abc import Sequence

from polar.rendering.families.base import Call, Family, Signs
from polar.rendering.families.json_text import is_json
from polar.rendering.families.parts import Parts
from polar.rendering.families.scanner import END, Mark, Piece, Scanner, Vocabulary, cut, spelled
from polar.rendering.tokenizer import Tokenizer
from polar.types import Event, ReasoningDelta, TextDelta, Tool

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END)
_MARKER = re.compile("(" + "|".join(map(re.escape, _MARKERS)) + ")")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_FUNCTION = re.compile(r"functions\.(\S+)")


class Harmony(Family):
    name = "harmony"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = Vocabulary(tokenizer, _MARKERS, ends=("<|return|>", "<|call|>"))

    @classmethod
    def fits(cls, signs: Signs) -> bool:
        return all(marker in signs.tokens for marker in (_CHANNEL, _MESSAGE, "<|call|>"))

    def parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> "HarmonyParser":
        return HarmonyParser(self, prompt_end, tools or ())


class HarmonyParser:
    """A header is open, or a call, whose header and body are held; or else text or reasoning is given out."""

    def __init__(self, family: Harmony, prompt_end: str, tools: Sequence[Tool]) -> None:
        self.malformed = False
        self._tools = tools
        self._scanner = Scanner(family.vocabulary)
        self._parts = Parts(TextDelta, after_border=False)
        self._header: list[Piece] | None = []
        self._held: list[Piece] = []  # all of a header and a call that the model wrote itself
        self._body: list[Piece] | None = None
        self._function = ""
        _, _, header = prompt_end.rpartition(_START)
        for text in filter(None, _MARKER.split(header)):
            self._take(Mark(text) if text in _MARKERS else text)
        self._held.clear()

    def feed(self, ids: Sequence[int]) -> list[Event]:
        for piece in self._scanner.feed(ids):
            self._take(piece)
        return self._parts.take()

    def finish(self) -> list[Event]:
        for piece in self._scanner.flush():
            self._take(piece)
        self._take(END)
        return self._parts.finish()

    def _take(self, piece: Piece) -> None:
        mark = piece.text if isinstance(piece, Mark) else None
        if piece is END:
            self._close(whole=True)
        elif mark == _START:
            self._close(whole=False)
            self._parts.begin(TextDelta)
            self._header, self._held = [], [piece]
        elif mark == _END and self._header is None:
            if self._body is not None:
                self._held.append(piece)
            self._close(whole=False)
            self._parts.begin(TextDelta)
        elif self._body is not None:
            self._body.append(piece)
            self._held.append(piece)
        elif self._header is not None:
            self._held.append(piece)
            if mark == _MESSAGE:
                self._open(self._header)
            else:
                self._header.append(piece)
        else:
            self._parts.add(spelled([piece]))

    def _open(self, header: list[Piece]) -> None:
        """The header is whole: a message begins."""
        self._header = None
        role, *rest = cut(header, _CHANNEL)
        channel = spelled(cut(rest[0], _CONSTRAIN)[0]) if rest else ""
        recipient = _RECIPIENT.search(f"{spelled(role)} {channel}")
        if recipient and self._tools:
            function = _FUNCTION.fullmatch(recipient.group(1))
            self._function = function.group(1) if function else ""
            self._body = []
        else:
            self._held.clear()
            self._parts.begin(ReasoningDelta if channel.split()[:1] == ["analysis"] else TextDelta)

    def _close(self, whole: bool) -> None:
        """What is held is a call now, if it is one and its message was `whole`; text otherwise."""
        body, header = self._body, self._header
        self._body = self._header = None
        held, self._held = spelled(self._held), []
        if body is not None:
            arguments = spelled(body).strip()
            if whole and self._function and is_json(arguments):
                self._parts.call(Call(self._function, arguments))
                return
            self.malformed = True
        elif header is not None and self._tools and _RECIPIENT.search(spelled(header)):
            self.malformed = True
        self._parts.add(held)
