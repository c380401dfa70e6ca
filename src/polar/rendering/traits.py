"""What a template can take: found out by rendering small conversations, once, when a model's folder is read."""

from collections.abc import Sequence
from typing import Any

from polar.rendering.messages import CallId, Traits
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


def find_traits(template: ChatTemplate, call_id: CallId) -> Traits:
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
        return [_USER, _calling(call_id, count, arguments), *(_result(call_id, number) for number in range(count))]

    mapped = shows(calls(1), "polarkey", "polarresult0", tools=True)
    by_text = not mapped and shows(calls(1), "polarkey", "polarresult0", tools=True, mapped=False)
    tools = shows([_USER], "polarfunction", tools=True) and (mapped or by_text)

    def always(messages: Sequence[ChatMessage], *words: str) -> bool:
        """With tools and without, which may be two templates."""
        return shows(messages, *words) and (not tools or shows(messages, *words, tools=True))

    return Traits(
        system=always([_SYSTEM, _USER], "polarsystem", "polarquestion"),
        late_system=always([_USER, _REPLY, _SYSTEM, _USER], "polaranswer", "polarsystem"),
        repeats=always([_USER, {"role": "user", "content": "polaragain"}], "polarquestion", "polaragain"),
        tools=tools,
        parallel_calls=not tools or shows(calls(2), "polarkey", "polarkey", "polarresult1", tools=True, mapped=mapped),
        mapped_arguments=mapped or not by_text,
        text_arguments=not tools or shows(calls(1, "polartext"), "polartext", "polarresult0", tools=True),
    )


def _calling(call_id: CallId, count: int, arguments: str) -> ChatMessage:
    calls: list[dict[str, Any]] = [
        {
            "id": call_id("polarfunction", number),
            "type": "function",
            "function": {"name": "polarfunction", "arguments": arguments},
        }
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(call_id: CallId, number: int) -> ChatMessage:
    shown = call_id("polarfunction", number)
    return {"role": "tool", "content": f"polarresult{number}", "tool_call_id": shown, "name": "polarfunction"}
