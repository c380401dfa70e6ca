"""What templates can take, found out by probes."""

import pytest

from polar.rendering.continuation import TurnHistory
from polar.rendering.families import detect_family
from polar.rendering.messages import TemplateTraits, find_traits
from polar.rendering.model_codec import ModelCodec
from polar.rendering.template import ChatTemplate
from polar.types import Message, Raw, Request, Text, Tool, ToolCall, ToolResult
from tests.unit.rendering.hostile import HOSTILE, hostile
from tests.unit.rendering.talkers import TALKERS

REAL = {
    "scripted": TemplateTraits(),
    "qwen3": TemplateTraits(),
    "qwen35": TemplateTraits(supports_late_system=False, supports_text_arguments=False),
    "qwen2_5": TemplateTraits(),
    "llama3_2": TemplateTraits(supports_parallel_calls=False),
    "gemma3": TemplateTraits(supports_late_system=False, supports_repeated_roles=False, supports_tools=False),
    "deepseek_v3": TemplateTraits(
        supports_late_system=False, supports_tools=False
    ),  # it moves late system messages to the beginning
    "smollm2": TemplateTraits(supports_tools=False),
}


@pytest.mark.parametrize("name", REAL)
def test_real_templates(name: str) -> None:
    tokenizer = TALKERS[name].tokenizer()
    assert find_traits(tokenizer.template, detect_family(tokenizer).make_call_id) == REAL[name]


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("refuses parallel calls", TemplateTraits(supports_parallel_calls=False)),
        ("refuses system", TemplateTraits(supports_system=False, supports_late_system=False)),
        ("system last", TemplateTraits(supports_system=False)),
        (
            "alternates",
            TemplateTraits(
                supports_system=False, supports_late_system=False, supports_repeated_roles=False, supports_tools=False
            ),
        ),
    ],
)
def test_templates_that_refuse(name: str, traits: TemplateTraits) -> None:
    tokenizer = hostile(name)
    assert find_traits(tokenizer.template, detect_family(tokenizer).make_call_id) == traits


def _call_id(name: str, number: int) -> str:
    return f"{name}{number}"


def test_arguments_as_text() -> None:
    source = HOSTILE["plain"].source.replace("call.function.arguments | tojson", "call.function.arguments")
    assert find_traits(ChatTemplate(source), _call_id) == TemplateTraits(maps_arguments=False)


def test_a_template_of_its_own_for_tools_must_take_what_the_other_takes() -> None:
    default = "{%- for message in messages -%}{{- message.role + message.content -}}{%- endfor -%}"
    sources = {"default": default, "tool_use": HOSTILE["plain"].source}
    assert find_traits(ChatTemplate(sources), _call_id) == TemplateTraits()
    sources["tool_use"] = HOSTILE["refuses system"].source
    assert find_traits(ChatTemplate(sources), _call_id) == TemplateTraits(
        supports_system=False, supports_late_system=False
    )
    del sources["tool_use"]
    assert not find_traits(ChatTemplate(sources), _call_id).supports_tools


def test_arguments_that_are_no_object_have_a_fallback() -> None:
    """A template that goes through the arguments' members can't take text; the turn is shown nevertheless."""
    model = ModelCodec(TALKERS["qwen35"].tokenizer())
    turn = Message("assistant", [ToolCall("call_1", "f", '{"a": oops')])
    messages = [Message("user", [Text("q")]), turn, Message("tool", [ToolResult("call_1", [Text("no")])])]
    plan = model.plan_prompt(Request("m", messages, tools=[Tool("f", "", Raw(b"{}"))]), TurnHistory(), lambda *_: None)
    assert '{"a": oops' in plan.text
