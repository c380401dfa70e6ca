"""Tools as an engine takes them: plain functions under flat names.

Harnesses bring more kinds than engines know. A custom (freeform) tool becomes a function with one string parameter
`input`; a tool in a namespace becomes `namespace__name`; hosted tools, which only the provider could run, are not
shown to the model. What the model calls is translated back before the harness sees it.
"""

import msgspec
from msgspec import Raw, Struct

from polar.types import Message, Part, ReplyEvent, Request, Tool, ToolCall, ToolCallDelta, ToolCallStart

_FREEFORM = Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
)


class _Input(Struct):
    input: str


def flatten_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def flatten_request(request: Request) -> Request:
    """The same request with plain function tools only; `request` itself where it has no others."""
    plain_tools = all(tool.kind == "function" and not tool.namespace for tool in request.tools)
    if plain_tools and not _has_special_calls(request):
        return request
    flat = msgspec.structs.replace(
        request,
        tools=[_flatten_tool(tool) for tool in request.tools if tool.kind != "hosted"],
        messages=[_flatten_message(message) for message in request.messages],
    )
    names = {tool.name: flatten_name(tool.namespace, tool.name) for tool in request.tools}
    if request.tool_choice.names:
        choice = request.tool_choice
        flat.tool_choice = msgspec.structs.replace(choice, names=[names.get(name, name) for name in choice.names])
    return flat


def _has_special_calls(request: Request) -> bool:
    for message in request.messages:
        if message.role == "assistant":
            for part in message.parts:
                if isinstance(part, ToolCall) and (part.kind == "custom" or part.namespace):
                    return True
    return False


def _flatten_tool(tool: Tool) -> Tool:
    parameters, description = tool.parameters, tool.description
    if tool.kind == "custom":
        parameters = _FREEFORM
        if tool.grammar is not None:
            description += f"\n\nFormat of `input`: {bytes(tool.grammar).decode()}"
    return Tool(flatten_name(tool.namespace, tool.name), description, parameters, strict=tool.strict)


def _flatten_message(message: Message) -> Message:
    if message.role != "assistant":
        return message
    return Message("assistant", flatten_parts(message.parts), message.name)


def flatten_parts(parts: list[Part]) -> list[Part]:
    return [_flatten_part(part) for part in parts]


def _flatten_part(part: Part) -> Part:
    if not isinstance(part, ToolCall) or (part.kind == "function" and not part.namespace):
        return part
    arguments = part.arguments
    if part.kind == "custom":
        arguments = msgspec.json.encode(_Input(arguments)).decode()
    return ToolCall(part.id, flatten_name(part.namespace, part.name), arguments)


class CallTranslator:
    """Turns calls of flat functions back into calls of the harness's own tools, event by event.

    A custom tool's input is handed on when its JSON is whole, since a harness wants the text inside. Input that does
    not parse is handed on as the model wrote it.
    """

    def __init__(self, tools: list[Tool]) -> None:
        self._special = {
            flatten_name(tool.namespace, tool.name): tool for tool in tools if tool.kind == "custom" or tool.namespace
        }
        self._held: list[str] | None = None

    def translate(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        if not self._special:
            return events
        out: list[ReplyEvent] = []
        for event in events:
            if isinstance(event, ToolCallDelta) and self._held is not None:
                self._held.append(event.arguments)
                continue
            out += self.flush()
            if isinstance(event, ToolCallStart) and (tool := self._special.get(event.name)) is not None:
                custom = tool.kind == "custom"
                out.append(
                    ToolCallStart(
                        event.id, tool.name, "custom" if custom else "function", tool.namespace, event.written
                    )
                )
                self._held = [] if custom else None
            else:
                out.append(event)
        return out

    def flush(self) -> list[ReplyEvent]:
        """What is held back, at the end of a call."""
        if self._held is None:
            return []
        text, self._held = "".join(self._held), None
        try:
            return [ToolCallDelta(msgspec.json.decode(text, type=_Input).input)]
        except (msgspec.DecodeError, RecursionError):
            return [ToolCallDelta(text)]
