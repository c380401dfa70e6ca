"""Polar: reinforcement learning for language agents, without opening the agent."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar.api import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    """What programs call is imported when they do: commands, sandboxes and plug-ins import this package, too."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polar.api import run

    return run
