"""Tasks as the command line names them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from polar.rollout.overrides import Overrides
from polar.tasks import read

T = TypeVar("T")


def task_options(function: Callable[..., T]) -> Callable[..., T]:
    """For commands that take tasks: files and folders, and what is wanted otherwise than they say. The command gets
    `tasks`, which are read, checked and changed."""

    @click.option("--harness", metavar="NAME[@VERSION]", help="run this one instead of the tasks' own")
    @click.option("--samples", type=click.IntRange(1), help="sessions of each task [default: as the task says]")
    @click.option("--model", help="the model name that harnesses are told to ask for")
    @click.option("--timeout", type=click.FloatRange(0, min_open=True), help="seconds of each session's run")
    @click.option("--backend", help="the runtime of all tasks: bubblewrap, docker, podman or local")
    @click.option("--image", help="the image of all tasks' runtimes")
    @click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TASK...")
    @functools.wraps(function)
    def reading(
        *,
        paths: tuple[Path, ...],
        harness: str | None,
        samples: int | None,
        model: str | None,
        timeout: float | None,
        backend: str | None,
        image: str | None,
        **others: Any,
    ) -> T:
        overrides = Overrides(harness, samples, model, timeout, image)
        return function(tasks=[overrides.apply(task) for task in read(paths, backend=backend)], **others)

    return reading
