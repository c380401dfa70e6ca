"""polar results: prints a server's results in the order in which they ended."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, get_args

import click
from rich.console import Console

from polar.cli import results_view
from polar.cli.common import run_async
from polar.cli.run_tally import format_count, set_file_width
from polar.cli.server import connect_client, server_options
from polar.client.async_client import ClientError, RawResult, Results
from polar.errors import ConfigError
from polar.records.result import ResultUnit, SuspiciousFilter

_ACKNOWLEDGE_SECONDS = 5.0  # for acknowledging results when interrupted


@click.command("results")
@server_options
@click.option("--after", type=click.IntRange(0), metavar="CURSOR", help="Print only results behind this cursor.")
@click.option(
    "--unit",
    type=click.Choice(get_args(ResultUnit)),
    default="session",
    show_default=True,
    help="Print a result for each session, or for each group of a task's sessions.",
)
@click.option("--builder", help="Build trajectories with this builder [default: the task's].")
@click.option(
    "--suspicious",
    type=click.Choice(get_args(SuspiciousFilter)),
    default="keep",
    show_default=True,
    help="Keep sessions with proven tampering, print only those, or exclude them.",
)
@click.option("--consumer", metavar="NAME", help="Continue from the cursor that the server stores for this consumer.")
@click.option("--follow", is_flag=True, help="Wait for further results until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each result.")
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write JSON lines to a file; append to it with --after or --consumer.",
)
def command(
    config_path: Path | None,
    server: str | None,
    token: str | None,
    run_name: str,
    after: int | None,
    unit: ResultUnit,
    builder: str | None,
    suspicious: SuspiciousFilter,
    consumer: str | None,
    follow: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Print ended sessions with their rewards, or complete results as JSON."""

    async def show() -> None:
        async with connect_client(config_path, server, token, run_name) as client:
            results = client.results(
                after, unit, raw=True, builder=builder, suspicious=suspicious, consumer=consumer, follow=follow
            )
            if output is not None:
                with _open_output(output, append=after is not None or consumer is not None) as file:
                    written = await _consume(results, _make_line_writer(file), show_status=True)
                click.echo(
                    f"{format_count(written, 'result')} to {output}. {_format_later_hint(results, consumer)}".rstrip(),
                    err=True,
                )
            elif as_json:
                await _consume(results, _make_line_writer(sys.stdout.buffer), show_status=not sys.stdout.isatty())
            elif follow:
                await _consume(
                    results,
                    lambda one: click.echo(results_view.describe_result(_decode_result(one, unit))),
                    show_status=False,
                )
            else:
                await _print_table(results, unit, consumer)

    run_async(show())


async def _consume(results: Results[RawResult], handle: Callable[[RawResult], None], *, show_status: bool) -> int:
    """Passes each result to `handle`. Returns how many there were. `show_status` shows their number meanwhile."""
    console = Console(stderr=True)
    count = 0
    with (
        console.status("waiting for results")
        if show_status and console.is_terminal
        else contextlib.nullcontext() as status
    ):
        try:
            async for result in results:
                handle(result)
                count += 1
                if status is not None:
                    status.update(f"{format_count(count, 'result')}, up to {result.cursor}")
        except asyncio.CancelledError:  # interrupted: acknowledge what was handled
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(_ACKNOWLEDGE_SECONDS):
                    await results.acknowledge()
            raise
    return count


async def _print_table(results: Results[RawResult], unit: str, consumer: str | None) -> None:
    console = set_file_width(Console())
    if unit == "session":
        sessions = [results_view.decode_session(result.data) async for result in results]
        table = results_view.make_session_table(sessions) if sessions else None
    else:
        groups = [results_view.decode_group(result.data) async for result in results]
        table = results_view.make_group_table(groups) if groups else None
    console.print("No results." if table is None else table)
    if later := _format_later_hint(results, consumer):
        console.print(later, highlight=False)


def _format_later_hint(results: Results[RawResult], consumer: str | None) -> str:
    """How to get later results, where the server does not store the cursor."""
    return "" if consumer is not None or results.cursor is None else f"Later ones: --after {results.cursor}"


def _decode_result(result: RawResult, unit: str) -> results_view.EndedSession | results_view.EndedGroup:
    return results_view.decode_session(result.data) if unit == "session" else results_view.decode_group(result.data)


def _make_line_writer(file: BinaryIO) -> Callable[[RawResult], None]:
    """Writes and flushes each line before the next result is requested, which acknowledges this one."""

    def write(result: RawResult) -> None:
        file.write(result.data + b"\n")
        file.flush()

    return write


@contextlib.contextmanager
def _open_output(path: Path, *, append: bool) -> Iterator[BinaryIO]:
    try:
        with path.open("ab" if append else "wb") as file:
            yield file
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"Can't write {path}: {error.strerror}.") from error
