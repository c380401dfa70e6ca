"""Mistral: `[TOOL_CALLS]` and a JSON list of calls; later models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from collections.abc import Sequence

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.json_text import is_json, read_calls
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces, split_at_marker
from polar.types import Tool


class Mistral(MarkupFamily):
    name = "mistral"
    call_markers = ("[TOOL_CALLS]", "")
    inner_markers = ("[CALL_ID]", "[ARGS]")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("[TOOL_CALLS]")

    def make_call_id(self, name: str, number: int) -> str:  # noqa: ARG002
        return f"call{number:05}"  # nine letters and digits: the templates take no other ids

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        if calls := read_calls(join_pieces(body)):
            return calls
        head, *rest = split_at_marker(body, "[ARGS]")
        name, *ids = (join_pieces(piece).strip() for piece in split_at_marker(head, "[CALL_ID]"))
        arguments = join_pieces(rest[0]).strip() if len(rest) == 1 else ""
        return [ParsedCall(name, arguments, ids[0] if ids else None)] if name and is_json(arguments) else None
