"""Tasks as the command line names them; polar tasks: tasks made of data sets."""

import functools
import json
import shlex
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from polar.cli.common import json_option
from polar.cli.run_tally import format_count
from polar.errors import ConfigError
from polar.records.task import TaskRequest
from polar.tasks import read_sources, swe_bench
from polar.tasks.overrides import Overrides
from polar.tasks.task_files import read_text

T = TypeVar("T")
_MAX_NAMES_SHOWN = 5  # rows that are left out
SOURCES_KEY = "polar.sources"
"""In click's context: each task's source, by its id."""


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
    def wrapper(
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
        found = read_sources(paths, backend=backend)
        click.get_current_context().meta[SOURCES_KEY] = {task.task_id: source for source, task in found}
        return function(tasks=[overrides.apply(task) for _, task in found], **others)

    return wrapper


@click.group("tasks")
def command() -> None:
    """Tasks made of data sets."""


@command.command("swe")
@click.argument("rows", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="the tasks, one a line (.jsonl)")
@click.option(
    "--set",
    "images",
    type=click.Choice(list(swe_bench.IMAGE_TEMPLATES)),
    default="swe-bench",
    show_default=True,
    help="whose images",
)
@click.option("--image", metavar="TEMPLATE", help="images by another name: {owner}, {name}, or any field of a row")
@click.option("--repositories", type=click.Path(path_type=Path), help="clones, OWNER__NAME each, instead of images")
@click.option("--backend", help="the runtime [default: docker; bubblewrap with --repositories]")
@click.option("--harness", "harnesses", multiple=True, metavar="NAME[@VERSION]", help="a task for each, of every row")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="sessions of each task")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=1800, show_default=True, help="seconds")
@click.option("--turns", type=click.IntRange(1), help="calls of the model that a session may make [default: any]")
@click.option("--instruction", type=click.Path(path_type=Path), help="a text with {problem_statement} in it")
@click.option("--python", help="that runs the tests [default: the images' own; python3 with --repositories]")
@click.option("--pytest", "pytest_folder", type=click.Path(path_type=Path), help="pip install --target FOLDER pytest")
@click.option("--test-command", "commands", multiple=True, metavar="REPO=COMMAND", help="with {python} and {files}")
@json_option
def swe_command(
    rows: tuple[Path, ...],
    output: Path,
    images: str,
    image: str | None,
    repositories: Path | None,
    backend: str | None,
    harnesses: tuple[str, ...],
    samples: int,
    timeout: float,
    turns: int | None,
    instruction: Path | None,
    python: str | None,
    pytest_folder: Path | None,
    commands: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tasks of ROWS with SWE-bench's fields (.parquet, .jsonl, .json): SWE-bench, its Verified part, SWE-Gym."""
    options = swe_bench.SweBenchOptions(
        image=image or swe_bench.IMAGE_TEMPLATES[images],
        repositories=repositories,
        backend=backend or ("docker" if repositories is None else "bubblewrap"),
        harnesses=harnesses,
        samples=samples,
        timeout=timeout,
        turns=turns,
        instruction=swe_bench.INSTRUCTION if instruction is None else _read_template(instruction),
        python=python,
        pytest=pytest_folder,
        commands=dict(_parse_test_command(one) for one in commands),
    )
    made = swe_bench.make_tasks(chain.from_iterable(map(swe_bench.read_rows, rows)), options)
    _write_tasks(made.tasks, output)
    if as_json:
        click.echo(json.dumps({"tasks": len(made.tasks), "left_out": made.left_out, "output": str(output)}))
        return
    instances = {task.metadata["instance_id"] for task in made.tasks}
    click.echo(f"{format_count(len(made.tasks), 'task')} of {format_count(len(instances), 'row')} in {output}")
    for why, names in made.left_out.items():
        named = ", ".join(names[:_MAX_NAMES_SHOWN]) + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
        click.echo(f"{format_count(len(names), 'row')} left out, with {why}: {named}", err=True)


def _read_template(path: Path) -> str:
    text = read_text(path)
    if "{problem_statement}" not in text:
        raise ConfigError(f"{path}: it has no {{problem_statement}}, where the row's is put in.")
    return text


def _parse_test_command(command: str) -> tuple[str, str]:
    repo, given, words = command.partition("=")
    if not given or not words.strip():
        raise ConfigError(f"--test-command {shlex.quote(command)}: write OWNER/NAME=COMMAND.")
    return repo, words


def _write_tasks(tasks: list[TaskRequest], output: Path) -> None:
    lines = [msgspec.json.encode(task.model_dump(exclude_unset=True, mode="json")) for task in tasks]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"\n".join([*lines, b""]))
    except OSError as error:
        raise ConfigError(f"{output}: it can't be written: {error.strerror}.") from error
