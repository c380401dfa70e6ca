"""Tools of the Responses API: functions, custom tools, namespaces of both, and a search that the harness runs itself.

The model sees such a search as a function, `tool_search`. All other tools of the provider's own are hosted: recorded,
and not shown.
"""

from collections.abc import Iterator, Sequence

from polar.dialects import openai_responses_wire as w
from polar.dialects import wire
from polar.errors import ApiError
from polar.types import UNSET, Request, Tool, ToolChoice, UnsetType

TOOL_SEARCH = "tool_search"


def is_client_search(tool: w.ToolIn) -> bool:
    return tool.type == TOOL_SEARCH and tool.execution == "client"


def decode_tool(wire_tool: w.ToolIn, where: str, namespace: str | None = None) -> Iterator[Tool]:
    description = wire_tool.description or ""
    if wire_tool.type == "function" or wire_tool.type == "custom":
        if not wire_tool.name:
            raise ApiError("invalid_request", f"{where}.name is required.", param=f"{where}.name")
        tool = Tool(wire_tool.name, description, namespace=namespace)
        if wire_tool.type == "custom":
            tool.kind, tool.grammar = "custom", w.null_to_none(wire_tool.format)
        else:
            tool.parameters, tool.strict = w.null_to_none(wire_tool.parameters), wire_tool.strict
        yield tool
    elif wire_tool.type == "namespace":
        if not wire_tool.name or namespace is not None:
            raise ApiError(
                "invalid_request", f"{where}: a namespace has a name, and no namespaces inside.", param=where
            )
        for index, inner in enumerate(wire_tool.tools or ()):
            for tool in decode_tool(inner, f"{where}.tools[{index}]", wire_tool.name):
                if index == 0 and description and tool.kind != "hosted":
                    # said once, where the model first reads of the namespace
                    tool.description = f"{description}\n\n{tool.description}"
                yield tool
    elif is_client_search(wire_tool):
        yield Tool(TOOL_SEARCH, description, w.null_to_none(wire_tool.parameters))
    else:
        yield Tool(wire_tool.type, kind="hosted", namespace=namespace)


def decode_tool_choice(choice: str | w.ToolChoiceIn | None) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return ToolChoice("required")
    if isinstance(choice, w.ToolChoiceIn):
        if choice.type in ("function", "custom") and (name := _chosen_name(choice)):
            return ToolChoice("named", [name])
        if choice.type == "allowed_tools" and choice.mode in ("auto", "required"):
            # The provider's own tools stand in the list without a name; no engine has them.
            names = [name for tool in choice.tools or () if (name := _chosen_name(tool))]
            if choice.mode == "required" and names:
                return ToolChoice("named", names)
            if choice.mode == "auto":
                return ToolChoice("auto", names) if names else ToolChoice("none")
        elif choice.type not in ("function", "custom", "allowed_tools"):
            raise wire.unsupported_field_error("tool_choice", f"no engine has the provider's own tool `{choice.type}`")
    raise ApiError("invalid_request", "`tool_choice` names no mode and no tool.", param="tool_choice")


def _chosen_name(choice: w.ToolChoiceIn) -> str | None:
    return choice.name or (choice.function.name if choice.function else None)


def encode_tools(tools: Sequence[Tool]) -> Iterator[w.ToolOut]:
    """Neighbours of one namespace go back into it. A function that never said whether it is strict says null: left
    out, it would be."""
    space: w.ToolOut | None = None
    for tool in tools:
        out = w.ToolOut(tool.kind, tool.name, tool.description or UNSET)
        if tool.kind == "function":
            out.parameters, out.strict = w.none_to_unset(tool.parameters), tool.strict
        elif tool.kind == "custom":
            out.format = w.none_to_unset(tool.grammar)
        else:
            out = w.ToolOut(tool.name)
        if tool.namespace is None:
            space = None
            yield out
        elif space is not None and space.name == tool.namespace and space.tools is not UNSET:
            space.tools.append(out)
        else:
            space = w.ToolOut("namespace", tool.namespace, "", tools=[out])
            yield space


def encode_tool_choice(request: Request) -> str | w.ToolChoiceOut | UnsetType:
    choice = request.tool_choice
    if choice.mode == "none" or choice.mode == "required":
        return choice.mode
    if not choice.names:
        return UNSET if choice.mode == "auto" else "required"
    custom = {tool.name for tool in request.tools if tool.kind == "custom"}
    named = [w.ToolChoiceOut("custom" if name in custom else "function", name) for name in choice.names]
    if choice.mode == "named" and len(named) == 1:
        return named[0]
    return w.ToolChoiceOut("allowed_tools", mode="auto" if choice.mode == "auto" else "required", tools=named)
