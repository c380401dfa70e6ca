"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.

The number counts the calls of the conversation: the model writes the id that it will be shown again.
"""

import re
from collections.abc import Sequence

from polar.rendering.families.base import Call, Signs
from polar.rendering.families.json_text import is_json
from polar.rendering.families.markup import Markup
from polar.rendering.families.scanner import Piece, cut, spelled
from polar.types import Tool

_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+):\d+\s*")


class Kimi(Markup):
    name = "kimi"
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    inner = ("<|tool_call_argument_begin|>",)

    @classmethod
    def fits(cls, signs: Signs) -> bool:
        return signs.show("<|tool_call_argument_begin|>")

    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def read(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[Call] | None:  # noqa: ARG002
        head, *rest = cut(body, "<|tool_call_argument_begin|>")
        id = _ID.fullmatch(spelled(head))
        arguments = spelled(rest[0]).strip() if len(rest) == 1 else ""
        return [Call(id.group(1), arguments, spelled(head).strip())] if id and is_json(arguments) else None
