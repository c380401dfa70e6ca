"""A harness preset: what a known agent needs to talk to the gateway instead of its provider, and what is known of its
calls. Below, what presets share: settings, config files, MCP servers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError
from polar.records.spans import ExchangeRole
from polar.records.task import McpServer


class RolePattern(Struct, frozen=True):
    """How a harness's calls of one role are told. All that is set must hold; texts are found anywhere in theirs."""

    role: ExchangeRole
    header: str | None = None  # in lower case
    header_text: str = ""  # in that header
    system_prompt: str | None = None  # in the system prompt
    last_user_message: str | None = None  # in the last message, where that is the user's


class CallPatterns(Struct, frozen=True):
    """What is known of a harness's calls beyond their structure."""

    agent_headers: tuple[str, ...] = ()
    """Headers that name the agent that is calling, in lower case. The first one that a call has counts."""

    subagent_headers: tuple[str, ...] = ()
    """Headers that only calls of sub-agents have."""

    role_patterns: tuple[RolePattern, ...] = ()

    @classmethod
    def union(cls, known: Iterable["CallPatterns"]) -> "CallPatterns":
        """For a harness that nobody named: it is one of these, or none."""
        every = list(known)
        return cls(
            tuple(header for one in every for header in one.agent_headers),
            tuple(header for one in every for header in one.subagent_headers),
            tuple(mark for one in every for mark in one.role_patterns),
        )


class SetupRequest(Struct, frozen=True):
    """What a harness is set up for. Paths are as it sees them itself."""

    home: str  # its private HOME
    workdir: str
    gateway_url: str
    key: str
    model: str
    mcp_servers: tuple[McpServer, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's `agent.settings`: whatever this preset documents."""


class HarnessSetup(Struct, frozen=True):
    files: dict[str, str] = field(default_factory=dict)
    """Config files and their content, by their path below the home."""

    env: dict[str, str] = field(default_factory=dict)


class Package(Struct, frozen=True):
    """What `polar harness install` installs."""

    registry: Literal["npm", "pypi"]
    name: str
    version: str  # the default one, which our tests run
    executable: str  # the command that it brings
    extra_packages: tuple[str, ...] = ()  # packages that it needs and does not ask for
    requires_python: str = ""  # the oldest that it takes, for PyPI's


class Harness(Protocol):
    name: str
    executables: tuple[str, ...]
    """Commands that are told to be this harness."""

    default_model: str
    """A model name that the harness takes without complaint."""

    call_patterns: CallPatterns
    package: Package | None
    """None where there is nothing to install: `shell`."""

    skills_folder: str | None
    """The folder below the home that it reads skills from; None where it has none."""

    supports_mcp: bool
    log_paths: tuple[str, ...]
    """Files and folders below the home that are kept with the session: what it wrote of its own run."""

    def setup(self, request: SetupRequest) -> HarnessSetup:
        """What it needs to talk to the gateway, quietly and without asking anybody for anything. Raises ConfigError
        where a setting is unknown."""
        ...

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        """Runs an instruction headless, to its end. The first word is the executable's name."""
        ...


# A task's `agent.settings`.


class CommonSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What every preset takes."""

    args: list[str] = field(default_factory=list)
    """Further words for its command line."""

    json: bool = True
    """Whether it writes its run as events, where it can; else what a person reads."""


SettingsT = TypeVar("SettingsT", bound=Struct)


def read_settings(harness: str, settings: dict[str, Any], kind: type[SettingsT]) -> SettingsT:
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"The settings of {harness} can't be used: {error}. It takes: {known}.") from error


# Config files.


def encode_json(content: Any) -> str:
    """Any: the content is a document in the harness's own format."""
    return json.dumps(content, indent=2) + "\n"


def quote_toml_string(text: str) -> str:
    """A JSON string is a TOML string, too, but for characters that either spells in its own way."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_setup(setup: HarnessSetup, home: Path) -> None:
    for name, content in setup.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


# MCP servers, as config files write them.


def resolve_transport(server: McpServer) -> Literal["stdio", "http", "sse"]:
    return server.transport or ("stdio" if server.command is not None else "http")


def build_server_table(servers: tuple[McpServer, ...]) -> dict[str, dict[str, Any]]:
    """The table that most of them have. Any: a document in their format."""
    return {server.name: _build_entry(server) for server in servers}


def _build_entry(server: McpServer) -> dict[str, Any]:
    if server.command is not None:
        return {"type": "stdio", "command": server.command, "args": server.args, "env": server.env}
    return {"type": resolve_transport(server), "url": server.url, "headers": server.headers}


def build_google_server_table(servers: tuple[McpServer, ...]) -> dict[str, dict[str, Any]]:
    """The same in gemini-cli's format, which qwen-code has as well: the field says the transport."""
    return {server.name: _build_google_entry(server) for server in servers}


def _build_google_entry(server: McpServer) -> dict[str, Any]:
    if server.command is not None:
        return {"command": server.command, "args": server.args, "env": server.env}
    return {"url" if resolve_transport(server) == "sse" else "httpUrl": server.url, "headers": server.headers}
