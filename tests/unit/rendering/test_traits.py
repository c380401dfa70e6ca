"""What templates can take, found out by probes."""

import pytest

from polar.rendering.continuation import History
from polar.rendering.families import family_for
from polar.rendering.messages import Traits
from polar.rendering.model import Model
from polar.rendering.template import ChatTemplate
from polar.rendering.traits import find_traits
from polar.types import Message, Raw, Request, Text, Tool, ToolCall, ToolResult
from tests.unit.rendering.hostile import HOSTILE, hostile
from tests.unit.rendering.talkers import TALKERS

REAL = {
    "scripted": Traits(),
    "qwen3": Traits(),
    "qwen35": Traits(late_system=False, text_arguments=False),
    "qwen2_5": Traits(),
    "llama3_2": Traits(parallel_calls=False),
    "gemma3": Traits(late_system=False, repeats=False, tools=False),
    "deepseek_v3": Traits(late_system=False, tools=False),  # it moves late system messages to the beginning
    "smollm2": Traits(tools=False),
}


@pytest.mark.parametrize("name", REAL)
def test_real_templates(name: str) -> None:
    tokenizer = TALKERS[name].tokenizer()
    assert find_traits(tokenizer.template, family_for(tokenizer).call_id) == REAL[name]


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("refuses parallel calls", Traits(parallel_calls=False)),
        ("refuses system", Traits(system=False, late_system=False)),
        ("system last", Traits(system=False)),
        ("alternates", Traits(system=False, late_system=False, repeats=False, tools=False)),
    ],
)
def test_templates_that_refuse(name: str, traits: Traits) -> None:
    tokenizer = hostile(name)
    assert find_traits(tokenizer.template, family_for(tokenizer).call_id) == traits


def _call_id(name: str, number: int) -> str:
    return f"{name}{number}"


def test_arguments_as_text() -> None:
    source = HOSTILE["plain"].source.replace("call.function.arguments | tojson", "call.function.arguments")
    assert find_traits(ChatTemplate(source), _call_id) == Traits(mapped_arguments=False)


def test_a_template_of_its_own_for_tools_must_take_what_the_other_takes() -> None:
    default = "{%- for message in messages -%}{{- message.role + message.content -}}{%- endfor -%}"
    sources = {"default": default, "tool_use": HOSTILE["plain"].source}
    assert find_traits(ChatTemplate(sources), _call_id) == Traits()
    sources["tool_use"] = HOSTILE["refuses system"].source
    assert find_traits(ChatTemplate(sources), _call_id) == Traits(system=False, late_system=False)
    del sources["tool_use"]
    assert not find_traits(ChatTemplate(sources), _call_id).tools


def test_arguments_that_are_no_object_have_a_fallback() -> None:
    """A template that goes through the arguments' members can't take text; the turn is shown nevertheless."""
    model = Model(TALKERS["qwen35"].tokenizer())
    turn = Message("assistant", [ToolCall("call_1", "f", '{"a": oops')])
    messages = [Message("user", [Text("q")]), turn, Message("tool", [ToolResult("call_1", [Text("no")])])]
    plan = model.plan(Request("m", messages, tools=[Tool("f", "", Raw(b"{}"))]), History(), lambda *_: None)
    assert '{"a": oops' in plan.text
