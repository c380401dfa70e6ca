"""Shared by commands: options, settings, logging and the event loop."""

import asyncio
import json
import logging
import shlex
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from polar import config
from polar.errors import ConfigError
from polar.telemetry import logs
from polar.telemetry.redaction import collect_secrets, erase_variables

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=None,
    help="Read settings from this file [default: polar.toml, if it exists].",
)
DEFAULT_DATA_FOLDER = Path(".polar")
data_option = click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=DEFAULT_DATA_FOLDER,
    show_default=True,
    help="Keep state in this folder.",
)


def settings_options(function: F) -> F:
    return config_option(data_option(function))


def log_options(function: F) -> F:
    """Options of long-running commands: see `start_logging`."""
    form = click.option(
        "--log-format", type=click.Choice(get_args(logs.LogFormat)), help="Set the format of the log [default: text]."
    )
    level = click.option(
        "--log-level", type=click.Choice(get_args(logs.LogLevel)), help="Log this level and above [default: warning]."
    )
    return form(level(function))


def forget_secrets(settings: config.Settings) -> None:
    """Removes the settings' secrets from the environment, so that child processes don't inherit them."""
    erase_variables(config.ENVIRONMENT_PREFIX, collect_secrets(settings))


def start_logging(
    settings: config.Settings, log_format: logs.LogFormat | None, log_level: logs.LogLevel | None
) -> None:
    """Logs to standard error, with the settings' secrets redacted."""
    logs.configure(log_format or settings.log.format, log_level or settings.log.level, collect_secrets(settings))


def engine_options(function: F) -> F:
    """Options of commands with a private gateway: see `private_settings`."""
    url = click.option("--engine", "engine_url", help="Use the inference engine at this URL.")
    kind = click.option("--kind", help="Set the engine's kind [default: as configured, else vllm].")
    return url(kind(function))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")


def load_settings(path: Path | None, **overrides: dict[str, Any]) -> config.Settings:
    """Loads the settings, with overrides of the command line (`gateway={"port": 0}`)."""
    return config.load(path, overrides=overrides)


def load_private_settings(
    path: Path | None, engine_url: str | None, kind: str | None, **overrides: dict[str, Any]
) -> config.Settings:
    """Loads the settings for a private gateway: on a free port, with the engine that the command line names."""
    engine: dict[str, Any] = {}
    if engine_url:
        engine = config.build_engine_settings_at(engine_url, load_settings(path).engine)
    if kind:
        engine["kind"] = kind
    return load_settings(path, gateway=config.PRIVATE_GATEWAY, engine=engine, **overrides)


def describe_default_engine(settings: config.Settings) -> str | None:
    """Names the default engine, where neither the settings nor the command line chose one."""
    if settings.engine.urls or settings.engine.options:
        return None
    return f"No engine is configured, so the {settings.engine.kind} engine answered: name yours with --engine URL."


def format_show_command(session_id: str, data: Path) -> str:
    """The command that shows a session."""
    return f"polar show {session_id}" + ("" if data == DEFAULT_DATA_FOLDER else f" --data {shlex.quote(str(data))}")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    if not logging.getLogger().handlers:  # set by commands with log options
        logs.configure()
    if sys.platform == "win32":
        return asyncio.run(coroutine)
    import uvloop

    return uvloop.run(coroutine)


def parse_json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{option} must be a JSON object, such as \'{{"purpose": "test"}}\'.')
    return value
