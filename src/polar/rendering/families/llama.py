"""Llama 3.x: JSON with a name and parameters, behind `<|python_tag|>` or as the whole turn.

Several calls are separated by `;`. Without the tag, a turn is a call if it begins as one, so JSON that an answer holds
further on stays text. Code behind the tag is no call of a function: it goes on as text, flagged.
"""

import json
import re
from collections.abc import Sequence

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.json_text import read_call
from polar.rendering.families.markup import MarkupFamily, MarkupParser
from polar.rendering.families.scanner import FoundMarker, Piece, join_pieces
from polar.types import Tool

_DECODER = json.JSONDecoder()
_SEPARATOR = re.compile(r"\s*(?:;\s*|\Z)")
_BEGINNINGS = ('{"name":"', '{"type":"function","name":"')  # white space left out
_MAX_BEGINNING_CHARACTERS = 100


class Llama(MarkupFamily):
    name = "llama"
    call_markers = ("<|python_tag|>", "")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return "<|python_tag|>" in signs.tokens and "parameters" in signs.template

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        text = join_pieces(body).strip()
        calls: list[ParsedCall] = []
        at = 0
        while at < len(text):
            try:
                _, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            call = read_call(text[at:end], "parameters") or read_call(text[at:end])
            separator = _SEPARATOR.match(text, end)
            if call is None or separator is None:
                return None
            calls.append(call)
            at = separator.end()
        return calls or None

    def make_parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> "LlamaParser":
        return LlamaParser(self, prompt_end, tools or ())


class LlamaParser(MarkupParser):
    """Text where the turn begins is held back until it is known whether it is the beginning of a call."""

    def __init__(self, family: Llama, prompt_end: str, tools: Sequence[Tool]) -> None:
        super().__init__(family, prompt_end, tools)
        self._undecided = bool(tools)
        self._beginning = ""

    def _add_text(self, text: str) -> None:
        if not self._undecided or self._in_reasoning or (not self._beginning and text.isspace()):
            super()._add_text(text)
            return
        self._beginning += text
        written = "".join(self._beginning.split())
        if any(written.startswith(beginning) for beginning in _BEGINNINGS):
            self._open_call([])
            self._body = [self._beginning]
            self._beginning, self._undecided = "", False
        elif len(self._beginning) > _MAX_BEGINNING_CHARACTERS or not any(
            beginning.startswith(written) for beginning in _BEGINNINGS
        ):
            self._decide_for_text()

    def _read_marker(self, mark: FoundMarker) -> None:
        if not self._in_reasoning:
            self._decide_for_text()
        super()._read_marker(mark)

    def _end_turn(self) -> None:
        self._decide_for_text()
        super()._end_turn()

    def _decide_for_text(self) -> None:
        text, self._beginning, self._undecided = self._beginning, "", False
        if text:
            super()._add_text(text)
