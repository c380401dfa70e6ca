"""GLM 4.5 and later: the function's name, then keys and values in elements of their own.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

Later models leave the line breaks out.
"""

from collections.abc import Sequence

from polar.rendering.families.arguments import find_tool, to_json
from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces, split_at_marker
from polar.types import Tool


class Glm(MarkupFamily):
    name = "glm"
    call_markers = ("<tool_call>", "</tool_call>")
    inner_markers = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    calls_are_json = False
    end_tokens = ("<|user|>", "<|observation|>")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("<arg_key>")

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:
        head, *members = split_at_marker(body, "<arg_key>")
        name = join_pieces(head).strip()
        written = [_parse_member(member) for member in members]
        if not name or "\n" in name or not all(written):
            return None
        return [ParsedCall(name, to_json([member for member in written if member], find_tool(tools, name)))]


def _parse_member(pieces: Sequence[Piece]) -> tuple[str, str] | None:
    key, *rest = split_at_marker(pieces, "</arg_key>")
    if len(rest) != 1:
        return None
    between, *rest = split_at_marker(rest[0], "<arg_value>")
    if len(rest) != 1 or join_pieces(between).strip():
        return None
    value, *rest = split_at_marker(rest[0], "</arg_value>")
    if len(rest) != 1 or join_pieces(rest[0]).strip():
        return None
    return join_pieces(key), join_pieces(value)
