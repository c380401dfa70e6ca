"""Plug-ins, found by name: one entry-point group per kind, built-ins registered the same way (see pyproject.toml).

    installed distributions -> entry points -> import -> shape check -> the object that the entry point names

A plug-in that can't be imported, or lacks what its kind's Protocol asks for, is named in one line and left out. It
never stops what does not use it; whoever asks for it by name gets that line as the error. What a plug-in does when it
is used is for the contract suites of `polar.testing` to check.
"""

import importlib
import inspect
import logging
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, Literal, NamedTuple, cast, get_args

from polar.distribution import DISTRIBUTION
from polar.errors import ConfigError

log = logging.getLogger(__name__)

PluginKind = Literal[
    "dialects", "engines", "harnesses", "runtimes", "evaluators", "builders", "exporters", "bridges", "weight_sync"
]
PLUGIN_KINDS: tuple[PluginKind, ...] = get_args(PluginKind)

_GROUP_PREFIX = "polar."
_PROTOCOLS: dict[PluginKind, str] = {
    "dialects": "polar.dialects.base:Dialect",
    "engines": "polar.engines.base:Engine",
    "harnesses": "polar.harnesses.base:Harness",
    "runtimes": "polar.runtimes.base:RuntimeBackend",
    "evaluators": "polar.evaluators.base:Evaluator",
    "exporters": "polar.export.base:Exporter",
    "bridges": "polar.bridges.bridge:Bridge",
    "weight_sync": "polar.weight_sync.base:WeightTransport",
}
"""What a plug-in is a class of, by name, since this module imports nothing above it. Builders are functions."""

_READ_FROM_CLASS: frozenset[PluginKind] = frozenset(("harnesses",))
"""Kinds whose attributes are read from the class: `polar capture` asks every harness for its commands."""


class PluginError(ConfigError):
    """A plug-in is installed and can't be used."""


class InstalledPlugin(NamedTuple):
    """An entry point, and the distribution that brings it."""

    kind: PluginKind
    name: str
    distribution: str
    version: str
    entry_point: EntryPoint

    @property
    def source(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def make_error(self, reason: str) -> PluginError:
        return PluginError(
            f"The plug-in {self.name!r} ({_GROUP_PREFIX}{self.kind}) of {self.source} can't be used: "
            f"{self.entry_point.value}: {reason}"
        )


@cache
def load(kind: PluginKind, name: str) -> Any:
    """The plug-in of that name. Raises ConfigError: PluginError with the reason where it can't be used, else with the
    known names."""
    if (plugin := _find_installed(kind).get(name)) is not None:
        loaded = _import_plugin(plugin)
        if isinstance(loaded, PluginError):
            raise PluginError(str(loaded)) from loaded.__cause__
        return loaded
    if not name.isidentifier() and (":" in name or "." in name):
        raise ConfigError(
            f"{name!r} is an import path, and plug-ins are found by name: install it as an entry point of polar.{kind}."
        )
    known = ", ".join(list_names(kind)) or "none"
    raise ConfigError(f"Among the {kind} there is no {name!r}; known: {known}.")


@cache
def load_all(kind: PluginKind) -> dict[str, Any]:
    """Every plug-in of a kind that can be used, by name. The others are logged, once, a line each."""
    loaded = {}
    for name in list_names(kind):
        try:
            loaded[name] = load(kind, name)
        except PluginError as error:
            log.warning("Left out: %s", error)
    return loaded


@cache
def list_names(kind: PluginKind) -> tuple[str, ...]:
    """Of what is installed. Nothing is imported, so some may turn out to be unusable."""
    return tuple(sorted(_find_installed(kind)))


def list_problems() -> list[str]:
    """Why installed plug-ins can't be used, a line each. Imports all of them."""
    loaded = [_import_plugin(plugin) for kind in PLUGIN_KINDS for plugin in _find_installed(kind).values()]
    return [*_take_inventory().problems, *(str(one) for one in loaded if isinstance(one, PluginError))]


def clear_cache() -> None:
    """Forgets what was found, for programs that install plug-ins while they run."""
    for function in (load, load_all, list_names, _import_plugin, _take_inventory):
        function.cache_clear()


# What is installed


class _Inventory(NamedTuple):
    plugins: dict[PluginKind, dict[str, InstalledPlugin]]
    problems: list[str]  # of what is left out before anything is imported


def _find_installed(kind: PluginKind) -> dict[str, InstalledPlugin]:
    return _take_inventory().plugins[kind]


@cache
def _take_inventory() -> _Inventory:
    """Of several plug-ins with one name, Polar's own is taken, else that of the distribution whose name comes first."""
    found: dict[str, list[InstalledPlugin]] = {}  # the first distribution of a name hides others, as for imports
    problems = []
    for distribution in distributions():
        try:
            plugins = _read_entry_points(distribution)
        except Exception as error:  # noqa: BLE001  whatever stands in a file of somebody else's
            problems.append(f"The entry points of a package in {distribution.locate_file('')} can't be read: {error}")
            continue
        if plugins:
            found.setdefault(plugins[0].distribution, plugins)
    inventory = _Inventory({kind: {} for kind in PLUGIN_KINDS}, problems)
    for distribution_name in sorted(found, key=lambda name: (name != DISTRIBUTION, name)):
        for plugin in found[distribution_name]:
            used = inventory.plugins[plugin.kind].setdefault(plugin.name, plugin)
            if used.entry_point.value != plugin.entry_point.value:  # else an older name of the same distribution
                reason = f"{used.source} has a plug-in of that name, which is used instead."
                problems.append(str(plugin.make_error(reason)))
    for problem in problems:
        log.warning("Left out: %s", problem)
    return inventory


def _read_entry_points(distribution: Distribution) -> list[InstalledPlugin]:
    if _GROUP_PREFIX not in (distribution.read_text("entry_points.txt") or ""):
        return []
    name, version = distribution.metadata["Name"] or "an unnamed package", distribution.metadata["Version"] or ""
    return [
        InstalledPlugin(cast(PluginKind, entry.group.removeprefix(_GROUP_PREFIX)), entry.name, name, version, entry)
        for entry in distribution.entry_points
        if entry.group.startswith(_GROUP_PREFIX) and entry.group.removeprefix(_GROUP_PREFIX) in PLUGIN_KINDS
    ]


# Whether it can be used


@cache
def _import_plugin(plugin: InstalledPlugin) -> Any:
    """The plug-in, or the PluginError of one that can't be used: what failed once is not imported again."""
    try:
        loaded = plugin.entry_point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  code of somebody else's
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        failure = plugin.make_error(" ".join(reason.split()))
        failure.__cause__ = error
        return failure
    problem = find_shape_problem(plugin.kind, loaded)
    return loaded if problem is None else plugin.make_error(problem)


def find_shape_problem(kind: PluginKind, loaded: Any) -> str | None:
    """What is missing for it to be a plug-in of this kind; None where nothing is. Attributes that only instances have
    can't be seen here: the contract suites look at those."""
    if kind not in _PROTOCOLS:
        return None if callable(loaded) else f"{loaded!r} is no function."
    module, _, name = _PROTOCOLS[kind].partition(":")
    if not inspect.isclass(loaded):
        return f"{loaded!r} is no class; {kind} are classes that have what {module}.{name} has."
    protocol = getattr(importlib.import_module(module), name)
    needed = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")}
    if kind in _READ_FROM_CLASS:
        needed |= inspect.get_annotations(protocol).keys()
    missing = sorted(member for member in needed if not hasattr(loaded, member))
    return f"it lacks {', '.join(missing)}, which {module}.{name} has." if missing else None
