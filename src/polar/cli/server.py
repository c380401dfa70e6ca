"""Connects commands to a rollout server."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from polar.cli.common import config_option, load_settings
from polar.client.async_client import AsyncClient
from polar.config import DEFAULT_RUN
from polar.gateway.http import format_url

F = TypeVar("F", bound=Callable[..., Any])


def server_options(function: F) -> F:
    """Options of commands that call a server: see `connect_client`."""
    server = click.option("--server", help="Set the URL of the control plane [default: from the settings].")
    token = click.option("--token", help="Set the server's admin token [default: from the settings].")
    run = click.option("--run", "run_name", default=DEFAULT_RUN, show_default=True, help="Select the run.")
    return config_option(server(token(run(function))))


@contextlib.asynccontextmanager
async def connect_client(
    config_path: Path | None, server: str | None, token: str | None, run_name: str
) -> AsyncIterator[AsyncClient]:
    """Raises ClientError at once where no server answers. Calls wait for a server that becomes unreachable later."""
    settings = load_settings(config_path).server
    url = server or format_url(settings.host, settings.port)
    async with AsyncClient(url, token or settings.token, run_name) as client:
        await client.health()
        yield client
