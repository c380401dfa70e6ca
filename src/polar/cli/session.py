"""polar session: opens and ends sessions for harnesses that are run by hand, at a server."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import click

from polar.cli.common import json_option, parse_json_object, run_async
from polar.cli.server import connect_client, server_options
from polar.errors import ConfigError
from polar.harnesses import build_environment


@click.group("session")
def command() -> None:
    """Open and end sessions for harnesses that are run by hand."""


@command.command("new")
@server_options
@click.option("--metadata", default="{}", help="Store a JSON object with the session.")
@click.option("--model", default="polar", show_default=True, help="Set the model name that the harness requests.")
@json_option
def new_command(
    config_path: Path | None,
    server: str | None,
    token: str | None,
    run_name: str,
    metadata: str,
    model: str,
    as_json: bool,
) -> None:
    """Open a session and print export lines: eval "$(polar session new)"."""
    fields = {"model": model} | parse_json_object(metadata, "--metadata")

    async def open_session() -> dict[str, Any]:
        async with connect_client(config_path, server, token, run_name) as client:
            return await client.new_session(fields)

    created = run_async(open_session())
    if as_json:
        click.echo(json.dumps(created))
        return
    variables = build_environment(created["base_urls"]["anthropic"], created["api_key"], model)
    for name, value in {"POLAR_SESSION": created["session_id"], **variables}.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@command.command("end")
@server_options
@click.option("--reward", type=float, help="Set the session's reward.")
@json_option
@click.argument("session_id", default=lambda: os.environ.get("POLAR_SESSION", ""), required=False)
def end_command(
    config_path: Path | None,
    server: str | None,
    token: str | None,
    run_name: str,
    reward: float | None,
    as_json: bool,
    session_id: str,
) -> None:
    """End a session (default: $POLAR_SESSION). Its key stops working."""
    if not session_id:
        raise ConfigError("No session was named: give its id, or set POLAR_SESSION.")

    async def end_session() -> dict[str, Any]:
        async with connect_client(config_path, server, token, run_name) as client:
            return await client.end_session(session_id, reward=reward)

    session = run_async(end_session())
    reward_text = "no reward" if session["reward"] is None else f"reward {session['reward']:g}"
    click.echo(json.dumps(session) if as_json else f"{session_id} has ended, {reward_text}")
