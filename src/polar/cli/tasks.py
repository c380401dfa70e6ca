"""TASK arguments of commands; polar tasks: makes tasks from data sets."""

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
_MAX_NAMES_SHOWN = 5  # of omitted rows
SOURCES_KEY = "polar.sources"
"""The key in click's context of each task's source, by task id."""


def task_options(function: Callable[..., T]) -> Callable[..., T]:
    """Options of commands that take tasks: files and folders, and overrides of their fields. The command gets `tasks`,
    validated and with the overrides applied."""

    @click.option("--harness", metavar="NAME[@VERSION]", help="Run this harness instead of the tasks' own.")
    @click.option(
        "--samples", type=click.IntRange(1), help="Run this many sessions of each task [default: the task's]."
    )
    @click.option("--model", help="Set the model name that harnesses request.")
    @click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Limit each session to so many seconds.")
    @click.option("--backend", help="Run all tasks in this runtime: bubblewrap, docker, podman or local.")
    @click.option("--image", help="Use this image for all tasks' runtimes.")
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
        sources = read_sources(paths, backend=backend)
        click.get_current_context().meta[SOURCES_KEY] = {task.task_id: source for source, task in sources}
        return function(tasks=[overrides.apply(task) for _, task in sources], **others)

    return wrapper


@click.group("tasks")
def command() -> None:
    """Make tasks from data sets."""


@command.command("swe")
@click.argument("rows", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write tasks to this JSONL file.")
@click.option(
    "--set",
    "images",
    type=click.Choice(list(swe_bench.IMAGE_TEMPLATES)),
    default="swe-bench",
    show_default=True,
    help="Use the images of this data set.",
)
@click.option(
    "--image", metavar="TEMPLATE", help="Name images by a template with {owner}, {name} or any field of a row."
)
@click.option(
    "--repositories", type=click.Path(path_type=Path), help="Use clones OWNER__NAME in this folder instead of images."
)
@click.option("--backend", help="Run tasks in this runtime [default: docker; bubblewrap with --repositories].")
@click.option(
    "--harness", "harnesses", multiple=True, metavar="NAME[@VERSION]", help="Make a task of each row for this harness."
)
@click.option(
    "--samples", type=click.IntRange(1), default=1, show_default=True, help="Run this many sessions of each task."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=1800,
    show_default=True,
    help="Limit each session to so many seconds.",
)
@click.option("--turns", type=click.IntRange(1), help="Limit each session to so many model calls [default: no limit].")
@click.option(
    "--instruction",
    type=click.Path(path_type=Path),
    help="Read the instruction from a text with {problem_statement} in it.",
)
@click.option("--python", help="Run tests with this interpreter [default: the image's; python3 with --repositories].")
@click.option(
    "--pytest",
    "pytest_folder",
    type=click.Path(path_type=Path),
    help="Use pytest from this folder (pip install --target FOLDER pytest).",
)
@click.option(
    "--test-command",
    "commands",
    multiple=True,
    metavar="REPO=COMMAND",
    help="Run a repository's tests by this command, with {python} and {files}.",
)
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
    """Make tasks from ROWS with SWE-bench's fields (.parquet, .jsonl, .json), such as SWE-bench Verified or SWE-Gym."""
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
        commands=dict(_parse_test_command(command) for command in commands),
    )
    result = swe_bench.make_tasks(chain.from_iterable(map(swe_bench.read_rows, rows)), options)
    _write_tasks(result.tasks, output)
    if as_json:
        click.echo(json.dumps({"tasks": len(result.tasks), "left_out": result.left_out, "output": str(output)}))
        return
    instances = {task.metadata["instance_id"] for task in result.tasks}
    click.echo(f"{format_count(len(result.tasks), 'task')} of {format_count(len(instances), 'row')} in {output}")
    for why, names in result.left_out.items():
        named = ", ".join(names[:_MAX_NAMES_SHOWN]) + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
        click.echo(f"{format_count(len(names), 'row')} left out, with {why}: {named}", err=True)


def _read_template(path: Path) -> str:
    text = read_text(path)
    if "{problem_statement}" not in text:
        raise ConfigError(f"{path}: add {{problem_statement}} where the row's problem statement belongs.")
    return text


def _parse_test_command(command: str) -> tuple[str, str]:
    repo, separator, words = command.partition("=")
    if not separator or not words.strip():
        raise ConfigError(f"--test-command {shlex.quote(command)}: write OWNER/NAME=COMMAND.")
    return repo, words


def _write_tasks(tasks: list[TaskRequest], output: Path) -> None:
    lines = [msgspec.json.encode(task.model_dump(exclude_unset=True, mode="json")) for task in tasks]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"\n".join([*lines, b""]))
    except OSError as error:
        raise ConfigError(f"Can't write {output}: {error.strerror}.") from error
