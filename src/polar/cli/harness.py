"""polar harness: installs known harnesses into a cache that any runtime can mount."""

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
from polar.harnesses.cache import Installation, find_cache_folder, find_damage, list_installations
from polar.harnesses.install.tools import Progress
from polar.plugins import load_all

_cache_option = click.option("--cache", help="Use this folder for installed harnesses [default: from the settings].")


@click.group("harness")
def command() -> None:
    """Install harnesses that any runtime can use without a change to its image."""


@command.command("install")
@config_option
@_cache_option
@click.option("--python", help="Use this interpreter for harnesses from PyPI [default: a suitable one].")
@json_option
@click.argument("wanted", metavar="NAME[@VERSION]...", nargs=-1, required=True)
def install_command(
    config_path: Path | None, cache: str | None, python: str | None, as_json: bool, wanted: tuple[str, ...]
) -> None:
    """Install harnesses: the version that the preset supports, a VERSION, or `latest`."""
    from polar.harnesses.install import install

    folder = _find_cache_folder(config_path, cache)
    chosen = [_parse_harness(text) for text in wanted]  # validated before the first installation
    installed: list[Installation] = []
    for harness, version in chosen:
        with _show_steps(harness.name, as_json) as progress:
            installation = run_async(install(harness, version, folder, progress, python))
        installed.append(installation)
        if not as_json:
            name = f"{installation.name} {installation.version}"
            click.echo(f"{name} is installed ({_format_size(installation.bytes)}): {installation.folder}")
    if as_json:
        click.echo(json.dumps([_installation_to_dict(installation) for installation in installed]))


@command.command("list")
@config_option
@_cache_option
@json_option
def list_command(config_path: Path | None, cache: str | None, as_json: bool) -> None:
    """List the known harnesses and their installed versions."""
    folder = _find_cache_folder(config_path, cache)
    harnesses: list[Harness] = [harness() for harness in load_all("harnesses").values()]
    installations = {
        harness.name: [
            (installation, find_damage(installation)) for installation in list_installations(folder, harness.name)
        ]
        for harness in harnesses
    }
    if as_json:
        click.echo(json.dumps([_harness_to_dict(harness, installations[harness.name]) for harness in harnesses]))
        return
    table = Table(title=f"Harnesses in {folder}", title_justify="left")
    for column in ("harness", "package", "version", "installed"):
        table.add_column(column, overflow="fold")
    for harness in harnesses:
        installed = [
            f"{installation.version} ({_format_size(installation.bytes)}){_format_damage(damage)}"
            for installation, damage in installations[harness.name]
        ]
        package = harness.package
        named = ("-", "-") if package is None else (f"{package.registry} {package.name}", package.version)
        table.add_row(harness.name, *named, "\n".join(installed) or ("needs none" if package is None else "no"))
    Console().print(table)


@command.command("remove")
@config_option
@_cache_option
@click.argument("wanted", metavar="NAME[@VERSION]")
def remove_command(config_path: Path | None, cache: str | None, wanted: str) -> None:
    """Remove all versions of a harness, or one."""
    from polar.harnesses.install import remove

    harness, version = _parse_harness(wanted)
    folder = _find_cache_folder(config_path, cache)
    with _show_steps(harness.name, False) as progress:
        removed = run_async(remove(folder, harness.name, version, progress))
    if not removed:
        raise ConfigError(f"{wanted} is not installed in {folder}.")
    for removed_version in removed:
        click.echo(f"{harness.name} {removed_version} is removed")


def _find_cache_folder(config_path: Path | None, cache: str | None) -> Path:
    return find_cache_folder(cache or load_settings(config_path).node.harness_cache)


def _parse_harness(wanted: str) -> tuple[Harness, str | None]:
    name, _, version = wanted.partition("@")
    return load_harness(name), version or None


@contextlib.contextmanager
def _show_steps(name: str, quiet: bool) -> Iterator[Progress]:
    """Shows steps on stderr: on one changing line of a terminal, else as lines."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with Console(stderr=True).status(name) as status:
            yield lambda step: status.update(f"{name}: {step}")
    else:
        yield lambda step: click.echo(f"{name}: {step}", err=True)


def _format_damage(damage: str | None) -> str:
    return f", damaged: {damage}; install it again" if damage else ""


def _format_size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _harness_to_dict(harness: Harness, installations: list[tuple[Installation, str | None]]) -> dict[str, Any]:
    package = harness.package
    return {
        "name": harness.name,
        "registry": None if package is None else package.registry,
        "package": None if package is None else package.name,
        "version": None if package is None else package.version,
        "installed": [
            _installation_to_dict(installation) | {"damage": damage} for installation, damage in installations
        ],
    }


def _installation_to_dict(installation: Installation) -> dict[str, Any]:
    return {
        "name": installation.name,
        "version": installation.version,
        "folder": str(installation.folder),
        "executable": installation.executable,
        "bytes": installation.bytes,
    }
