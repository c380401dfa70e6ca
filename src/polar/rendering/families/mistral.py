"""Mistral: `[TOOL_CALLS]` and a JSON list of calls; later models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from collections.abc import Sequence

from polar.rendering.families.base import Call, Signs
from polar.rendering.families.json_text import is_json, read_calls
from polar.rendering.families.markup import Markup
from polar.rendering.families.scanner import Piece, cut, spelled
from polar.types import Tool


class Mistral(Markup):
    name = "mistral"
    call = ("[TOOL_CALLS]", "")
    inner = ("[CALL_ID]", "[ARGS]")

    @classmethod
    def fits(cls, signs: Signs) -> bool:
        return signs.show("[TOOL_CALLS]")

    def call_id(self, name: str, number: int) -> str:  # noqa: ARG002
        return f"call{number:05}"  # nine letters and digits: the templates take no other ids

    def read(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[Call] | None:  # noqa: ARG002
        if calls := read_calls(spelled(body)):
            return calls
        head, *rest = cut(body, "[ARGS]")
        name, *ids = (spelled(piece).strip() for piece in cut(head, "[CALL_ID]"))
        arguments = spelled(rest[0]).strip() if len(rest) == 1 else ""
        return [Call(name, arguments, ids[0] if ids else None)] if name and is_json(arguments) else None
