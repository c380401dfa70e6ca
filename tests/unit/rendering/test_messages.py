"""Canonical messages as templates take them, and the fallbacks for those that can't."""

import json
from typing import Any

import pytest

from polar.rendering.messages import ContextMessage, Conversation, ModelTurn, TemplateTraits, build_conversation
from polar.types import Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult


def built(
    messages: list[Message], traits: TemplateTraits | None = None, together: bool = False, **how: Any
) -> Conversation:
    return build_conversation(
        messages,
        how.get("tools", []),
        {},
        traits=traits or TemplateTraits(),
        guard=how.get("guard", lambda text: text),
        make_call_id=lambda name, number: f"{name}:{number}",
        find_written_id=how.get("written", lambda _: None),
        belong_together=lambda *_: together,
    )


def shown(conversation: Conversation) -> list[tuple[str, str]]:
    return [
        ("assistant", item.text) if isinstance(item, ModelTurn) else (item.message["role"], item.message["content"])
        for item in conversation.items
    ]


def said(role: Any, *parts: Part | str) -> Message:
    return Message(role, [Text(part) if isinstance(part, str) else part for part in parts])


def call(id: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(id, "f", arguments)


def result(id: str, text: str) -> Message:
    return Message("tool", [ToolResult(id, [Text(text)])])


def test_results_get_the_ids_that_the_model_is_shown() -> None:
    items = built([said("assistant", call("x1"), call("x2")), result("x2", "two"), result("x1", "one")]).items
    assert [item.message["tool_call_id"] for item in items if isinstance(item, ContextMessage)] == ["f:1", "f:0"]


def test_ids_that_the_model_wrote_are_shown_again() -> None:
    messages = [said("assistant", call("x1"), call("x2")), result("x1", "one"), result("x2", "two")]
    items = built(messages, written={"x2": "functions.f:7"}.get).items
    assert isinstance(items[0], ModelTurn)
    assert [each.id for each in items[0].calls] == ["f:0", "functions.f:7"]
    assert [item.message["tool_call_id"] for item in items if isinstance(item, ContextMessage)] == [
        "f:0",
        "functions.f:7",
    ]


def test_messages_that_are_one_reply() -> None:
    reply = [said("assistant", Reasoning("r"), "a"), said("assistant", call("x1")), said("assistant", "b", call("x2"))]
    [turn] = built(reply, together=True).items
    assert isinstance(turn, ModelTurn)
    assert (turn.reasoning, turn.text, [each.id for each in turn.calls]) == ("r", "ab", ["f:0", "f:1"])
    assert len(built(reply).items) == 3


def test_what_is_joined_is_guarded_as_one() -> None:
    def guard(text: str) -> str:
        return text.replace("<end>", "<*end>")

    halves = [said("user", "<", "end>"), said("assistant", Reasoning("<en"), Reasoning("d>"), "<e", "nd>")]
    items = built([*halves, said("assistant", "<e"), said("assistant", "nd>")], together=True, guard=guard).items
    assert shown(Conversation(items, None, {})) == [("user", "<\nend>"), ("assistant", "<*end><*end>")]
    assert isinstance(items[1], ModelTurn)
    assert items[1].reasoning == "<*end>"
    for arguments in ('{"a": "<\\u0065nd>"}', '{"<en\\u0064>": 1}', '{"a": ["<end>"]}'):
        [turn] = built([said("assistant", call("x", arguments))], guard=guard).items
        assert isinstance(turn, ModelTurn)
        assert "<*end>" in turn.calls[0].arguments
        json.loads(turn.calls[0].arguments)
    [turn] = built(
        [said("assistant", call("x", '{"a": "<\\u0065nd>"}'))], TemplateTraits(maps_arguments=False), guard=guard
    ).items
    assert isinstance(turn, ModelTurn)
    assert turn.calls[0].arguments == '{"a": "<\\u0065nd>"}'


TALK = [
    said("system", "s1"),
    said("developer", "s2"),
    said("user", "u1"),
    said("assistant", "a1"),
    said("assistant", "a2"),
    said("system", "s3"),
    said("user", "u2"),
]


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        (TemplateTraits(), "system s1|system s2|user u1|assistant a1|assistant a2|system s3|user u2"),
        (TemplateTraits(supports_late_system=False), "system s1+s2|user u1|assistant a1|assistant a2|user s3|user u2"),
        (
            TemplateTraits(supports_system=False, supports_late_system=False),
            "user s1|user s2|user u1|assistant a1|assistant a2|user s3|user u2",
        ),
        (
            TemplateTraits(supports_late_system=False, supports_repeated_roles=False),
            "system s1+s2|user u1|assistant a1+a2|user s3+u2",
        ),
        (
            TemplateTraits(supports_system=False, supports_late_system=False, supports_repeated_roles=False),
            "user s1+s2+u1|assistant a1+a2|user s3+u2",
        ),
    ],
)
def test_roles_that_a_template_refuses(traits: TemplateTraits, expected: str) -> None:
    told = "|".join(f"{role} {text}" for role, text in shown(built(TALK, traits)))
    assert told.replace("\n\n", "+") == expected


def test_tools_that_a_template_does_not_show_are_spelled_out() -> None:
    messages = [said("user", "u"), said("assistant", "a", call("x1"), call("x2", "no JSON")), result("x1", "r1")]
    talk = built([*messages, result("x2", "r2")], TemplateTraits(supports_tools=False), tools=[Tool("f", "does f")])
    assert talk.tools is None
    (_, told), *rest = shown(talk)
    assert '"name": "f"' in told
    assert rest == [
        ("user", "u"),
        (
            "assistant",
            'a\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": "no JSON"}\n</tool_call>',
        ),
        ("user", "<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"),
    ]
