"""polar node: runs a gateway node for a remote rollout server."""

import json
import os
import socket
from pathlib import Path

import click
from rich.console import Console

from polar.cli.common import (
    forget_secrets,
    json_option,
    load_settings,
    log_options,
    run_async,
    settings_options,
    start_logging,
)
from polar.cli.up import ShutdownSignals
from polar.config import Settings
from polar.gateway.process import tune_process
from polar.node.node_service import serve_node
from polar.telemetry.logs import LogFormat, LogLevel


@click.command("node")
@settings_options
@click.option("--join", "server", required=True, metavar="URL", help="Join the rollout server with this control plane.")
@click.option("--token", envvar="POLAR_NODE_TOKEN", help="Set the server's node token [env: POLAR_NODE_TOKEN].")
@click.option("--port", type=int, default=0, help="Serve the data plane at this port [default: a free one].")
@click.option("--name", help="Set the node's name [default: the host name and the process id].")
@log_options
@json_option
def command(
    config_path: Path | None,
    data: Path,
    server: str,
    token: str | None,
    port: int,
    name: str | None,
    log_format: LogFormat | None,
    log_level: LogLevel | None,
    as_json: bool,
) -> None:
    """Run sessions for the rollout server at URL until interrupted. The server names the engines. If its store is a
    PostgreSQL database, set [store] url to the same one."""
    settings = load_settings(config_path, gateway={"port": port})
    start_logging(settings, log_format, log_level)
    forget_secrets(settings)
    node_token = token or settings.server.node_token or settings.server.token
    run_async(_run_node(settings, data, server, node_token, name or f"{socket.gethostname()}-{os.getpid()}", as_json))


async def _run_node(settings: Settings, data: Path, server: str, token: str | None, name: str, as_json: bool) -> None:
    tune_process()
    signals = ShutdownSignals()
    if as_json:
        click.echo(json.dumps({"server": server, "name": name}))
    else:
        Console().print(f"node {name} for {server}; stop with Ctrl-C")
    await serve_node(
        settings, data, server, token, name=name, stop=signals.stop_requested, drain=signals.drain_requested
    )
