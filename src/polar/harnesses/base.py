"""A harness preset: what a known agent needs to talk to the gateway instead of its provider, and what is known of its
calls."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from polar.rollout.models import McpServer
from polar.trajectory.types import ExchangeRole


class Mark(Struct, frozen=True):
    """How a harness's calls of one role are told. All that is set must hold; texts are found anywhere in theirs."""

    role: ExchangeRole
    header: str | None = None  # in lower case
    value: str = ""  # in that header
    system: str | None = None  # in the system prompt
    last: str | None = None  # in the last message, where that is the user's


class Knowledge(Struct, frozen=True):
    """What is known of a harness's calls beyond their structure."""

    agents: tuple[str, ...] = ()
    """Headers that name the agent that is calling, in lower case. The first one that a call has counts."""

    subagents: tuple[str, ...] = ()
    """Headers that only calls of sub-agents have."""

    marks: tuple[Mark, ...] = ()

    @classmethod
    def union(cls, known: Iterable["Knowledge"]) -> "Knowledge":
        """For a harness that nobody named: it is one of these, or none."""
        every = list(known)
        return cls(
            tuple(header for one in every for header in one.agents),
            tuple(header for one in every for header in one.subagents),
            tuple(mark for one in every for mark in one.marks),
        )


class Wanted(Struct, frozen=True):
    """What a harness is set up for. Paths are as it sees them itself."""

    home: str  # its private HOME
    workdir: str
    gateway_url: str
    key: str
    model: str
    mcp_servers: tuple[McpServer, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's `agent.settings`: whatever this preset documents."""


class Setup(Struct, frozen=True):
    files: dict[str, str] = field(default_factory=dict)
    """Config files and their content, by their path below the home."""

    env: dict[str, str] = field(default_factory=dict)


class Package(Struct, frozen=True):
    """What `polar harness install` installs."""

    registry: Literal["npm", "pypi"]
    name: str
    version: str  # the default one, which our tests run
    executable: str  # the command that it brings
    beside: tuple[str, ...] = ()  # packages that it needs and does not ask for
    python: str = ""  # the oldest that it takes, for PyPI's


class Harness(Protocol):
    name: str
    executables: tuple[str, ...]
    """Commands that are told to be this harness."""

    default_model: str
    """A model name that the harness takes without complaint."""

    knowledge: Knowledge
    package: Package | None
    """None where there is nothing to install: `shell`."""

    skills: str | None
    """The folder below the home that it reads skills from; None where it has none."""

    takes_mcp: bool
    logs: tuple[str, ...]
    """Files and folders below the home that are kept with the session: what it wrote of its own run."""

    def setup(self, wanted: Wanted) -> Setup:
        """What it needs to talk to the gateway, quietly and without asking anybody for anything. Raises ConfigError
        where a setting is unknown."""
        ...

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        """Runs an instruction headless, to its end. The first word is the executable's name."""
        ...
