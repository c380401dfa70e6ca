"""GLM 4.5 and later: the function's name, then keys and values in elements of their own.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

Later models leave the line breaks out.
"""

from collections.abc import Sequence

from polar.rendering.families.arguments import find_tool, to_json
from polar.rendering.families.base import Call, Signs
from polar.rendering.families.markup import Markup
from polar.rendering.families.scanner import Piece, cut, spelled
from polar.types import Tool


class Glm(Markup):
    name = "glm"
    call = ("<tool_call>", "</tool_call>")
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    json = False
    ends = ("<|user|>", "<|observation|>")

    @classmethod
    def fits(cls, signs: Signs) -> bool:
        return signs.show("<arg_key>")

    def read(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[Call] | None:
        head, *members = cut(body, "<arg_key>")
        name = spelled(head).strip()
        written = [_member(member) for member in members]
        if not name or "\n" in name or not all(written):
            return None
        return [Call(name, to_json([member for member in written if member], find_tool(tools, name)))]


def _member(pieces: Sequence[Piece]) -> tuple[str, str] | None:
    key, *rest = cut(pieces, "</arg_key>")
    if len(rest) != 1:
        return None
    between, *rest = cut(rest[0], "<arg_value>")
    if len(rest) != 1 or spelled(between).strip():
        return None
    value, *rest = cut(rest[0], "</arg_value>")
    if len(rest) != 1 or spelled(rest[0]).strip():
        return None
    return spelled(key), spelled(value)
