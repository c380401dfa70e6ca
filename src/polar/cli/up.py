"""polar up: the rollout server, a gateway node, and an engine if none is configured, in one process."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path

import click
from rich.console import Console

from polar.cli.common import forget_secrets, json_option, load_settings, log_options, run, settings_options, start_log
from polar.config import Settings
from polar.data_plane import settle_process
from polar.errors import ConfigError, PolarError
from polar.telemetry.logs import Format, Level


@click.command("up")
@settings_options
@click.option("--port", type=int, help="of the data plane")
@click.option("--control-port", type=int, help="of the control plane")
@click.option("--node/--no-node", default=None, help="run sessions in this process [default: unless Ray does]")
@log_options
@json_option
def command(
    config_path: Path | None,
    data: Path,
    port: int | None,
    control_port: int | None,
    node: bool | None,
    log_format: Format | None,
    log_level: Level | None,
    as_json: bool,
) -> None:
    """Run until interrupted. Other machines join with `polar node --join URL`."""
    settings = load_settings(
        config_path,
        gateway={} if port is None else {"port": port},
        server={} if control_port is None else {"port": control_port},
    )
    start_log(settings, log_format, log_level)
    forget_secrets(settings)
    run(_up(settings, data, settings.cluster.engine == "local" if node is None else node, as_json))


def stopping() -> asyncio.Event:
    """Set when the process is told to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


class EndOrders:
    """How this process, which has a node in it, was told to end."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()  # SIGTERM: sessions that run get some time
        self.now = asyncio.Event()  # SIGINT, or a second signal: they are handed back
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self.now.set)

    def _terminate(self) -> None:
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


async def _up(settings: Settings, data: Path, node: bool, as_json: bool) -> None:
    try:
        from polar.service import Service
    except ImportError as error:
        raise ConfigError(f"polar up needs the extra `server`: pip install 'polar[server]' ({error}).") from error
    settle_process()
    orders = EndOrders()
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(Service(settings, data, node=node))
        if settings.cluster.engine == "ray":
            from polar.cluster.ray import RayCluster

            cluster = settings.cluster
            url = cluster.server_url or service.control_url
            await stack.enter_async_context(RayCluster(settings, url, namespace=cluster.namespace))
        engines = [replica.url for replica in service.pool.replicas]
        if as_json:
            urls = {"gateway": service.gateway_url, "control": service.control_url, "engines": engines}
            click.echo(json.dumps(urls))
        else:
            console = Console()
            console.print(f"data plane     {service.gateway_url}   (harnesses; session keys)")
            console.print(f"control plane  {service.control_url}   (docs at /docs)")
            told = ", ".join(engines) or "none yet: a trainer adds its own"
            console.print(f"engine         {told}   ({settings.engine.kind})")
            console.print(f"nodes          {_nodes(settings, node)}")
            console.print("Tasks: polar submit. An agent run by hand: polar session new. Stop with Ctrl-C.")
        over = asyncio.ensure_future(service.over())
        ordered = [asyncio.ensure_future(event.wait()) for event in (orders.drain, orders.now)]
        await asyncio.wait({over, *ordered}, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            raise PolarError(f"{over.result()} This server stops.")
        over.cancel()
        if not orders.now.is_set():
            await service.drain(orders.now)
        for one in ordered:
            one.cancel()


def _nodes(settings: Settings, node: bool) -> str:
    here = ["one in this process"] if node else []
    there = [f"on Ray ({settings.cluster.nodes})"] if settings.cluster.engine == "ray" else []
    return ", ".join([*here, *there, "any that join"])
