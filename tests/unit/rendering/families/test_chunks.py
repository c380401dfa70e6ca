"""However the stream is cut, the events are the same; and no text is lost."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.rendering.families.scanner import END_TOKENS
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallStart
from tests.selection import leave_to_slow
from tests.unit.rendering.families.models import FAMILY, TOOLS, model, parse
from tests.unit.rendering.families.test_replies import MALFORMED, WELL_FORMED

WRITTEN = {
    name: [written for other, _, written, _ in WELL_FORMED if other == name or FAMILY[other] == FAMILY[name]]
    + [written for other, written, _ in MALFORMED if FAMILY[other] == FAMILY[name]]
    for name in FAMILY
}
QUICK = [name for name in FAMILY if name not in ("gemma3", "deepseek_v3", "harmony")] + ["harmony"]
"""Those whose tokenizers are read in a moment."""
PROMPT_ENDS = {"harmony": ["<|start|>assistant", "<|start|>assistant<|channel|>analysis<|message|>"]}
FRAGMENTS = ['{"name": "bash", ', '"arguments": {}', '"parameters": {}', "}", ";", "\n", " ", '"', "\\", "é", "x"]
FRAGMENTS += ["<function=bash>", "</function>", "<parameter=text>", "</parameter>", "functions.bash:0", "```json\n"]


@st.composite
def garbage(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of all kinds in any order: control tokens, whole markers and pieces of calls among them."""
    tokenizer = model(name)
    known = [
        tokenizer.added_tokens[marker]
        for marker in sorted(set(" ".join(WRITTEN[name]).split()) & set(tokenizer.added_tokens))
    ]
    known += [id for text, id in tokenizer.added_tokens.items() if any(text in written for written in WRITTEN[name])]
    pieces = (
        st.sampled_from(known or [0]).map(lambda id: [id])
        | st.integers(0, tokenizer.vocabulary_size).map(lambda id: [id])
        | st.sampled_from(FRAGMENTS).map(tokenizer.encode)
    )
    return [id for piece in draw(st.lists(pieces, max_size=20)) for id in piece]


@st.composite
def replies(draw: st.DrawFn, name: str) -> list[int]:
    tokenizer = model(name)
    if draw(st.booleans()):
        return draw(garbage(name))
    written = "".join(draw(st.lists(st.sampled_from(WRITTEN[name]), min_size=1, max_size=2)))
    return tokenizer.encode(written)


@pytest.mark.parametrize("name", leave_to_slow(FAMILY, but=QUICK))
@settings(deadline=None)  # reading a tokenizer takes a while
@given(st.data())
def test_the_events_do_not_depend_on_the_cuts(name: str, data: st.DataObject) -> None:
    tokenizer = model(name)
    ids = data.draw(replies(name))
    prompt_end = data.draw(st.sampled_from(PROMPT_ENDS.get(name, ["", "<think>\n", "</think>\n\n"])))
    tools = data.draw(st.sampled_from([TOOLS, None]))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    expected = parse(tokenizer, ids, prompt_end, tools)
    assert parse(tokenizer, ids, prompt_end, tools, cuts=cuts) == expected
    assert parse(tokenizer, ids, prompt_end, tools, cuts=[]) == expected


@pytest.mark.parametrize("name", leave_to_slow([name for name in FAMILY if name != "harmony"], but=QUICK[:-1]))
@settings(deadline=None)  # reading a tokenizer takes a while
@given(st.data())
def test_without_calls_all_text_goes_on(name: str, data: st.DataObject) -> None:
    """Whatever was sampled is text or reasoning, but for white space, end tokens and the think block's markers."""
    tokenizer = model(name)
    ids = data.draw(replies(name))
    events, _ = parse(tokenizer, ids, tools=data.draw(st.sampled_from([TOOLS, None])))
    if any(isinstance(event, ToolCallStart) for event in events):
        return
    ends = {tokenizer.added_tokens.get(text) for text in (*END_TOKENS, "<|user|>", "<|observation|>")} | {
        tokenizer.eos_id
    }
    expected = tokenizer.decode([id for id in ids if id not in ends and id < tokenizer.vocabulary_size])
    if "\ufffd" in expected:  # bytes that are no UTF-8: the tokenizer gives up a whole run of them, we what is wrong
        return
    assert _bare("".join(map(_text, events))) == _bare(expected)


@pytest.mark.parametrize("name", leave_to_slow(FAMILY, but=QUICK))
@settings(deadline=None)  # reading a tokenizer takes a while
@given(st.data())
def test_no_part_is_white_space(name: str, data: st.DataObject) -> None:
    events, _ = parse(model(name), data.draw(replies(name)))
    assert all(_text(event).strip(" \t\r\n") for event in events if not isinstance(event, ToolCallStart))
    for event, following in pairwise(events):
        if isinstance(event, ReasoningDelta) or isinstance(following, ToolCallStart):
            assert _text(event) == _text(event).rstrip(" \t\r\n")


def _text(event: ReplyEvent) -> str:
    if isinstance(event, TextDelta | ReasoningDelta):
        return event.text
    return "" if isinstance(event, ToolCallStart) else event.arguments


def _bare(text: str) -> str:
    """Without white space and think markers, also those that their removal makes."""
    text = re.sub(r"\s", "", text)
    while (shorter := re.sub(r"</?think>|\[/?THINK\]", "", text)) != text:
        text = shorter
    return text
