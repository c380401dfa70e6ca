"""Canonical messages in the form that chat templates take: OpenAI's shape, as plain data.

Content that a template can't take has a fallback. Probes find out which ones a template needs when the model's folder
is read (`find_traits`); every request uses the same ones, so that a conversation is always rendered in the same way:

    system messages it refuses          user messages
    system messages behind the first    joined to it where they follow it at once, else user messages
    messages of one role in a row       joined into one
    tools it doesn't show               a list of functions in the system message; calls and results as tagged text
    several calls in one turn           one turn for each call, followed by its result
    calls' arguments as mappings        as JSON text
    arguments that are no object        an object with one member, `arguments`

A request that no fallback can express is refused with the template's message.

All text from the harness is guarded (encoder.py), in the pieces in which it will stand in the prompt.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from polar.rendering.memo import Memo, estimate_bytes
from polar.rendering.template import ChatMessage, ChatTemplate, TemplateError, ToolSpec
from polar.types import Media, Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult

Guard = Callable[[str], str]
MakeCallId = Callable[[str, int], str]
"""Makes a call's id as the model itself writes it, from the call's name and its number in the conversation."""

_SPEC_CACHE_BYTES = 32 * 1024 * 1024
"""Size of the cache of tools in the form that templates take."""

_BYTES_PER_JSON_BYTE = 10
"""Memory for each byte of a tool's schema: in the key, as objects, and as JSON again."""


class TemplateTraits(Struct, frozen=True):
    """What a template supports."""

    supports_system: bool = True  # a system message at the beginning
    supports_late_system: bool = True  # system messages elsewhere
    supports_repeated_roles: bool = True  # two messages of one role in a row
    supports_tools: bool = True
    supports_parallel_calls: bool = True
    maps_arguments: bool = True
    supports_text_arguments: bool = True  # arguments that are no JSON object, as models write them now and then


