"""What a template writes into an assistant turn is read back from its ids."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polar.types import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from tests.selection import leave_to_slow
from tests.unit.rendering.families.models import FAMILY, model, parse

MODELS = [name for name in FAMILY if name != "deepseek_v3"]
THINKS = {
    "scripted",
    "hermes_as_text",
    "qwen3",
    "qwen_coder",
    "glm",
    "kimi",
    "deepseek_v31",
    "mistral",
    "harmony",
    "thinking",
}
CALLS = set(FAMILY) - {"gemma3", "thinking"}
ONE_CALL_ALONE = {"llama3_2"}  # its template has no place for text beside a call, nor for a second one

words = st.text(st.sampled_from("ab é🙂\n\t{}[]<>/|\"'\\:;=`,.#5")).map(str.strip)
values: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(st.sampled_from("ab é🙂\n\t{}[]<>/|\"'\\:;=`,.#5")),
    "count": st.integers(),
    "rate": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "items": st.lists(words | st.integers() | st.none(), max_size=3),
    "extra": st.dictionaries(words, words | st.booleans(), max_size=2),
    "maybe": st.none() | words.filter(lambda word: word not in ("null", "None")),
}
arguments = st.lists(st.sampled_from(list(values)), unique=True, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: values[name] for name in names})
)
calls = st.lists(st.tuples(st.sampled_from(["bash", "read_file", "mcp__x-y"]), arguments), max_size=3)


def message(
    reasoning: str, content: str, written: list[tuple[str, Any]], arguments_as_text: bool = False
) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if written:
        turn["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(value) if arguments_as_text else value},
            }
            for name, value in written
        ]
    return turn


@pytest.mark.parametrize("name", leave_to_slow(MODELS, but=[name for name in MODELS if name != "gemma3"]))
@settings(deadline=None)  # reading a tokenizer takes a while
@given(words, words, calls)
def test_a_turn_is_read_back(name: str, reasoning: str, content: str, written: list[tuple[str, Any]]) -> None:
    tokenizer = model(name)
    reasoning = reasoning if name in THINKS else ""
    written = written if name in CALLS else []
    if name in ONE_CALL_ALONE and written:
        content, written = "", written[:1]
    assume(reasoning or content or written)
    question = {"role": "user", "content": "Go on."}
    turn = message(reasoning, content, written)
    prompt = tokenizer.template.render([question], thinking=bool(reasoning))
    whole = tokenizer.template.render([question, turn], add_generation_prompt=False)
    if not whole.startswith(prompt):  # one that ends its prompt in a line break and then leaves it out before calls
        assert name == "qwen2_5"
        prompt = prompt.removesuffix("\n")
    assert whole.startswith(prompt)
    sampled = whole[len(prompt) :]
    assume(all(not any(marker in text for marker in tokenizer.added_tokens) for text in (reasoning, content)))

    events, malformed = parse(tokenizer, sampled, prompt[-100:])
    assert not malformed
    expected: list[Any] = [("reasoning", reasoning)] if reasoning else []
    expected += [("text", content)] if content else []
    expected += [("call", name, value) for name, value in written]
    assert read(events) == expected


def test_the_first_deepseek_template_writes_calls_alone() -> None:
    """It takes the arguments as text, and never closes the section of a single call."""
    tokenizer = model("deepseek_v3")
    question = {"role": "user", "content": "Go on."}
    prompt = tokenizer.template.render([question])
    for written in ([("bash", {"text": "`ls`\n"})], [("bash", {}), ("read_file", {"count": 1})]):
        turn = {**message("", "", written, arguments_as_text=True), "content": None}
        whole = tokenizer.template.render([question, turn], add_generation_prompt=False, map_arguments=False)
        assert whole.startswith(prompt)
        events, malformed = parse(tokenizer, whole[len(prompt) :], prompt)
        assert not malformed
        assert read(events) == [("call", name, value) for name, value in written]


def read(events: list[Any]) -> list[Any]:
    out: list[Any] = []
    for event in events:
        if isinstance(event, ReasoningDelta):
            out.append(("reasoning", event.text.strip()))
        elif isinstance(event, TextDelta):
            out.append(("text", event.text.strip()))
        elif isinstance(event, ToolCallStart):
            out.append(("call", event.name))
        else:
            assert isinstance(event, ToolCallDelta)
            out[-1] = (*out[-1], json.loads(event.arguments))
    return out
