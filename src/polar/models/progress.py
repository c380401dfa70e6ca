"""How far the making of a model is, for whoever waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import rich.progress
from rich.console import Console


class ModelProgress(Protocol):
    def start_step(self, description: str, total: float | None = None) -> None:
        """Another part begins: of so many bytes, where that is known."""
        ...

    def advance(self, bytes: float) -> None: ...


class SilentProgress:
    def start_step(self, description: str, total: float | None = None) -> None: ...

    def advance(self, bytes: float) -> None: ...


class _ProgressBar:
    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._task: rich.progress.TaskID | None = None

    def start_step(self, description: str, total: float | None = None) -> None:
        self.finish()
        self._task = self._bar.add_task(description, total=total)

    def advance(self, bytes: float) -> None:
        if self._task is not None:
            self._bar.advance(self._task, bytes)

    def finish(self) -> None:
        if self._task is not None:
            task = self._bar.tasks[self._task]
            total = task.total if task.total is not None else 1.0
            self._bar.update(self._task, total=total, completed=total)


@contextmanager
def show_progress() -> Iterator[ModelProgress]:
    """Bars on standard error. Nothing is drawn before there is a first step."""
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.percentage:>3.0f} %"),
        rich.progress.TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bar:
        steps = _ProgressBar(bar)
        yield steps
        steps.finish()
