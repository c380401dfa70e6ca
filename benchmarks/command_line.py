"""What the benchmarks' commands share: their options, progress on standard error, and a console for wide tables."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich import progress as bars
from rich.console import Console

Progress = Callable[[str], None]
"""Takes what is measured now."""
CountedProgress = Callable[[str, int, int], None]
"""Takes what is measured now, and how many are done of how many."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
tokenizer_option = click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Use the tokenizer and chat template of the model in this folder [default: the scripted engine's own].",
)
peer_python_option = click.option(
    "--peer-python",
    "peer_pythons",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="Measure the peers that this interpreter's environment has; may be repeated.",
)


def make_progress_printer() -> Progress:
    """Prints lines to standard error, with the seconds since the start."""
    console = Console(stderr=True)
    started_at = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_at:4.0f} s[/]  {what}", highlight=False)

    return progress


@contextmanager
def open_progress_bar() -> Iterator[CountedProgress]:
    """A bar on standard error."""
    columns = (
        bars.SpinnerColumn(),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.description}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield progress


def make_console(min_width: int = 130) -> Console:
    """For tables of figures, which the terminal should rather wrap than cut."""
    return Console(width=max(Console().width, min_width))
