"""Tools, and how the model is to choose among them.

Besides a harness's own tools there are Anthropic's. Some of them run at the harness, but their schemas are known to
Anthropic's models alone (`bash_20250124`): another model has to be told them, so they are written down here. Others run
on Anthropic's servers (`web_search_20250305`): those are `hosted`.
"""

import re

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from polar.dialects.anthropic.wire import WireTool, WireToolChoice
from polar.dialects.base import join_namespace
from polar.dialects.raw_fields import make_unsupported_field_error
from polar.errors import ApiError
from polar.types import Request, Tool, ToolChoice

_EMPTY_SCHEMA = Raw(b'{"type":"object","properties":{}}')
_FREEFORM_SCHEMA = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')

_SERVER_TOOL_PATTERN = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool\w*?|advisor)_\d{8}")
"""Types of tools that Anthropic runs; the group is the name under which the model calls one."""


# Reading.


def decode_tools(tools: list[WireTool], loaded_tools: set[str]) -> list[Tool]:
    """The tools that the model sees: deferred ones only once a tool_reference has brought them in.

    Where the search over deferred tools is Anthropic's own, nobody can run it here: all of them are shown.
    """
    searched = any((tool.type or "").startswith("tool_search_tool") for tool in tools)
    shown = []
    for index, tool in enumerate(tools):
        canonical = _decode_tool(tool, f"tools[{index}]")
        if searched or not tool.defer_loading or canonical.name in loaded_tools:
            shown.append(canonical)
    return shown


def require_json_object(raw: Raw | UnsetType, where: str) -> Raw:
    if raw is UNSET or bytes(memoryview(raw)[:1]) != b"{":
        raise ApiError("invalid_request", f"{where}: a JSON schema (an object) is required.", param=where)
    return raw


def decode_tool_choice(choice: WireToolChoice | None) -> tuple[ToolChoice, bool | None]:
    """The choice, and whether several calls at once are wanted."""
    if choice is None:
        return ToolChoice(), None
    if choice.type == "none":
        return ToolChoice("none"), None
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if choice.type == "auto":
        return ToolChoice(), parallel
    if choice.type == "any":
        return ToolChoice("required"), parallel
    if not choice.name:
        raise ApiError("invalid_request", "tool_choice.name: Field required.", param="tool_choice.name")
    return ToolChoice("named", [choice.name]), parallel


def _decode_tool(tool: WireTool, where: str) -> Tool:
    if tool.type is not None and _SERVER_TOOL_PATTERN.fullmatch(tool.type):
        return Tool(tool.type, kind="hosted")
    if not tool.name:
        raise ApiError("invalid_request", f"{where}.name: Field required.", param=f"{where}.name")
    if tool.type in (None, "custom"):
        schema = require_json_object(tool.input_schema, f"{where}.input_schema")
        return Tool(tool.name, _describe_tool(tool), schema, strict=tool.strict)
    known = _CLIENT_TOOLS.get(tool.type)
    if known is None:
        raise make_unsupported_field_error(
            where, f"a tool of type {tool.type!r} has no schema that a model could be shown"
        )
    return Tool(tool.name, known.description, known.schema, strict=tool.strict)


def _describe_tool(tool: WireTool) -> str:
    description = tool.description or ""
    if tool.input_examples is UNSET or bytes(tool.input_examples) in (b"null", b"[]"):
        return description
    # Anthropic shows the examples to the model beside the description.
    return f"{description}\n\nExamples of input: {bytes(tool.input_examples).decode()}".lstrip()


# Writing.


def encode_tools(request: Request) -> tuple[list[WireTool], WireToolChoice | None]:
    """The API can force one tool, or any; a choice among some of them is said by offering no others."""
    tools, choice, parallel = request.tools, request.tool_choice, request.parallel_tool_calls
    disable = None if parallel is None else not parallel
    if choice.mode == "none":
        wanted = WireToolChoice("none")
    elif choice.mode == "named" and len(choice.names) == 1:
        namespaces = {tool.name: tool.namespace for tool in tools}
        (name,) = choice.names
        wanted = WireToolChoice("tool", join_namespace(namespaces.get(name), name), disable)
    else:
        if choice.names:
            tools = [tool for tool in tools if tool.name in choice.names]
        wanted = WireToolChoice("any" if choice.forces_call else "auto", None, disable)
    offered = [wire for wire in map(_encode_tool, tools) if wire is not None]
    return offered, None if wanted == WireToolChoice("auto") else wanted


