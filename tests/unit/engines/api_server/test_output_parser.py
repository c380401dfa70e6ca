"""The model's raw output, read as it grows: however it is cut, the same comes out."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.api_server.output_parser import OutputParser
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart

Read = tuple[str, str, list[tuple[str, str]]]

CASES: dict[str, Read] = {
    "plain": ("", "plain", []),
    "<think>hm\n</think>\n\nyes": ("hm\n", "\n\nyes", []),
    'a<tool_call>{"name": "f", "arguments": {"x": {"y": "} "}}}</tool_call>': ("", "a", [("f", '{"x": {"y": "} "}}')]),
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n\n': ("", "", [("f", "{}")]),
    '<tool_call>{"name":"f","arguments":1}</tool_call><tool_call>{"name": "g", "arguments": {"a":1} } </tool_call>': (
        *("", ""),
        [("f", "1"), ("g", '{"a":1}')],
    ),
    '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>': ("", "", [("f", "{bad}")]),
    '<tool_call>{"name": "f", "arguments": {"cut': ("", "", [("f", '{"cut')]),
    '<tool_call>{"nam': ("", '<tool_call>{"nam', []),
    "<tool_call>nothing</tool_call>": ("", "<tool_call>nothing</tool_call>", []),
    "a < b <thin": ("", "a < b <thin", []),
    "<think>open</thi": ("open</thi", "", []),
    "": ("", "", []),
}


def gather(events: list[ReplyEvent]) -> Read:
    reasoning, text, calls = "", "", list[tuple[str, str]]()
    for event in events:
        match event:
            case ReasoningDelta(more):
                reasoning += more
            case TextDelta(more):
                text += more
            case ToolCallStart(name=name):
                calls.append((name, ""))
            case ToolCallDelta(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return reasoning, text, calls


def read(pieces: list[str], **options: bool) -> Read:
    parser = OutputParser(**options)
    return gather([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize("text", CASES)
def test_at_once_and_character_by_character(text: str) -> None:
    assert read([text]) == CASES[text]
    assert read(list(text)) == CASES[text]


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 100)))
def test_cut_anywhere(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(places)]) == CASES[text]


@given(st.text(alphabet=st.sampled_from(list('<think>/o_cal{}":, ')), max_size=60))
def test_text_without_tools_is_never_lost(text: str) -> None:
    reasoning, shown, calls = read(list(text), tools=False)
    assert calls == []
    assert reasoning + shown == text.replace("<think>", "").replace("</think>", "") or "</think>" in text


def test_a_prompt_that_ends_in_an_open_think() -> None:
    assert read(["hm</think>yes"], starts_in_reasoning=True) == ("hm", "yes", [])


def test_markup_without_tools_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(list(text), tools=False) == ("", text, [])


def test_each_piece_is_given_out_at_once() -> None:
    parser = OutputParser()
    assert parser.feed("Hel") == [TextDelta("Hel")]
    assert parser.feed("lo <") == [TextDelta("lo ")]
    assert parser.feed("b>") == [TextDelta("<b>")]
    assert parser.feed("<tool_call>") == []
    assert parser.feed('{"name": "f", "arguments": ') == [ToolCallStart("", "f")]
    assert parser.feed('{"a": {"b": 1}') == [ToolCallDelta('{"a": {"b": 1')]
    assert parser.feed("}}") == [ToolCallDelta("}}")]
    assert parser.feed("</tool_call>") == []
