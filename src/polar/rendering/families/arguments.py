"""Arguments of calls that are written as elements, one for each parameter, instead of as JSON.

Such a format writes strings bare and everything else as JSON, so the text alone doesn't say which of the two `5` is:
the tool's schema does. A value becomes what its schema allows, a string where it can be nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from polar.types import Tool

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


def to_json(written: Sequence[tuple[str, str]], tool: Tool | None) -> str:
    """A JSON object of the parameters as they were written, in their order."""
    properties = _properties(tool)
    members = [f"{_string(name)}: {_value(text, _types(properties.get(name)))}" for name, text in written]
    return "{" + ", ".join(members) + "}"


def find_tool(tools: Sequence[Tool], name: str) -> Tool | None:
    return next((tool for tool in tools if tool.name == name), None)


def _properties(tool: Tool | None) -> Mapping[str, Any]:
    schema = msgspec.json.decode(tool.parameters) if tool and tool.parameters else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _types(schema: Any) -> set[str]:
    """The types that a schema names; none where it leaves them open."""
    if not isinstance(schema, dict):
        return set()
    types = {type for type in _as_list(schema.get("type")) if isinstance(type, str)}
    for choice in ("anyOf", "oneOf", "allOf"):
        for option in _as_list(schema.get(choice)):
            types |= _types(option)
    return types or {_JSON_TYPES[type(value)] for value in _as_list(schema.get("enum"))}


def _as_list(value: Any) -> list[Any]:
    """Schemas are the harness's: anything may stand anywhere."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _value(text: str, types: set[str]) -> str:
    """As JSON text: the model's own where it is JSON of a type that the schema allows."""
    if types == {"string"}:
        return _string(text)
    written = text.strip()
    if types & {"boolean", "null"}:
        written = _PYTHON_WORDS.get(written, written)
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError):
        return _string(text)
    # A schema that allows strings among others means the bare text, unless this is one of the others.
    if "string" in types and not _is_allowed(_JSON_TYPES[type(value)], types - {"string"}):
        return _string(text)
    return written


def _is_allowed(type: str, types: set[str]) -> bool:
    return type in types or (type == "integer" and "number" in types)


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode()
