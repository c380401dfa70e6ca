"""Plug-ins, found by name: one entry-point group per kind, built-ins registered the same way (see pyproject.toml)."""

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

from polar.errors import ConfigError

PluginKind = Literal[
    "dialects", "engines", "harnesses", "runtimes", "evaluators", "builders", "exporters", "bridges", "weight_sync"
]


@cache
def load(kind: PluginKind, name: str) -> Any:
    """The plug-in of that name; the error lists the known ones."""
    for entry in entry_points(group=f"polar.{kind}"):
        if entry.name == name:
            return entry.load()
    if not name.isidentifier() and (":" in name or "." in name):
        raise ConfigError(
            f"{name!r} is an import path, and plug-ins are found by name: install it as an entry point of polar.{kind}."
        )
    known = ", ".join(names(kind)) or "none"
    raise ConfigError(f"Among the {kind} there is no {name!r}; known: {known}.")


@cache
def names(kind: PluginKind) -> tuple[str, ...]:
    return tuple(sorted({entry.name for entry in entry_points(group=f"polar.{kind}")}))
