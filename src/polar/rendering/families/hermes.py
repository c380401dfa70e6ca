"""Hermes, Qwen2.5, Qwen3 and SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Sequence

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.json_text import read_call
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces
from polar.types import Tool


class Hermes(MarkupFamily):
    name = "hermes"
    call_markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return "<tool_call>" in signs.template

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        call = read_call(join_pieces(body))
        return None if call is None else [call]
