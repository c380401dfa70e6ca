"""A harness preset: what a known agent needs to talk to the gateway instead of its provider."""

from pathlib import Path
from typing import Protocol


class Harness(Protocol):
    name: str
    executables: tuple[str, ...]
    """Commands that are told to be this harness."""

    default_model: str
    """A model name that the harness takes without complaint."""

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        """Writes the config files it needs below `home` (its private HOME) and returns its environment variables."""
        ...

    def command(self, instruction: str) -> list[str]:
        """Runs an instruction headless, to its end."""
        ...
