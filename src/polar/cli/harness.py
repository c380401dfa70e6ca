"""polar harness: installs known harnesses into a cache, from which any runtime is given them."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from polar.cli.common import config_option, json_option, load_settings, run_async
from polar.errors import ConfigError
from polar.harnesses import load_harness
from polar.harnesses.base import Harness
from polar.harnesses.cache import Installation, cache_folder, find_damage, list_installations
from polar.harnesses.install.tools import Progress
from polar.plugins import load_all

_cache_option = click.option("--cache", help="where they are installed [default: from the settings]")


@click.group("harness")
def command() -> None:
    """Harnesses that any runtime can be given, without a change to its image."""


@command.command("install")
@config_option
@_cache_option
@click.option("--python", help="the interpreter for those from PyPI [default: one that suits]")
@json_option
@click.argument("wanted", metavar="NAME[@VERSION]...", nargs=-1, required=True)
def install_command(
    config_path: Path | None, cache: str | None, python: str | None, as_json: bool, wanted: tuple[str, ...]
) -> None:
    """Install harnesses: the version that the preset is made for, or another one, or `latest`."""
    from polar.harnesses.install import install

    folder = _cache_folder(config_path, cache)
    chosen = [_parse_harness(one) for one in wanted]  # all, before the first one is begun
    done: list[Installation] = []
    for harness, version in chosen:
        with _show_steps(harness.name, as_json) as progress:
            made = run_async(install(harness, version, folder, progress, python))
        done.append(made)
        if not as_json:
            click.echo(f"{made.name} {made.version} is installed ({_format_size(made.bytes)}): {made.folder}")
    if as_json:
        click.echo(json.dumps([_installed_to_dict(one) for one in done]))


@command.command("list")
@config_option
@_cache_option
@json_option
def list_command(config_path: Path | None, cache: str | None, as_json: bool) -> None:
    """The known harnesses, and which of them are installed."""
    folder = _cache_folder(config_path, cache)
    harnesses: list[Harness] = [harness() for harness in load_all("harnesses").values()]
    found = {
        harness.name: [(one, find_damage(one)) for one in list_installations(folder, harness.name)]
        for harness in harnesses
    }
    if as_json:
        click.echo(json.dumps([_harness_to_dict(harness, found[harness.name]) for harness in harnesses]))
        return
    table = Table(title=f"Harnesses in {folder}", title_justify="left")
    for column in ("harness", "package", "version", "installed"):
        table.add_column(column, overflow="fold")
    for harness in harnesses:
        there = [
            f"{one.version} ({_format_size(one.bytes)}){f', damaged: {why}; install it again' if why else ''}"
            for one, why in found[harness.name]
        ]
        package = harness.package
        named = ("-", "-") if package is None else (f"{package.registry} {package.name}", package.version)
        table.add_row(harness.name, *named, "\n".join(there) or ("needs none" if package is None else "no"))
    Console().print(table)


@command.command("remove")
@config_option
@_cache_option
@click.argument("wanted", metavar="NAME[@VERSION]")
def remove_command(config_path: Path | None, cache: str | None, wanted: str) -> None:
    """Remove a harness in all its versions, or in one."""
    from polar.harnesses.install import remove

    harness, version = _parse_harness(wanted)
    folder = _cache_folder(config_path, cache)
    with _show_steps(harness.name, False) as progress:
        gone = run_async(remove(folder, harness.name, version, progress))
    if not gone:
        raise ConfigError(f"{wanted} is not installed in {folder}.")
    for one in gone:
        click.echo(f"{harness.name} {one} is removed")


def _cache_folder(config_path: Path | None, cache: str | None) -> Path:
    return cache_folder(cache or load_settings(config_path).node.harness_cache)


def _parse_harness(wanted: str) -> tuple[Harness, str | None]:
    name, _, version = wanted.partition("@")
    return load_harness(name), version or None


@contextlib.contextmanager
def _show_steps(name: str, quiet: bool) -> Iterator[Progress]:
    """Steps, on stderr: in one line that changes, or in lines where nobody watches."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with Console(stderr=True).status(name) as status:
            yield lambda step: status.update(f"{name}: {step}")
    else:
        yield lambda step: click.echo(f"{name}: {step}", err=True)


def _format_size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _harness_to_dict(harness: Harness, found: list[tuple[Installation, str | None]]) -> dict[str, Any]:
    package = harness.package
    return {
        "name": harness.name,
        "registry": None if package is None else package.registry,
        "package": None if package is None else package.name,
        "version": None if package is None else package.version,
        "installed": [_installed_to_dict(one) | {"damage": why} for one, why in found],
    }


def _installed_to_dict(one: Installation) -> dict[str, Any]:
    return {
        "name": one.name,
        "version": one.version,
        "folder": str(one.folder),
        "executable": one.executable,
        "bytes": one.bytes,
    }
