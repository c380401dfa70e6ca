"""DeepSeek V3, R1 and V3.1: calls in a section, each between markers.

V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fenced block of JSON; V3.1 writes
`name<｜tool▁sep｜>{...}`.
"""

from collections.abc import Sequence

from polar.rendering.families.base import Call, Signs
from polar.rendering.families.json_text import is_json
from polar.rendering.families.markup import Markup
from polar.rendering.families.scanner import Piece, cut, spelled
from polar.types import Tool


class DeepSeek(Markup):
    name = "deepseek"
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner = ("<｜tool▁sep｜>",)

    @classmethod
    def fits(cls, signs: Signs) -> bool:
        return signs.show("<｜tool▁sep｜>")

    def read(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[Call] | None:  # noqa: ARG002
        head, *rest = cut(body, "<｜tool▁sep｜>")
        if len(rest) != 1:
            return None
        name, arguments = spelled(head).strip(), spelled(rest[0]).strip()
        if name == "function" and arguments.endswith("```"):
            name, _, arguments = arguments.removesuffix("```").partition("```json")
            name, arguments = name.strip(), arguments.strip()
        return [Call(name, arguments)] if name and is_json(arguments) else None
