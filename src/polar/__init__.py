"""Polar: reinforcement learning for language agents, without opening the agent.

    polar.run(tasks, engine=...)                       sessions in this process, and their results
    with polar.capture(engine=...) as session: ...     a gateway for this program, and its trajectory
    with polar.Client(url, token) as client: ...       tasks to a service, and results from it
    async with polar.AsyncClient(url, token) ...       the same with an event loop

A TaskRequest is what to run. TaskStatus and SessionResult are what comes back, and a Trace is a sequence of tokens in a
result to train on. PolarError is the base of all errors; ClientError and TasksRefused are those of the clients.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar.api.capture import capture
    from polar.api.run import run
    from polar.client.async_client import AsyncClient, ClientError
    from polar.client.submission import TasksRefused
    from polar.client.sync_client import Client
    from polar.errors import PolarError
    from polar.records.result import SessionResult, TaskStatus
    from polar.records.result import TraceResult as Trace
    from polar.records.task import TaskRequest

    __version__: str

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "PolarError",
    "SessionResult",
    "TaskRequest",
    "TaskStatus",
    "TasksRefused",
    "Trace",
    "__version__",
    "capture",
    "run",
]

_LAZY_NAMES = {
    "AsyncClient": "polar.client.async_client:AsyncClient",
    "Client": "polar.client.sync_client:Client",
    "ClientError": "polar.client.async_client:ClientError",
    "PolarError": "polar.errors:PolarError",
    "SessionResult": "polar.records.result:SessionResult",
    "TaskRequest": "polar.records.task:TaskRequest",
    "TaskStatus": "polar.records.result:TaskStatus",
    "TasksRefused": "polar.client.submission:TasksRefused",
    "Trace": "polar.records.result:TraceResult",
    "capture": "polar.api.capture:capture",
    "run": "polar.api.run:run",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: commands, sandboxes and plug-ins import this package, too."""
    value: Any
    if name == "__version__":
        from polar.distribution import installed_version

        value = installed_version()
    elif name in _LAZY_NAMES:
        module, _, attribute = _LAZY_NAMES[name].partition(":")
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
