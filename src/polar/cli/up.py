"""polar up: the rollout server, a gateway node, and an engine if none is configured, in one process."""

import asyncio
import contextlib
import json
import signal
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
from polar.config import Settings
from polar.distribution import install_hint
from polar.errors import ConfigError, PolarError
from polar.gateway.process import tune_process
from polar.telemetry.logs import LogFormat, LogLevel


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
    log_format: LogFormat | None,
    log_level: LogLevel | None,
    as_json: bool,
) -> None:
    """Run until interrupted. Other machines join with `polar node --join URL`."""
    settings = load_settings(
        config_path,
        gateway={} if port is None else {"port": port},
        server={} if control_port is None else {"port": control_port},
    )
    start_logging(settings, log_format, log_level)
    forget_secrets(settings)
    run_async(_run_server(settings, data, settings.cluster.engine == "local" if node is None else node, as_json))


def make_stop_event() -> asyncio.Event:
    """Set when the process is told to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


class ShutdownSignals:
    """How this process, which has a node in it, was told to end."""

    def __init__(self) -> None:
        self.drain_requested = asyncio.Event()  # SIGTERM: sessions that run get some time
        self.stop_requested = asyncio.Event()  # SIGINT, or a second signal: they are handed back
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self.stop_requested.set)

    def _terminate(self) -> None:
        if self.drain_requested.is_set():
            self.stop_requested.set()
        self.drain_requested.set()


async def _run_server(settings: Settings, data: Path, node: bool, as_json: bool) -> None:
    try:
        from polar.service import Service
    except ImportError as error:
        raise ConfigError(f"polar up needs the extra `server`: {install_hint('server')} ({error}).") from error
    tune_process()
    orders = ShutdownSignals()
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(Service(settings, data, node=node))
        if settings.cluster.engine == "ray":
            from polar.cluster.ray_cluster import RayCluster

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
            console.print(f"nodes          {_describe_nodes(settings, node)}")
            console.print("Tasks: polar submit. An agent run by hand: polar session new. Stop with Ctrl-C.")
        over = asyncio.ensure_future(service.wait_for_failure())
        ordered = [asyncio.ensure_future(event.wait()) for event in (orders.drain_requested, orders.stop_requested)]
        await asyncio.wait({over, *ordered}, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            raise PolarError(f"{over.result()} This server stops.")
        over.cancel()
        if not orders.stop_requested.is_set():
            await service.drain(orders.stop_requested)
        for one in ordered:
            one.cancel()


def _describe_nodes(settings: Settings, node: bool) -> str:
    here = ["one in this process"] if node else []
    there = [f"on Ray ({settings.cluster.nodes})"] if settings.cluster.engine == "ray" else []
    return ", ".join([*here, *there, "any that join"])