_PROBE_USER: ChatMessage = {"role": "user", "content": "polarquestion"}
_PROBE_REPLY: ChatMessage = {"role": "assistant", "content": "polaranswer"}
_PROBE_SYSTEM: ChatMessage = {"role": "system", "content": "polarsystem"}
_PROBE_TOOL = ToolSpec(
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
    """Finds out what a template supports by rendering small conversations."""

    def renders_words(messages: Sequence[ChatMessage], *words: str, tools: bool = False, mapped: bool = True) -> bool:
        """Whether the template renders the messages, with all of these words in this order."""
        try:
            text = template.render(messages, [_PROBE_TOOL] if tools else None, map_arguments=mapped)
        except TemplateError:
            return False
        at = 0
        for word in words:
            at = text.find(word, at)
            if at < 0:
                return False
            at += len(word)
        return True

    def make_calls(count: int, arguments: str = '{"polarkey": "polarvalue"}') -> list[ChatMessage]:
        return [
            _PROBE_USER,
            _make_calls_message(make_call_id, count, arguments),
            *(_make_result_message(make_call_id, number) for number in range(count)),
        ]

    mapped = renders_words(make_calls(1), "polarkey", "polarresult0", tools=True)
    by_text = not mapped and renders_words(make_calls(1), "polarkey", "polarresult0", tools=True, mapped=False)
    tools = renders_words([_PROBE_USER], "polarfunction", tools=True) and (mapped or by_text)

    def always_renders(messages: Sequence[ChatMessage], *words: str) -> bool:
        """Whether the words are rendered with tools and without, which may be two templates."""
        return renders_words(messages, *words) and (not tools or renders_words(messages, *words, tools=True))

    return TemplateTraits(
        supports_system=always_renders([_PROBE_SYSTEM, _PROBE_USER], "polarsystem", "polarquestion"),
        supports_late_system=always_renders(
            [_PROBE_USER, _PROBE_REPLY, _PROBE_SYSTEM, _PROBE_USER], "polaranswer", "polarsystem"
        ),
        supports_repeated_roles=always_renders(
            [_PROBE_USER, {"role": "user", "content": "polaragain"}], "polarquestion", "polaragain"
        ),
        supports_tools=tools,
        supports_parallel_calls=not tools
        or renders_words(make_calls(2), "polarkey", "polarkey", "polarresult1", tools=True, mapped=mapped),
        maps_arguments=mapped or not by_text,
        supports_text_arguments=not tools
        or renders_words(make_calls(1, "polartext"), "polartext", "polarresult0", tools=True),
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


class ModelTurn(Struct):
    """A model's turn in a conversation: one message, or several in a row that together are one reply."""

    reasoning: str
    text: str
    calls: list[ToolCall]  # with their ids as the model is shown them
    parts: list[Part] = field(default_factory=list)  # as the harness sent them


class ContextMessage(Struct):
    """A message that is not the model's."""

    message: ChatMessage


Item = ModelTurn | ContextMessage


class Conversation(Struct):
    """A request's messages, ready to be rendered, with the model's turns apart so that marks can replace them."""

    items: list[Item]
    tools: list[ToolSpec] | None
    kwargs: dict[str, Any]

    @property
    def turns(self) -> list[ModelTurn]:
        return [item for item in self.items if isinstance(item, ModelTurn)]


def build_conversation(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    kwargs: dict[str, Any],
    *,
    traits: TemplateTraits,
    guard: Guard,
    make_call_id: MakeCallId,
    find_written_id: Callable[[str], str | None],
    belong_together: Callable[[Message, Message], bool],
) -> Conversation:
    """Builds a conversation, with the template's fallbacks applied. `find_written_id` returns a call's id as the model
    wrote it, if it wrote one; `belong_together` says whether two assistant messages in a row are one reply."""
    items: list[Item] = []
    names: dict[str, tuple[str, str]] = {}  # by the harness's id of a call: its id in the prompt, and its name
    shown: list[str] = []  # the ids of all calls in the prompt, in order
    last_assistant: Message | None = None
    for message in messages:
        if message.role == "assistant":
            previous = items[-1] if items else None
            if (
                last_assistant is not None
                and isinstance(previous, ModelTurn)
                and belong_together(last_assistant, message)
            ):
                previous.parts += message.parts
            else:
                items.append(ModelTurn("", "", [], list(message.parts)))
            for call in message.parts:
                if isinstance(call, ToolCall):
                    shown.append(guard(find_written_id(call.id) or make_call_id(call.name, len(shown))))
                    names[call.id] = shown[-1], guard(call.name)
            last_assistant = message
            continue
        last_assistant = None
        items += [ContextMessage(rendered) for rendered in _to_chat_messages(message, guard, names)]
    ids = iter(shown)
    for item in items:
        if isinstance(item, ModelTurn):
            _fill_turn(item, guard, traits, ids)
    specs = [_spec_memo((tool.name, tool.description, bytes(tool.parameters or b"{}"), guard)) for tool in tools]
    conversation = Conversation(items, specs or None, kwargs)
    return conversation if _needs_no_fallback(traits) else _apply_fallbacks(conversation, traits)


def to_chat_message(turn: ModelTurn) -> dict[str, Any]:
    """Converts a turn to the template's assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.reasoning:
        # Templates read one of these names.
        message |= {"reasoning_content": turn.reasoning, "reasoning": turn.reasoning, "thinking": turn.reasoning}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    return message


def _fill_turn(turn: ModelTurn, guard: Guard, traits: TemplateTraits, ids: Iterator[str]) -> None:
    """Fills in a turn's reasoning, text and calls from its parts. `ids` yields the ids of its calls."""
    for part in turn.parts:
        match part:
            case Reasoning():
                turn.reasoning += part.text
            case Text():
                turn.text += part.text
            case ToolCall():
                arguments = _guard_arguments(part.arguments, guard, traits)
                turn.calls.append(ToolCall(next(ids), guard(part.name), arguments))
            case _:
                raise ValueError(f"an assistant message with a {type(part).__name__}")
    turn.reasoning, turn.text = guard(turn.reasoning), guard(turn.text)


def _guard_arguments(arguments: str, guard: Guard, traits: TemplateTraits) -> str:
    """Guards a call's arguments. A template that gets a mapping sees the decoded escapes, which can spell anything, so
    those values are guarded as well."""
    guarded = guard(arguments)
    if not traits.supports_tools or not traits.maps_arguments:
        return guarded
    if not traits.supports_text_arguments and not _is_json_object(arguments):
        return json.dumps({"arguments": guarded}, ensure_ascii=False)
    if "\\" not in arguments:
        return guarded
    try:
        value = json.loads(guarded)
        safe = _guard_value(value, guard)
    except (ValueError, RecursionError):
        return guarded  # shown as text
    return guarded if safe == value else json.dumps(safe, ensure_ascii=False)


def _is_json_object(arguments: str) -> bool:
    try:
        return not arguments or isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _to_chat_messages(message: Message, guard: Guard, names: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    texts: list[str] = []
    rendered: list[dict[str, Any]] = []
    for part in message.parts:
        match part:
            case Text():
                texts.append(part.text)
            case ToolResult():
                shown, name = names.get(part.call_id, (guard(part.call_id), ""))
                result = guard("\n".join(piece.text for piece in part.parts if isinstance(piece, Text)))
                name = guard(part.name) if part.name else name
                rendered.append({"role": "tool", "content": result, "tool_call_id": shown, "name": name})
            case Media():
                raise ValueError("a picture, which only the engine itself can render")
            case _:
                raise ValueError(f"a {message.role} message with a {type(part).__name__}")
    if texts or not rendered:
        role = "system" if message.role == "developer" else message.role
        chat_message = {"role": role, "content": guard("\n".join(texts))}
        if message.name:
            chat_message["name"] = guard(message.name)
        rendered.append(chat_message)
    return rendered


_ToolKey = tuple[str, str, bytes, Guard]
"""A tool's name, description and parameters, and the function that guards them."""


def _make_spec(tool: _ToolKey) -> ToolSpec:
    """Makes the spec of a tool. It is cached, so that its JSON is written once however often the tool is sent. Raises
    TemplateError for a schema with numbers that are out of range."""
    name, description, parameters, guard = tool
    try:
        schema = _guard_value(msgspec.json.decode(parameters), guard)
    except msgspec.DecodeError as error:
        raise TemplateError(f"The parameters of the tool {name!r} can't be read: {error}.") from error
    function = {"name": guard(name), "description": guard(description), "parameters": schema}
    return ToolSpec({"type": "function", "function": function})


def _estimate_spec_bytes(tool: _ToolKey, _: ToolSpec) -> int:
    """Estimates a spec's memory from its key: walking the objects would take longer than making them."""
    name, description, parameters, _guard = tool
    return 4 * estimate_bytes((name, description)) + _BYTES_PER_JSON_BYTE * len(parameters)


_spec_memo = Memo(_make_spec, _SPEC_CACHE_BYTES, measure=_estimate_spec_bytes)


def _guard_value(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): _guard_value(inner, guard) for key, inner in value.items()}
    if isinstance(value, list):
        return [_guard_value(inner, guard) for inner in value]
    return value


# Fallbacks


def _needs_no_fallback(traits: TemplateTraits) -> bool:
    return (
        traits.supports_system
        and traits.supports_late_system
        and traits.supports_repeated_roles
        and traits.supports_tools
    )


def _apply_fallbacks(conversation: Conversation, traits: TemplateTraits) -> Conversation:
    items = list(conversation.items)
    tools = conversation.tools
    if not traits.supports_tools:
        items, tools = _describe_tools_as_text(items, tools), None
    messages: list[Item] = []
    for item in items:
        previous = messages[-1] if messages else None
        if isinstance(item, ContextMessage):
            if item.message["role"] == "system" and not _supports_system_after(traits, messages):
                item = ContextMessage({**item.message, "role": "user"})
            role = item.message["role"]
            repeats = (
                traits.supports_late_system if role == "system" else traits.supports_repeated_roles or role == "tool"
            )
            if not repeats and isinstance(previous, ContextMessage) and previous.message["role"] == role:
                joined = f"{previous.message['content']}\n\n{item.message['content']}"
                messages[-1] = ContextMessage({**previous.message, "content": joined})
                continue
        elif not traits.supports_repeated_roles and isinstance(previous, ModelTurn):
            messages[-1] = _merge_turns(previous, item)
            continue
        messages.append(item)
    return Conversation(messages, tools, conversation.kwargs)


def _supports_system_after(traits: TemplateTraits, previous_items: Sequence[Item]) -> bool:
    """Whether a system message can follow these items. One that directly follows the first can be joined to it."""
    leading = all(isinstance(item, ContextMessage) and item.message["role"] == "system" for item in previous_items)
    return traits.supports_system if leading else traits.supports_late_system


def _merge_turns(first: ModelTurn, second: ModelTurn) -> ModelTurn:
    return ModelTurn(
        "\n\n".join(filter(None, (first.reasoning, second.reasoning))),
        "\n\n".join(filter(None, (first.text, second.text))),
        [*first.calls, *second.calls],
        [*first.parts, *second.parts],
    )


def _describe_tools_as_text(items: list[Item], tools: list[ToolSpec] | None) -> list[Item]:
    """Writes tools as text for a template without tools: listed in the system message, called and answered in tags."""
    spelled: list[Item] = []
    for item in items:
        if isinstance(item, ModelTurn) and item.calls:
            calls = "".join(f"\n<tool_call>\n{_format_call(call)}\n</tool_call>" for call in item.calls)
            spelled.append(ModelTurn(item.reasoning, (item.text + calls).lstrip("\n"), [], item.parts))
        elif isinstance(item, ContextMessage) and item.message["role"] == "tool":
            content = f"<tool_response>\n{item.message['content']}\n</tool_response>"
            previous = spelled[-1] if spelled else None
            if isinstance(previous, ContextMessage) and previous.message["content"].endswith("</tool_response>"):
                spelled[-1] = ContextMessage({"role": "user", "content": f"{previous.message['content']}\n{content}"})
            else:
                spelled.append(ContextMessage({"role": "user", "content": content}))
        else:
            spelled.append(item)
    if tools:
        tool_lines = "\n".join(tool.json for tool in tools)
        instructions = (
            "You can call functions. These are there, one JSON description a line:\n"
            f"<tools>\n{tool_lines}\n</tools>\n"
            'To call one, write <tool_call>{"name": its name, "arguments": {its arguments}}</tool_call>.'
        )
        first = spelled[0] if spelled else None
        if isinstance(first, ContextMessage) and first.message["role"] == "system":
            spelled[0] = ContextMessage({**first.message, "content": f"{first.message['content']}\n\n{instructions}"})
        else:
            spelled.insert(0, ContextMessage({"role": "system", "content": instructions}))
    return spelled


def _format_call(call: ToolCall) -> str:
    arguments = call.arguments or "{}"
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.encode(arguments).decode()
    return f'{{"name": {msgspec.json.encode(call.name).decode()}, "arguments": {arguments}}}'
