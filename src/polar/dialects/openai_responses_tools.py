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


def runs_search(tool: w.ToolIn) -> bool:
    return tool.type == TOOL_SEARCH and tool.execution == "client"


def decode_tool(found: w.ToolIn, where: str, namespace: str | None = None) -> Iterator[Tool]:
    description = found.description or ""
    if found.type == "function" or found.type == "custom":
        if not found.name:
            raise ApiError("invalid_request", f"{where}.name is required.", param=f"{where}.name")
        tool = Tool(found.name, description, namespace=namespace)
        if found.type == "custom":
            tool.kind, tool.grammar = "custom", w.given(found.format)
        else:
            tool.parameters, tool.strict = w.given(found.parameters), found.strict
        yield tool
    elif found.type == "namespace":
        if not found.name or namespace is not None:
            raise ApiError(
                "invalid_request", f"{where}: a namespace has a name, and no namespaces inside.", param=where
            )
        for index, inner in enumerate(found.tools or ()):
            for tool in decode_tool(inner, f"{where}.tools[{index}]", found.name):
                if index == 0 and description and tool.kind != "hosted":
                    # said once, where the model first reads of the namespace
                    tool.description = f"{description}\n\n{tool.description}"
                yield tool
    elif runs_search(found):
        yield Tool(TOOL_SEARCH, description, w.given(found.parameters))
    else:
        yield Tool(found.type, kind="hosted", namespace=namespace)


def decode_choice(choice: str | w.ToolChoiceIn | None) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return ToolChoice("required")
    if isinstance(choice, w.ToolChoiceIn):
        if choice.type in ("function", "custom") and (name := _chosen(choice)):
            return ToolChoice("named", [name])
        if choice.type == "allowed_tools" and choice.mode in ("auto", "required"):
            # The provider's own tools stand in the list without a name; no engine has them.
            names = [name for tool in choice.tools or () if (name := _chosen(tool))]
            if choice.mode == "required" and names:
                return ToolChoice("named", names)
            if choice.mode == "auto":
                return ToolChoice("auto", names) if names else ToolChoice("none")
        elif choice.type not in ("function", "custom", "allowed_tools"):
            raise wire.unsupported("tool_choice", f"no engine has the provider's own tool `{choice.type}`")
    raise ApiError("invalid_request", "`tool_choice` names no mode and no tool.", param="tool_choice")


def _chosen(choice: w.ToolChoiceIn) -> str | None:
    return choice.name or (choice.function.name if choice.function else None)


def encode_tools(tools: Sequence[Tool]) -> Iterator[w.ToolOut]:
    """Neighbours of one namespace go back into it. A function that never said whether it is strict says null: left
    out, it would be."""
    space: w.ToolOut | None = None
    for tool in tools:
        out = w.ToolOut(tool.kind, tool.name, tool.description or UNSET)
        if tool.kind == "function":
            out.parameters, out.strict = w.said(tool.parameters), tool.strict
        elif tool.kind == "custom":
            out.format = w.said(tool.grammar)
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


def encode_choice(request: Request) -> str | w.ToolChoiceOut | UnsetType:
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
