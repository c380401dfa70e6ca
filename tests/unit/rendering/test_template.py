"""Chat templates: the environment that Hugging Face's templates expect, and the text of our own template."""

from typing import Any

import pytest

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.template import ChatTemplate, TemplateError
from polar.rendering.tokenizer import Tokenizer

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a <command> & waits",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@pytest.fixture(scope="module")
def ours() -> ChatTemplate:
    return Tokenizer.load(TOKENIZER_FOLDER).template


def call(arguments: Any, name: str = "bash") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_conversation_with_tools(ours: ChatTemplate) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List the files & say naïve."},
        {
            "role": "assistant",
            "reasoning_content": "I look first.",
            "content": "Looking.",
            "tool_calls": [call('{"command": "ls <a>"}'), call('{"command": "pwd"}')],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "call_2", "content": "/home"},
        {"role": "assistant", "reasoning": "Enough.", "content": "naïve"},
        {"role": "user", "content": [{"type": "text", "text": "Thank "}, {"type": "text", "text": "you."}]},
    ]
    assert ours.render(messages, [BASH]) == (
        "<|im_start|>system\nBe brief.\n\n"
        "These functions can be called, one JSON description a line:\n<tools>\n"
        '{"type": "function", "function": {"name": "bash", "description": "Runs a <command> & waits", "parameters": '
        '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}\n'
        "</tools>\nA call is a JSON object with name and arguments, each in a tool_call element of its own.<|im_end|>\n"
        "<|im_start|>user\nList the files & say naïve.<|im_end|>\n"
        "<|im_start|>assistant\n<think>I look first.</think>Looking."
        '<tool_call>{"name": "bash", "arguments": {"command": "ls <a>"}}</tool_call>'
        '<tool_call>{"name": "bash", "arguments": {"command": "pwd"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>a.txt</tool_response><tool_response>/home</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>Enough.</think>naïve<|im_end|>\n"
        "<|im_start|>user\nThank you.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_system_tools_or_generation_prompt(ours: ChatTemplate) -> None:
    messages = [{"role": "user", "content": " two\n"}, {"role": "assistant", "content": "\n\nthree "}]
    assert ours.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\n two\n<|im_end|>\n<|im_start|>assistant\n\n\nthree <|im_end|>\n"
    )


def test_tools_alone_make_a_system_turn(ours: ChatTemplate) -> None:
    text = ours.render([{"role": "user", "content": "go"}], [BASH])
    assert text.startswith("<|im_start|>system\nThese functions can be called")


def test_system_messages_stay_in_place(ours: ChatTemplate) -> None:
    messages = [
        {"role": "developer", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "system", "content": "three"},
    ]
    assert ours.render(messages, add_generation_prompt=False) == (
        "<|im_start|>system\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>system\nthree<|im_end|>\n"
    )


def test_thinking_switched_off(ours: ChatTemplate) -> None:
    text = ours.render([{"role": "user", "content": "go"}], enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think></think>")


def test_an_unknown_role_is_refused(ours: ChatTemplate) -> None:
    with pytest.raises(TemplateError, match="no role critic"):
        ours.render([{"role": "critic", "content": "no"}])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"b": 1.0, "a": [null, true]}', '{"b": 1.0, "a": [null, true]}'),
        ({"b": 1}, '{"b": 1}'),
        ("", "{}"),
        ('{"cut": ', '{"cut": '),
        ("[1]", "[1]"),
    ],
)
def test_arguments_become_mappings_where_they_are_objects(ours: ChatTemplate, arguments: Any, shown: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    text = ours.render([message], add_generation_prompt=False)
    assert f'<tool_call>{{"name": "bash", "arguments": {shown}}}</tool_call>' in text
    assert message["tool_calls"] == [call(arguments)], "the caller's message was changed"


def test_the_environment_that_templates_expect() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n"
        "    {%- if loop.index > 2 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ m.content | upper }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ tools | tojson(indent=1) }}|{{ eos_token }}|{{ bos_token }}|{{ year }}|{{ strftime_now('%Y') | length }}",
        {"eos_token": "</s>"},
    )
    messages = [{"role": "user", "content": word} for word in ("a", "b", "c")]
    assert template.render(messages, [{"é": "<&>'"}], year=1999) == 'AB[\n {\n  "é": "<&>\'"\n }\n]|</s>||1999|4'


def test_templates_cannot_reach_out_or_change_their_input() -> None:
    messages = [{"role": "user", "content": "x"}]
    for source in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{{ 1 + 'a' }}",
    ):
        with pytest.raises(TemplateError):
            ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render([]) == "plain"
    assert template.render([], [BASH]) == "tools"
    with pytest.raises(TemplateError, match="default"):
        ChatTemplate({"rag": "x"})
