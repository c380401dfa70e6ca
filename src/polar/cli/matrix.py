"""polar matrix: evaluates models in harnesses, as a table of pass@1."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from polar.cli.common import json_option, log_options, run_async, start_logging
from polar.cli.interrupts import Interrupts
from polar.cli.run_progress import RunProgress, poll_load, show_progress
from polar.cli.run_tally import RunTally, format_count, format_counts, set_file_width
from polar.config import Settings
from polar.gateway.process import tune_process
from polar.matrix.matrix_run import MatrixRun, MatrixSettings, load_matrix_settings
from polar.matrix.results import Cell, Matrix
from polar.node.finished_session import FinishedSession
from polar.node.node import NodeLoad
from polar.telemetry.logs import LogFormat, LogLevel

_RESULT_FILE = "matrix.json"


@click.command("matrix")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--output", help="Keep results in this folder; resume the matrix that is in it.")
@log_options
@json_option
def command(
    config: Path, output: str | None, log_format: LogFormat | None, log_level: LogLevel | None, as_json: bool
) -> int:
    """Run the tasks of CONFIG with each of its models in each of its harnesses. Repeat the command to resume an
    interrupted matrix."""
    start_logging(Settings(), log_format, log_level)
    settings = load_matrix_settings(config, output=None if output is None else str(Path(output).absolute()))
    return run_async(_run_matrix(settings, as_json))


async def _run_matrix(settings: MatrixSettings, as_json: bool) -> int:
    tune_process()
    matrix = MatrixRun(settings)
    progress = _MatrixProgress(Console(stderr=True), silent=as_json)
    with Interrupts(lambda: progress.print_message(_INTERRUPTED_MESSAGE), progress.stop) as interrupts:
        try:
            await matrix.run(progress)
        except asyncio.CancelledError:
            if interrupts.received_signal is None:
                raise
    results = await matrix.load_matrix()
    settings.output_folder.mkdir(parents=True, exist_ok=True)
    (settings.output_folder / _RESULT_FILE).write_text(json.dumps(results.to_dict(), indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(results.to_dict()))
    else:
        _print_matrix(results)
    if interrupts.exit_status is not None:
        return interrupts.exit_status
    if not results.is_complete:
        click.echo(f"polar: {_describe_missing(results)}", err=True)
        return 1
    return 0


class _MatrixProgress:
    """Shows the progress of each model's sessions."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self._console = console
        self._silent = silent
        self._progress: RunProgress | None = None
        self._tally = RunTally()

    @contextlib.asynccontextmanager
    async def show_model(self, model: str, sessions: int, load: Callable[[], NodeLoad]) -> AsyncIterator[None]:
        self._tally = RunTally()
        with show_progress(self._console, sessions, silent=self._silent) as self._progress:
            if not self._silent:
                self.print_message(f"{model}: {format_count(sessions, 'session')}")
            async with poll_load(self._progress, load, self._tally):
                yield

    def on_session_ended(self, finished: FinishedSession) -> None:
        self._tally.add(finished)
        if self._progress is not None:
            self._progress.on_session_ended(finished, self._tally)

    def print_message(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


_INTERRUPTED_MESSAGE = "Interrupted: sessions are cancelled and torn down. Repeat the command to continue."


def _print_matrix(matrix: Matrix) -> None:
    console = set_file_width(Console())
    table = Table(title=f"pass@1 of {format_count(matrix.tasks, 'task')}", title_justify="left")
    table.add_column("model", overflow="fold")
    for harness in matrix.harnesses:
        table.add_column(harness, justify="right")
    for model in matrix.models:
        table.add_row(model, *(_format_cell(cell) for cell in matrix.cells if cell.model == model))
    console.print(table)
    console.print("solved/graded sessions in brackets; ± the standard error over tasks", highlight=False)


def _format_cell(cell: Cell) -> str:
    if cell.pass_at_1 is None:
        return f"none of {cell.asked}"
    error = "" if cell.stderr is None else f" ± {100 * cell.stderr:.1f}"
    missing = "" if cell.graded == cell.asked else f", {cell.asked - cell.graded} missing"
    return f"{100 * cell.pass_at_1:.1f}%{error} ({cell.solved}/{cell.graded}{missing})"


def _describe_missing(matrix: Matrix) -> str:
    lines = [
        f"{cell.model} in {cell.harness}: {cell.asked - cell.graded} of "
        f"{format_count(cell.asked, 'session')} without a reward"
        + (f" ({format_counts(Counter(cell.reasons))})" if cell.reasons else "")
        for cell in matrix.cells
        if cell.graded < cell.asked
    ]
    return "\n  ".join(["Some sessions have no reward because the platform failed: repeat the command.", *lines])
