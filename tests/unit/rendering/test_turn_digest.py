"""What a turn says, apart from how it is spelled."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polar.rendering.turn_digest import TurnDigest, digest_turn
from polar.types import Reasoning, Text, ToolCall

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(st.text(), values, max_size=4)


def _reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reordered(inner) for key, inner in reversed(value.items())}
    if isinstance(value, list):
        return [_reordered(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


@given(mappings)
def test_arguments_are_compared_by_value(value: dict[str, Any]) -> None:
    first = ToolCall("a", "f", json.dumps(value))
    second = ToolCall("b", "f", json.dumps(_reordered(value), indent=1, ensure_ascii=False))
    assert digest_turn([first]) == digest_turn([second])


@given(mappings, mappings)
def test_other_arguments_are_other_calls(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = digest_turn([ToolCall("a", "f", json.dumps(one))]) == digest_turn([ToolCall("a", "f", json.dumps(other))])
    assert same == (_kinds(one) == _kinds(other))


def _kinds(value: Any) -> Any:
    """Python finds True equal to 1; JSON doesn't."""
    if isinstance(value, dict):
        return {key: _kinds(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_kinds(inner) for inner in value]
    return (isinstance(value, bool), value)


@given(st.text(), st.text(), st.sampled_from(["", " ", "\n\n", "\t"]))
def test_white_space_at_the_edges_says_nothing(thinking: str, text: str, space: str) -> None:
    echoed = [Reasoning(space + thinking + space, "seal"), Text(space + text)]
    assert digest_turn([Reasoning(thinking), Text(text)]) == digest_turn(echoed)


def test_what_makes_a_difference() -> None:
    call = ToolCall("a", "f", '{"a": 1}')
    different = [
        [Text("a")],
        [Reasoning("a")],
        [Text("a b")],
        [call],
        [call, call],
        [ToolCall("a", "g", '{"a": 1}')],
        [ToolCall("a", "f", '{"a": "1"}')],
        [ToolCall("a", "f", '{"a": true}')],
        [ToolCall("a", "f", "{}")],
        [ToolCall("a", "f", '{"a": 1')],
        [ToolCall("a", "f", '{"a": 1}', kind="custom")],
        [ToolCall("a", "f", '{"a": 1}', namespace="n")],
    ]
    assert len({digest_turn(parts) for parts in different}) == len(different)
    assert digest_turn([Text(" "), Reasoning("")]) == TurnDigest()
    assert digest_turn([ToolCall("a", "f", "")]) == digest_turn([ToolCall("a", "f", "{}")])


def test_arguments_that_no_one_can_read() -> None:
    for arguments in ("[" * 100_000, '{"a":' * 700 + "1" + "}" * 700, "1" * 5000, '{"a": 1e999}', '"\\ud800"'):
        once, again = (digest_turn([ToolCall("a", "f", arguments)]) for _ in range(2))
        assert once == again != TurnDigest()
