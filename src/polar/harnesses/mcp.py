"""MCP servers as harnesses' config files write them."""

from typing import Any, Literal

from polar.records.task import McpServer


def resolve_transport(server: McpServer) -> Literal["stdio", "http", "sse"]:
    return server.transport or ("stdio" if server.command is not None else "http")


def build_server_table(servers: tuple[McpServer, ...]) -> dict[str, dict[str, Any]]:
    """The table that most of them have. Any: a document in their format."""
    return {server.name: _entry(server) for server in servers}


def _entry(server: McpServer) -> dict[str, Any]:
    if server.command is not None:
        return {"type": "stdio", "command": server.command, "args": server.args, "env": server.env}
    return {"type": resolve_transport(server), "url": server.url, "headers": server.headers}


def build_google_server_table(servers: tuple[McpServer, ...]) -> dict[str, dict[str, Any]]:
    """The same in gemini-cli's format, which qwen-code has as well: the field says the transport."""
    return {server.name: _google_entry(server) for server in servers}


def _google_entry(server: McpServer) -> dict[str, Any]:
    if server.command is not None:
        return {"command": server.command, "args": server.args, "env": server.env}
    return {"url" if resolve_transport(server) == "sse" else "httpUrl": server.url, "headers": server.headers}
