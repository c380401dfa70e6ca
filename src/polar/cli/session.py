"""polar session: a session for a harness that is run by hand, on a gateway that is up."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import click

from polar.cli.common import config_option, json_object, json_option, load_settings
from polar.errors import ConfigError
from polar.harnesses import environment

_server_option = click.option("--server", help="URL of the control plane [default: from the settings]")


@click.group("session")
def command() -> None:
    """Sessions for harnesses that are run by hand."""


@command.command("new")
@config_option
@_server_option
@click.option("--metadata", default="{}", help="a JSON object that is kept with the session")
@click.option("--model", default="polar", show_default=True, help="the model name that the harness asks for")
@json_option
def new(config_path: Path | None, server: str | None, metadata: str, model: str, as_json: bool) -> None:
    """Open a session and print export lines: eval "$(polar session new)"."""
    kept = json_object(metadata, "--metadata")
    created = _post(config_path, server, "/sessions", {"metadata": {"model": model} | kept})
    if as_json:
        click.echo(json.dumps(created))
        return
    click.echo(f"export POLAR_SESSION={created['session_id']}")
    for name, value in environment(created["base_urls"]["anthropic"], created["api_key"], model).items():
        click.echo(f"export {name}={shlex.quote(value)}")


@command.command("end")
@config_option
@_server_option
@click.option("--reward", type=float, help="the session's reward")
@json_option
@click.argument("session_id", default=lambda: os.environ.get("POLAR_SESSION", ""), required=False)
def end(
    config_path: Path | None,
    server: str | None,
    reward: float | None,
    as_json: bool,
    session_id: str,
) -> None:
    """End a session (default: $POLAR_SESSION). Its key stops working."""
    if not session_id:
        raise ConfigError("Which session? Name it, or set POLAR_SESSION.")
    ended = _post(config_path, server, f"/sessions/{session_id}/end", {"reward": reward})
    given = "no reward" if ended["reward"] is None else f"reward {ended['reward']:g}"
    click.echo(json.dumps(ended) if as_json else f"{session_id} has ended, {given}")


def _post(config_path: Path | None, server: str | None, path: str, body: dict[str, Any]) -> dict[str, Any]:
    from polar.cli.http import post
    from polar.gateway.http import url_of

    settings = load_settings(config_path).server
    return post(server or url_of(settings.host, settings.port), path, body, settings.token)
