"""Fits "run this" and "write that file" to whatever tools a harness offers, told by the tools' JSON schemas.

A schema is a document of the harness's making, so it is plain data here; nothing in it is taken for granted.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

Schema = Mapping[str, Any]


class OfferedTool(Struct, frozen=True):
    name: str
    parameters: Schema

    @property
    def properties(self) -> Mapping[str, Schema]:
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping):
            return {}
        return {name: schema if isinstance(schema, Mapping) else {} for name, schema in properties.items()}

    @property
    def required(self) -> Sequence[str]:
        required = self.parameters.get("required")
        return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


class ScriptedCall(Struct):
    name: str
    arguments: dict[str, Any] = {}


def read_offered_tools(tools: Iterable[Any] | None) -> list[OfferedTool]:
    """The function tools of a chat request."""
    offered = []
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            offered.append(OfferedTool(name, parameters if isinstance(parameters, Mapping) else {}))
    return offered


_COMMAND = ("command", "cmd")
_PATH = ("file_path", "path", "filePath", "absolute_path", "filename")
_CONTENT = ("content", "contents", "file_text", "text")
_SHELL_NAMES = ("bash", "shell", "exec", "terminal", "run")


def make_shell_call(tools: Sequence[OfferedTool], command: str) -> ScriptedCall | None:
    """A call that runs `command` in a shell, or None where no tool does that."""
    candidates = []
    for tool in tools:
        key = next((name for name in _COMMAND if name in tool.properties), None)
        # A `command` with fixed values is an editor's verb; one that may be left out is some other tool's extra.
        if key is not None and key in tool.required and "enum" not in tool.properties[key]:
            shell_like = any(word in tool.name.lower() for word in _SHELL_NAMES)
            candidates.append((not shell_like, tool, key))
    if not candidates:
        return None
    _, tool, key = min(candidates, key=lambda candidate: candidate[0])
    words = _type(tool.properties[key]) == "array"
    return _fill_required(tool, {key: ["bash", "-lc", command] if words else command})


def make_write_call(tools: Sequence[OfferedTool], path: str, content: str) -> ScriptedCall | None:
    """A call that writes a file: with a tool made for it, else in a shell."""
    for tool in tools:
        path_key = next((name for name in _PATH if name in tool.required), None)
        content_key = next((name for name in _CONTENT if name in tool.required), None)
        if path_key is not None and content_key is not None:
            return _fill_required(tool, {path_key: path, content_key: content})
    command = f"printf %s {shlex.quote(content)} > {shlex.quote(path)}"
    return make_shell_call(tools, command)


def make_any_call(tool: OfferedTool) -> ScriptedCall:
    """A call of that tool with plausible arguments, for requests that force one."""
    return _fill_required(tool, {})


def _fill_required(tool: OfferedTool, arguments: dict[str, Any]) -> ScriptedCall:
    for name in tool.required:
        if name not in arguments:
            arguments[name] = _plausible_value(name, tool.properties.get(name, {}))
    return ScriptedCall(tool.name, arguments)


def _type(schema: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), None)
    if isinstance(kind, str):
        return kind.lower()  # Google's schemas say STRING
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            return _type(choices[0])
    return "string"


def _plausible_value(name: str, schema: Schema) -> Any:
    if "default" in schema:
        return schema["default"]
    if "const" in schema:
        return schema["const"]
    if isinstance(values := schema.get("enum"), list) and values:
        return values[0]
    kind = _type(schema)
    if kind == "boolean":
        return False
    if kind in ("integer", "number"):
        seconds = 60 if "time" in name.lower() else 1
        return seconds * 1000 if name.lower().endswith("ms") else seconds
    if kind == "array":
        return []
    if kind == "object":
        return _fill_required(OfferedTool(name, schema), {}).arguments
    if any(word in name.lower() for word in ("path", "dir", "cwd")):
        return "."
    return "run it"
