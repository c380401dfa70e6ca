"""What commands share: their options, the event loop, and how results are printed."""

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
    help="settings [default: polar.toml, if it is there]",
)
DEFAULT_DATA_FOLDER = Path(".polar")
data_option = click.option(
    "--data", type=click.Path(path_type=Path), default=DEFAULT_DATA_FOLDER, show_default=True, help="where state lives"
)


def settings_options(function: F) -> F:
    return config_option(data_option(function))


def log_options(function: F) -> F:
    """For commands that run for long: see `start_logging`."""
    form = click.option(
        "--log-format", type=click.Choice(get_args(logs.LogFormat)), help="json: an object a line [default: text]"
    )
    level = click.option("--log-level", type=click.Choice(get_args(logs.LogLevel)), help="and above [default: warning]")
    return form(level(function))


def forget_secrets(settings: config.Settings) -> None:
    """For commands that run for long: nothing that they start finds the settings' secrets in its environment."""
    erase_variables(config.ENVIRONMENT_PREFIX, collect_secrets(settings))


def start_logging(
    settings: config.Settings, log_format: logs.LogFormat | None, log_level: logs.LogLevel | None
) -> None:
    """To standard error, without the settings' secrets."""
    logs.configure(log_format or settings.log.format, log_level or settings.log.level, collect_secrets(settings))


def engine_options(function: F) -> F:
    """For commands with a private gateway: see `private_settings`."""
    url = click.option("--engine", "engine_url", help="URL of the inference engine")
    kind = click.option("--kind", help="the engine's kind [default: as configured; vllm if no engine is]")
    return url(kind(function))


json_option = click.option("--json", "as_json", is_flag=True, help="one line of JSON for machines")


def load_settings(path: Path | None, **overrides: dict[str, Any]) -> config.Settings:
    """The settings, with some replaced by the command line (`gateway={"port": 0}`)."""
    return config.load(path, overrides=overrides)


def private_settings(
    path: Path | None, engine_url: str | None, kind: str | None, **overrides: dict[str, Any]
) -> config.Settings:
    """Those of a gateway of the command's own: on any free port, with the engine that the command line names."""
    engine: dict[str, Any] = {}
    if engine_url:
        engine = config.build_engine_settings_at(engine_url, load_settings(path).engine)
    if kind:
        engine["kind"] = kind
    return load_settings(path, gateway=config.PRIVATE_GATEWAY, engine=engine, **overrides)


def describe_default_engine(settings: config.Settings) -> str | None:
    """Who answered, where nobody was named; who chose what the engine says knows."""
    if settings.engine.urls or settings.engine.options:
        return None
    return f"No engine is configured, so the {settings.engine.kind} one answered: name yours with --engine URL."


def format_show_command(session_id: str, data: Path) -> str:
    """What to type to look at a session."""
    return f"polar show {session_id}" + ("" if data == DEFAULT_DATA_FOLDER else f" --data {shlex.quote(str(data))}")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    if not logging.getLogger().handlers:  # those of a command that has options for its log
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
        raise ConfigError(f'{option} is a JSON object, such as \'{{"purpose": "test"}}\'.')
    return value
