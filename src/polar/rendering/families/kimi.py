"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.

The number counts the calls of the conversation: the model writes the id that it will be shown again.
"""

import re
from collections.abc import Sequence

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.json_text import is_json
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces, split_at_marker
from polar.types import Tool

_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+):\d+\s*")


class Kimi(MarkupFamily):
    name = "kimi"
    call_markers = ("<|tool_call_begin|>", "<|tool_call_end|>")
    section_markers = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    inner_markers = ("<|tool_call_argument_begin|>",)

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("<|tool_call_argument_begin|>")

    def make_call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        head, *rest = split_at_marker(body, "<|tool_call_argument_begin|>")
        id = _ID.fullmatch(join_pieces(head))
        arguments = join_pieces(rest[0]).strip() if len(rest) == 1 else ""
        return [ParsedCall(id.group(1), arguments, join_pieces(head).strip())] if id and is_json(arguments) else None
