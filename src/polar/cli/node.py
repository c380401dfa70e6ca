"""polar node: a gateway node for a rollout server elsewhere."""

import json
import os
import socket
from pathlib import Path

import click
from rich.console import Console

from polar.cli.common import forget_secrets, json_option, load_settings, log_options, run, settings_options, start_log
from polar.cli.up import EndOrders
from polar.config import Settings
from polar.data_plane import settle_process
from polar.node.working import serve_node
from polar.telemetry.logs import Format, Level


@click.command("node")
@settings_options
@click.option("--join", "server", required=True, metavar="URL", help="of the rollout server's control plane")
@click.option("--token", envvar="POLAR_NODE_TOKEN", help="the server's node token [env: POLAR_NODE_TOKEN]")
@click.option("--port", type=int, default=0, help="of its data plane [default: a free one]")
@click.option("--name", help="what the node is called [default: this machine's, and the number of the process]")
@log_options
@json_option
def command(
    config_path: Path | None,
    data: Path,
    server: str,
    token: str | None,
    port: int,
    name: str | None,
    log_format: Format | None,
    log_level: Level | None,
    as_json: bool,
) -> None:
    """Run sessions for the rollout server at URL until interrupted. Its engines are those that the server names; where
    the server's store is a PostgreSQL, name the same one ([store] url)."""
    settings = load_settings(config_path, gateway={"port": port})
    start_log(settings, log_format, log_level)
    forget_secrets(settings)
    told = token or settings.server.node_token or settings.server.token
    run(_node(settings, data, server, told, name or f"{socket.gethostname()}-{os.getpid()}", as_json))


async def _node(settings: Settings, data: Path, server: str, token: str | None, name: str, as_json: bool) -> None:
    settle_process()
    orders = EndOrders()
    if as_json:
        click.echo(json.dumps({"server": server, "name": name}))
    else:
        Console().print(f"node {name} for {server}; stop with Ctrl-C")
    await serve_node(settings, data, server, token, name=name, stop=orders.now, drain=orders.drain)
