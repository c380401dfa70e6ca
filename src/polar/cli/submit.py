"""polar submit: sends tasks to a server."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polar.cli import results_view
from polar.cli.common import run_async
from polar.cli.run_tally import format_count, set_file_width
from polar.cli.server import connect_client, server_options
from polar.cli.show_tokens import escape_controls
from polar.cli.tasks import task_options
from polar.client.async_client import BUSY, AsyncClient, SubmitAnswer
from polar.records.result import TaskStatus
from polar.records.task import TaskRequest


@click.command("submit")
@server_options
@task_options
@click.option("--wait", is_flag=True, help="Wait until all tasks have ended, then print their results.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each task; with --wait, for each session."
)
def command(
    tasks: list[TaskRequest],
    config_path: Path | None,
    server: str | None,
    token: str | None,
    run_name: str,
    wait: bool,
    as_json: bool,
) -> int:
    """Send every TASK (a file, or a folder of files) to a server. Tasks that the server already has are not run again.
    Paths in tasks are those of the machines where nodes run."""

    async def submit() -> int:
        async with connect_client(config_path, server, token, run_name) as client:
            answers = await _submit_tasks(client, tasks)
            failed = _report_refused(answers)
            taken = {answer.task_id for answer in answers if answer.error is None}
            if wait and taken:
                return max(
                    await _wait_for_tasks(client, [task for task in tasks if task.task_id in taken], as_json), failed
                )
            _print_answers(answers, sum(task.num_samples for task in tasks if task.task_id in taken), as_json)
            return failed

    return run_async(submit())


async def _submit_tasks(client: AsyncClient, tasks: list[TaskRequest]) -> list[SubmitAnswer]:
    """Submits all tasks, waiting while the run's queue is full."""
    console = Console(stderr=True)
    with _make_progress(console) as progress:
        bar = progress.add_task("tasks", total=len(tasks))
        waited = False

        def show_answer(answer: SubmitAnswer) -> None:
            nonlocal waited
            if answer.code != BUSY:
                progress.advance(bar)
            elif not waited:
                waited = True
                console.print(_QUEUE_FULL_NOTICE, highlight=False, soft_wrap=True)

        return await client.submit(tasks, raise_refused=False, on_answer=show_answer)


_QUEUE_FULL_NOTICE = (
    "The run's queue is full: waiting. If you interrupt this, submitted tasks keep running; repeat the command to "
    "send the rest."
)


def _report_refused(answers: list[SubmitAnswer]) -> int:
    """Prints refused tasks. Returns the exit status."""
    refused = [answer for answer in answers if answer.error is not None]
    for answer in refused:
        message = f"polar: The task {answer.task_id} was refused: {answer.error}"
        click.echo(escape_controls(message), err=True)
    return 1 if refused else 0


def _print_answers(answers: list[SubmitAnswer], sessions: int, as_json: bool) -> None:
    if as_json:
        for answer in answers:
            click.echo(msgspec.json.encode(answer))
        return
    taken = sum(answer.error is None for answer in answers)
    if taken:
        click.echo(
            f"{format_count(taken, 'task')} with {format_count(sessions, 'session')}. See: polar status, "
            "polar results --follow"
        )


async def _wait_for_tasks(client: AsyncClient, tasks: list[TaskRequest], as_json: bool) -> int:
    """Waits for the tasks and prints their results. Returns the exit status."""
    console = Console(stderr=True)
    ended: list[results_view.EndedSession] = []
    with _make_progress(console) as progress:
        bar = progress.add_task("sessions", total=sum(task.num_samples for task in tasks))
        done: dict[str, int] = {}

        def show_status(task: TaskStatus) -> None:
            done[task.task_id] = task.completed_sessions
            progress.update(bar, completed=sum(done.values()))

        async for task in client.as_completed([task.task_id for task in tasks], on_status=show_status):
            ended += [results_view.convert_result(result) for result in task.results]
            if as_json:
                _write_lines(result.model_dump_json().encode() for result in task.results)
    if not as_json:
        set_file_width(Console()).print(results_view.make_session_table(ended))
        click.echo(f"{format_count(len(ended), 'session')}: {results_view.describe_mean_reward(ended)}.")
    if complaint := results_view.describe_failures(ended):
        click.echo(f"polar: {complaint}", err=True)
        return 1
    return 0


def _make_progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _write_lines(lines: Iterable[bytes]) -> None:
    for line in lines:
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
