"""polar status: prints the state of a server or of a task."""

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.cli import results_view
from polar.cli.common import json_option, run_async
from polar.cli.run_tally import set_file_width
from polar.cli.server import connect_client, server_options
from polar.cli.show_tokens import escape_controls
from polar.client.async_client import AsyncClient
from polar.records.result import TaskSession, TaskStatus

_STAGES = ("init", "ready", "run", "postrun")


@click.command("status")
@server_options
@json_option
@click.argument("task_id", required=False, metavar="[TASK]")
def command(
    config_path: Path | None, server: str | None, token: str | None, run_name: str, as_json: bool, task_id: str | None
) -> None:
    """Print the queues of the runs and the load of the nodes, or the progress of one TASK."""

    async def show() -> None:
        async with connect_client(config_path, server, token, run_name) as client:
            await (_show_server(client, as_json) if task_id is None else _show_task(client, task_id, as_json))

    run_async(show())


async def _show_server(client: AsyncClient, as_json: bool) -> None:
    status = await client.status()
    if as_json:
        click.echo(msgspec.json.encode(status))
        return
    console = set_file_width(Console())
    console.print(_make_run_table(status["runs"]))
    console.print(
        _make_node_table(status["nodes"]) if status["nodes"] else "No nodes: start one with `polar node --join URL`."
    )
    for run_name, policy in status["policy"].items():
        engines = ", ".join(_describe_replica(replica) for replica in policy["replicas"]) or "no engines"
        paused = f"; paused ({policy['mode']})" if policy["paused"] else ""
        console.print(f"{escape_controls(run_name)}: {engines}{paused}", highlight=False, markup=False, soft_wrap=True)


async def _show_task(client: AsyncClient, task_id: str, as_json: bool) -> None:
    task = await client.task(task_id)
    if as_json:
        click.echo(task.model_dump_json())
        return
    click.echo(
        f"{escape_controls(task.task_id)}: {task.status}, {task.completed_sessions} of "
        f"{task.total_sessions} sessions ended"
    )
    if task.results and task.status != "running":
        set_file_width(Console()).print(results_view.make_session_table(_convert_results(task)))
    elif task.sessions:
        set_file_width(Console()).print(_make_session_table(task.sessions))


def _make_session_table(sessions: list[TaskSession]) -> Table:
    """The sessions of a running task, and where each of them is."""
    table = Table()
    for column in ("sample", "state", "retries", "node"):
        table.add_column(column)
    for session in sessions:
        table.add_row(
            str(session.sample), session.state, str(session.attempt), Text(escape_controls(session.node or ""))
        )
    return table


def _convert_results(task: TaskStatus) -> list[results_view.EndedSession]:
    return [results_view.convert_result(result) for result in task.results]


def _make_run_table(runs: dict[str, dict[str, int | None]]) -> Table:
    names = list(dict.fromkeys(name for counts in runs.values() for name in counts if counts[name] is not None))
    table = Table("run")
    for name in names:
        table.add_column(name, justify="right")
    for run_name, counts in runs.items():
        table.add_row(Text(escape_controls(run_name)), *(f"{counts.get(name) or 0:,}" for name in names))
    return table


def _make_node_table(nodes: list[dict[str, Any]]) -> Table:
    table = Table("node", "runtimes")
    for name in ("sessions", *_STAGES, "calls", "seen"):
        table.add_column(name, justify="right")
    for node in nodes:
        load = node["load"]
        table.add_row(
            Text(escape_controls(node["name"]) + (" (draining)" if node.get("draining") else "")),
            Text(escape_controls(", ".join(node["backends"]))),
            f"{node['leases']} of {node['slots']}",
            *(Text(escape_controls(str(load.get(name, "")))) for name in (*_STAGES, "calls")),
            f"{node['seen']:.0f} s ago",
        )
    return table


def _describe_replica(replica: dict[str, Any]) -> str:
    return f"{escape_controls(replica['url'])} version {replica['version']}{' (down)' if replica.get('down') else ''}"
