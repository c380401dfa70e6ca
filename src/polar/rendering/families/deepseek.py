"""DeepSeek V3, R1 and V3.1: calls in a section, each between markers.

V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fenced block of JSON; V3.1 writes
`name<｜tool▁sep｜>{...}`.
"""

from collections.abc import Sequence

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.json_text import is_json
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces, split_at_marker
from polar.types import Tool


class DeepSeek(MarkupFamily):
    name = "deepseek"
    call_markers = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    section_markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner_markers = ("<｜tool▁sep｜>",)

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("<｜tool▁sep｜>")

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        head, *rest = split_at_marker(body, "<｜tool▁sep｜>")
        if len(rest) != 1:
            return None
        name, arguments = join_pieces(head).strip(), join_pieces(rest[0]).strip()
        if name == "function" and arguments.endswith("```"):
            name, _, arguments = arguments.removesuffix("```").partition("```json")
            name, arguments = name.strip(), arguments.strip()
        return [ParsedCall(name, arguments)] if name and is_json(arguments) else None
