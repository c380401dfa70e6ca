"""A harness preset: what a known agent needs to talk to the gateway instead of its provider, and what is known of its
calls."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

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


class Harness(Protocol):
    name: str
    executables: tuple[str, ...]
    """Commands that are told to be this harness."""

    default_model: str
    """A model name that the harness takes without complaint."""

    knowledge: Knowledge

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        """Writes the config files it needs below `home` (its private HOME) and returns its environment variables."""
        ...

    def command(self, instruction: str) -> list[str]:
        """Runs an instruction headless, to its end."""
        ...
