"""Families that write a call as elements, one for each parameter, instead of as JSON.

Such a format writes strings bare and everything else as JSON, so the text alone doesn't say which of the two `5` is:
the tool's schema does. A value becomes what its schema allows, a string where it can be nothing else.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.markup import MarkupFamily
from polar.rendering.families.scanner import Piece, join_pieces, split_at_marker
from polar.types import Tool

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)

_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as some templates write them


class Glm(MarkupFamily):
    """GLM 4.5 and later: the function's name, then keys and values in elements of their own.

        <tool_call>name
        <arg_key>key</arg_key>
        <arg_value>value</arg_value>
        </tool_call>

    Later models leave the line breaks out.
    """

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
        return [ParsedCall(name, encode_arguments([member for member in written if member], _find_tool(tools, name)))]


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


class QwenCoder(MarkupFamily):
    """Qwen3-Coder and Qwen3.5: a call is a function element with an element for each parameter.

        <tool_call>
        <function=name>
        <parameter=key>
        value
        </parameter>
        </function>
        </tool_call>

    A value is taken as it stands between the line breaks of its element. It may hold markup of its own: it ends where
    its closing tag is followed by the next parameter or by the function's end.
    """

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
        return [ParsedCall(name, encode_arguments(written, _find_tool(tools, name)))]


def encode_arguments(written: Sequence[tuple[str, str]], tool: Tool | None) -> str:
    """A JSON object of the parameters as they were written, in their order."""
    properties = _find_properties(tool)
    members = [
        f"{_encode_string(name)}: {_encode_value(text, _list_types(properties.get(name)))}" for name, text in written
    ]
    return "{" + ", ".join(members) + "}"


def _find_tool(tools: Sequence[Tool], name: str) -> Tool | None:
    return next((tool for tool in tools if tool.name == name), None)


def _find_properties(tool: Tool | None) -> Mapping[str, Any]:
    schema = msgspec.json.decode(tool.parameters) if tool and tool.parameters else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _list_types(schema: Any) -> set[str]:
    """The types that a schema names; none where it leaves them open."""
    if not isinstance(schema, dict):
        return set()
    types = {type for type in _as_list(schema.get("type")) if isinstance(type, str)}
    for choice in ("anyOf", "oneOf", "allOf"):
        for option in _as_list(schema.get(choice)):
            types |= _list_types(option)
    return types or {_JSON_TYPES[type(value)] for value in _as_list(schema.get("enum"))}


def _as_list(value: Any) -> list[Any]:
    """Schemas are the harness's: anything may stand anywhere."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _encode_value(text: str, types: set[str]) -> str:
    """As JSON text: the model's own where it is JSON of a type that the schema allows."""
    if types == {"string"}:
        return _encode_string(text)
    written = text.strip()
    if types & {"boolean", "null"}:
        written = _PYTHON_WORDS.get(written, written)
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError):
        return _encode_string(text)
    # A schema that allows strings among others means the bare text, unless this is one of the others.
    if "string" in types and not _is_allowed(_JSON_TYPES[type(value)], types - {"string"}):
        return _encode_string(text)
    return written


def _is_allowed(type: str, types: set[str]) -> bool:
    return type in types or (type == "integer" and "number" in types)


def _encode_string(text: str) -> str:
    return msgspec.json.encode(text).decode()
