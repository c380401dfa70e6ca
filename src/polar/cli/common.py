"""What commands share: their options, the event loop, and how results are printed."""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from polar import config
from polar.errors import ConfigError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=None,
    help="settings [default: polar.toml, if it is there]",
)
data_option = click.option(
    "--data", type=click.Path(path_type=Path), default=Path(".polar"), show_default=True, help="where state lives"
)


def settings_options(function: F) -> F:
    return config_option(data_option(function))


json_option = click.option("--json", "as_json", is_flag=True, help="one line of JSON for machines")


def load_settings(path: Path | None, **overrides: dict[str, Any]) -> config.Settings:
    """The settings, with some replaced by the command line (`gateway={"port": 0}`)."""
    return config.load(path, overrides=overrides)


def run(main: Coroutine[Any, Any, T]) -> T:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{option} is a JSON object, such as \'{{"purpose": "test"}}\'.')
    return value
