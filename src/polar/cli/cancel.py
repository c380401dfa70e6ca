"""polar cancel: cancels tasks at a server."""

from pathlib import Path

import click

from polar.cli.common import json_option, run_async
from polar.cli.run_tally import format_count
from polar.cli.server import connect_client, server_options
from polar.client.async_client import ClientError


@click.command("cancel")
@server_options
@json_option
@click.argument("task_ids", nargs=-1, required=True, metavar="TASK...")
def command(
    config_path: Path | None,
    server: str | None,
    token: str | None,
    run_name: str,
    as_json: bool,
    task_ids: tuple[str, ...],
) -> int:
    """Cancel every TASK of the run. Waiting sessions never begin; running ones end with the reason `cancelled`."""

    async def cancel() -> int:
        failed = 0
        async with connect_client(config_path, server, token, run_name) as client:
            for task_id in task_ids:
                try:
                    answer = await client.cancel(task_id)
                except ClientError as error:
                    if error.status != 404:
                        raise
                    click.echo(f"polar: {error}", err=True)
                    failed = 1
                    continue
                ended = f"{format_count(answer.cancelled_sessions or 0, 'session')} cancelled"
                click.echo(answer.model_dump_json() if as_json else f"{task_id}: {ended}")
        return failed

    return run_async(cancel())
