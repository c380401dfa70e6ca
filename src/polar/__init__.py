"""Polar: reinforcement learning for language agents, without opening the agent."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar.api import run
    from polar.client.async_client import AsyncClient, ClientError
    from polar.client.submission import TasksRefused
    from polar.client.sync_client import Client

__all__ = ["AsyncClient", "Client", "ClientError", "TasksRefused", "run"]

_MODULES = {
    "AsyncClient": "polar.client.async_client",
    "Client": "polar.client.sync_client",
    "ClientError": "polar.client.async_client",
    "TasksRefused": "polar.client.submission",
    "run": "polar.api",
}


def __getattr__(name: str) -> Any:
    """What programs call is imported when they do: commands, sandboxes and plug-ins import this package, too."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
