"""What a template can take: found out by rendering small conversations, once, when a model's folder is read."""

from collections.abc import Sequence
from typing import Any

from polar.rendering.messages import MakeCallId, TemplateTraits
from polar.rendering.template import ChatMessage, ChatTemplate, TemplateError, ToolSpec

_USER: ChatMessage = {"role": "user", "content": "polarquestion"}
_REPLY: ChatMessage = {"role": "assistant", "content": "polaranswer"}
_SYSTEM: ChatMessage = {"role": "system", "content": "polarsystem"}
_TOOL = ToolSpec(
    {
        "type": "function",
        "function": {
            "name": "polarfunction",
            "description": "polar",
            "parameters": {"type": "object", "properties": {"polarkey": {"type": "string"}}, "required": []},
        },
    }
)


def find_traits(template: ChatTemplate, make_call_id: MakeCallId) -> TemplateTraits:
    def shows(messages: Sequence[ChatMessage], *words: str, tools: bool = False, mapped: bool = True) -> bool:
        """Whether it renders, with all of these words in this order."""
        try:
            text = template.render(messages, [_TOOL] if tools else None, map_arguments=mapped)
        except TemplateError:
            return False
        at = 0
        for word in words:
            at = text.find(word, at)
            if at < 0:
                return False
            at += len(word)
        return True

    def calls(count: int, arguments: str = '{"polarkey": "polarvalue"}') -> list[ChatMessage]:
        return [
            _USER,
            _make_calls_message(make_call_id, count, arguments),
            *(_make_result_message(make_call_id, number) for number in range(count)),
        ]

    mapped = shows(calls(1), "polarkey", "polarresult0", tools=True)
    by_text = not mapped and shows(calls(1), "polarkey", "polarresult0", tools=True, mapped=False)
    tools = shows([_USER], "polarfunction", tools=True) and (mapped or by_text)

    def always(messages: Sequence[ChatMessage], *words: str) -> bool:
        """With tools and without, which may be two templates."""
        return shows(messages, *words) and (not tools or shows(messages, *words, tools=True))

    return TemplateTraits(
        supports_system=always([_SYSTEM, _USER], "polarsystem", "polarquestion"),
        supports_late_system=always([_USER, _REPLY, _SYSTEM, _USER], "polaranswer", "polarsystem"),
        supports_repeated_roles=always(
            [_USER, {"role": "user", "content": "polaragain"}], "polarquestion", "polaragain"
        ),
        supports_tools=tools,
        supports_parallel_calls=not tools
        or shows(calls(2), "polarkey", "polarkey", "polarresult1", tools=True, mapped=mapped),
        maps_arguments=mapped or not by_text,
        supports_text_arguments=not tools or shows(calls(1, "polartext"), "polartext", "polarresult0", tools=True),
    )


def _make_calls_message(make_call_id: MakeCallId, count: int, arguments: str) -> ChatMessage:
    calls: list[dict[str, Any]] = [
        {
            "id": make_call_id("polarfunction", number),
            "type": "function",
            "function": {"name": "polarfunction", "arguments": arguments},
        }
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _make_result_message(make_call_id: MakeCallId, number: int) -> ChatMessage:
    shown = make_call_id("polarfunction", number)
    return {"role": "tool", "content": f"polarresult{number}", "tool_call_id": shown, "name": "polarfunction"}
