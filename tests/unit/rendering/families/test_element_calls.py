"""Arguments written as elements become JSON by the tool's schema."""

import json
from typing import Any

import pytest
from msgspec import Raw

from polar.rendering.families.element_calls import encode_arguments
from polar.types import Tool


def tool(schema: Any) -> Tool:
    return Tool("f", parameters=Raw(json.dumps(schema).encode()))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, ' "a"\n', '" \\"a\\"\\n"'),
        ({"type": "string"}, "é\x00", '"é\\u0000"'),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "integer"}, "5 apples", '"5 apples"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "array"}, '[1,  "a"]', '[1,  "a"]'),
        ({"type": "object"}, '{"b": 1,"a": 2}', '{"b": 1,"a": 2}'),
        ({"type": "object"}, "{", '"{"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["string", "number"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "true", '"true"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({}, "5", "5"),
        ({}, "True", '"True"'),
        (True, "five", '"five"'),
        ({"type": [["string"]], "anyOf": 5, "enum": {}}, "5", "5"),
    ],
)
def test_a_value_by_its_schema(schema: Any, text: str, value: str) -> None:
    assert encode_arguments([("a", text)], tool({"properties": {"a": schema}})) == f'{{"a": {value}}}'


@pytest.mark.parametrize("unknown", [None, Tool("f"), tool({}), tool(True), tool({"properties": 1})])
def test_without_a_schema_what_is_json_is_taken_as_such(unknown: Tool | None) -> None:
    assert encode_arguments([("b", "5"), ("a", "x")], unknown) == '{"b": 5, "a": "x"}'


def test_no_parameters() -> None:
    assert encode_arguments([], tool({})) == "{}"
