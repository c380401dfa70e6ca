"""polar matrix: served models over harnesses, as a table of pass@1."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from polar.cli.common import json_option, log_options, run, start_log
from polar.cli.interrupts import Interrupts
from polar.cli.run_progress import Progress, followed, progress
from polar.cli.run_summary import console_of_width
from polar.cli.run_tally import Tally, count, listed
from polar.config import Settings
from polar.data_plane import settle_process
from polar.matrix.results import Cell, Matrix
from polar.matrix.running import Run
from polar.matrix.settings import MatrixSettings, load
from polar.node.finished import Finished
from polar.node.node import Load
from polar.telemetry.logs import Format, Level

_FILE = "matrix.json"


@click.command("matrix")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--output", help="the folder of everything that is kept; one with results in it is gone on with")
@log_options
@json_option
def command(config: Path, output: str | None, log_format: Format | None, log_level: Level | None, as_json: bool) -> int:
    """Run the tasks of CONFIG with each of its models in each of its harnesses. What was interrupted goes on where it
    was: start it again."""
    start_log(Settings(), log_format, log_level)
    settings = load(config, output=None if output is None else str(Path(output).absolute()))
    return run(_matrix(settings, as_json))


async def _matrix(settings: MatrixSettings, as_json: bool) -> int:
    settle_process()
    matrix = Run(settings)
    watching = _Watching(Console(stderr=True), silent=as_json)
    with Interrupts(lambda: watching.say(_INTERRUPTED), watching.stop) as interrupts:
        try:
            await matrix.to_its_end(watching)
        except asyncio.CancelledError:
            if interrupts.received is None:
                raise
    found = await matrix.matrix()
    settings.output_folder.mkdir(parents=True, exist_ok=True)
    (settings.output_folder / _FILE).write_text(json.dumps(found.told(), indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(found.told()))
    else:
        _show(found)
    if interrupts.status is not None:
        return interrupts.status
    if not found.complete:
        click.echo(f"polar: {_complaint(found)}", err=True)
        return 1
    return 0


class _Watching:
    """Shows sessions as they go, model after model."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self._console = console
        self._silent = silent
        self._shown: Progress | None = None
        self._tally = Tally()

    @contextlib.asynccontextmanager
    async def running(self, model: str, sessions: int, load: Callable[[], Load]) -> AsyncIterator[None]:
        self._tally = Tally()
        with progress(self._console, sessions, silent=self._silent) as self._shown:
            if not self._silent:
                self.say(f"{model}: {count(sessions, 'session')}")
            async with followed(self._shown, load, self._tally):
                yield

    def ended(self, finished: Finished) -> None:
        self._tally.add(finished)
        if self._shown is not None:
            self._shown.ended(finished, self._tally)

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self._shown is not None:
            self._shown.stop()


_INTERRUPTED = "Interrupted: sessions are cancelled and torn down. The same command goes on with the rest."


def _show(matrix: Matrix) -> None:
    console = console_of_width(Console())
    table = Table(title=f"pass@1 of {count(matrix.tasks, 'task')}", title_justify="left")
    table.add_column("model", overflow="fold")
    for harness in matrix.harnesses:
        table.add_column(harness, justify="right")
    for model in matrix.models:
        table.add_row(model, *(_written(cell) for cell in matrix.cells if cell.model == model))
    console.print(table)
    console.print("solved/graded sessions in brackets; ± the standard error over tasks", highlight=False)


def _written(cell: Cell) -> str:
    if cell.pass_at_1 is None:
        return f"none of {cell.asked}"
    error = "" if cell.stderr is None else f" ± {100 * cell.stderr:.1f}"
    missing = "" if cell.graded == cell.asked else f", {cell.asked - cell.graded} missing"
    return f"{100 * cell.pass_at_1:.1f}%{error} ({cell.solved}/{cell.graded}{missing})"


def _complaint(matrix: Matrix) -> str:
    lines = [
        f"{cell.model} in {cell.harness}: {cell.asked - cell.graded} of {count(cell.asked, 'session')} without a reward"
        + (f" ({listed(Counter(cell.reasons))})" if cell.reasons else "")
        for cell in matrix.cells
        if cell.graded < cell.asked
    ]
    return "\n  ".join(["Some sessions have no reward, through no fault of the agent's: run it again.", *lines])