def _encode_tool(tool: Tool) -> WireTool | None:
    """None for another provider's hosted tool, for which there is no word here."""
    if tool.kind == "hosted":
        server = _SERVER_TOOL_PATTERN.fullmatch(tool.name)
        return WireTool(server[1], tool.name) if server else None
    description, schema = tool.description, tool.parameters or _EMPTY_SCHEMA
    if tool.kind == "custom":
        schema = _FREEFORM_SCHEMA
        if tool.grammar is not None:
            description = f"{description}\n\nThe format of `input`: {bytes(tool.grammar).decode()}".lstrip()
    name = join_namespace(tool.namespace, tool.name)
    return WireTool(name, description=description or None, input_schema=schema, strict=tool.strict)


# Anthropic's tools that run at the harness.


class _ClientTool(Struct, frozen=True):
    description: str
    schema: Raw


def _make_object_schema(required: list[str], **properties: dict[str, object]) -> Raw:
    return Raw(msgspec.json.encode({"type": "object", "properties": properties, "required": required}))


def _make_string_schema(description: str) -> dict[str, object]:
    return {"type": "string", "description": description}


def _make_command_schema(*names: str) -> dict[str, object]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


_LINE: dict[str, object] = {
    "type": "integer",
    "description": "For `insert`: the line after which the text goes in; 0 is the top.",
}
_RANGE: dict[str, object] = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For `view` of a file: first and last line, counted from 1; -1 as the last means to the end.",
}

_BASH = _ClientTool(
    "Runs a command in a bash session that keeps its state from call to call.",
    _make_object_schema(
        [],
        command=_make_string_schema("The command to run; needed unless the session is restarted."),
        restart={"type": "boolean", "description": "Start the session anew instead of running a command."},
    ),
)


def _make_editor_tool(commands: tuple[str, ...], insert_parameter: str) -> _ClientTool:
    """`insert_parameter` is the one that holds the text of `insert`: it was renamed in the version of July 2025."""
    properties: dict[str, dict[str, object]] = {
        "command": _make_command_schema(*commands),
        "path": _make_string_schema("The file or directory."),
        "file_text": _make_string_schema("For `create`: the whole text of the file."),
        "old_str": _make_string_schema("For `str_replace`: the text to replace; it must occur exactly once."),
        "new_str": _make_string_schema("For `str_replace`: the text to put in its place."),
        "insert_line": _LINE,
        "view_range": _RANGE,
    }
    if insert_parameter == "new_str":
        properties["new_str"] = _make_string_schema("For `str_replace` and `insert`: the new text.")
    else:
        properties[insert_parameter] = _make_string_schema("For `insert`: the text to insert.")
    return _ClientTool("Views, creates and edits text files.", _make_object_schema(["command", "path"], **properties))


_MEMORY = _ClientTool(
    "Keeps notes from one conversation to the next, as files under /memories.",
    _make_object_schema(
        ["command"],
        command=_make_command_schema("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_make_string_schema("The file or directory; needed by every command but `rename`."),
        view_range=_RANGE,
        file_text=_make_string_schema("For `create`: the whole text of the file."),
        old_str=_make_string_schema("For `str_replace`: the text to replace."),
        new_str=_make_string_schema("For `str_replace`: the text to put in its place."),
        insert_line=_LINE,
        insert_text=_make_string_schema("For `insert`: the text to insert."),
        old_path=_make_string_schema("For `rename`: the present path."),
        new_path=_make_string_schema("For `rename`: the new path."),
    ),
)

_EDIT_COMMANDS = ("view", "create", "str_replace", "insert")
_CLIENT_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _make_editor_tool((*_EDIT_COMMANDS, "undo_edit"), "new_str"),
    "text_editor_20250124": _make_editor_tool((*_EDIT_COMMANDS, "undo_edit"), "new_str"),
    "text_editor_20250429": _make_editor_tool(_EDIT_COMMANDS, "new_str"),
    "text_editor_20250728": _make_editor_tool(_EDIT_COMMANDS, "insert_text"),
    "memory_20250818": _MEMORY,
}
