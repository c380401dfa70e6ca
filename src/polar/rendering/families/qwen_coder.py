"""Qwen3-Coder and Qwen3.5: a call is a function element with an element for each parameter.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A value is taken as it stands between the line breaks of its element. It may hold markup of its own: it ends where its
closing tag is followed by the next parameter or by the function's end.
"""

import re
from collections.abc import Sequence

from polar.rendering.families.arguments import find_tool, to_json
from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces
from polar.types import Tool

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


class QwenCoder(MarkupFamily):
    name = "qwen_coder"
    call_markers = ("<tool_call>", "</tool_call>")
    calls_are_json = False

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return "<tool_call>" in signs.template and "<function=" in signs.template

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:
        function = _FUNCTION.fullmatch(join_pieces(body))
        if function is None:
            return None
        name, inside = function.groups()
        written, at = [], 0
        while found := _PARAMETER.match(inside, at):
            written.append((found.group(1), found.group(2)))
            at = found.end()
        if inside[at:].strip():
            return None
        return [ParsedCall(name, to_json(written, find_tool(tools, name)))]
