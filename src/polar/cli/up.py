"""polar up: the gateway, its control plane, and an engine if none is configured, in one process."""

import asyncio
import json
import signal
from pathlib import Path

import click
from rich.console import Console

from polar.cli.common import json_option, load_settings, run, settings_options
from polar.config import Settings
from polar.service import Service, settle_process


@click.command("up")
@settings_options
@click.option("--port", type=int, help="of the data plane")
@click.option("--control-port", type=int, help="of the control plane")
@json_option
def command(config_path: Path | None, data: Path, port: int | None, control_port: int | None, as_json: bool) -> None:
    """Run until interrupted."""
    settings = load_settings(
        config_path,
        gateway={} if port is None else {"port": port},
        server={} if control_port is None else {"port": control_port},
    )
    run(_up(settings, data, as_json))


async def _up(settings: Settings, data: Path, as_json: bool) -> None:
    settle_process()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Service(settings, data) as service:
        engines = [replica.url for replica in service.pool.replicas]
        if as_json:
            urls = {"gateway": service.gateway_url, "control": service.control_url, "engines": engines}
            click.echo(json.dumps(urls))
        else:
            console = Console()
            console.print(f"data plane     {service.gateway_url}   (harnesses; session keys)")
            console.print(f"control plane  {service.control_url}   (docs at /docs)")
            console.print(f"engine         {', '.join(engines)}   ({settings.engine.kind})")
            console.print("A session for an agent of your own: polar session new. Stop with Ctrl-C.")
        await stop.wait()
