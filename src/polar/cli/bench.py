"""polar bench: the benchmarks, each against its peers in the same run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polar.bench import fidelity as fidelity_bench
from polar.bench import (
    fidelity_report,
    fidelity_sessions,
    pipeline_report,
    report,
    sandbox_report,
    service_report,
    trajectory_report,
)
from polar.bench import gateway as gateway_bench
from polar.bench import pipeline as pipeline_bench
from polar.bench import sandbox as sandbox_bench
from polar.bench import service as service_bench
from polar.bench import trajectory as trajectory_bench
from polar.bench.peers import litellm
from polar.bench.pipeline_picture import picture as pipeline_picture
from polar.cli.common import json_option, run
from polar.data_plane import settle_process

_ENVIRONMENT = Path(".cache/bench-litellm")
_HARNESSES = (
    Path(".cache/node/node_modules/.bin"),
    Path(".cache/harnesses/node_modules/.bin"),
    Path(".cache/harnesses-venv/bin"),
)
"""Where `make` installs harnesses."""


_tokenizer_option = click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="a model's folder, with tokenizer and chat template [default: the scripted engine's own]",
)


@click.group("bench")
def command() -> None:
    """Measure Polar against its peers, in one run on this machine. Nothing but loopback is used."""


@command.command("gateway")
@click.option("--quick", is_flag=True, help="fewer rounds: a minute and a half instead of four")
@click.option(
    "--litellm",
    "environment",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"a virtual environment with LiteLLM [default: {_ENVIRONMENT}, made if it is not there]",
)
@click.option("--no-litellm", is_flag=True, help="leave LiteLLM out")
@json_option
def gateway(quick: bool, environment: Path | None, no_litellm: bool, as_json: bool) -> None:
    """CPU per captured call, added latency, many streams and idle sessions."""
    console = Console(stderr=True)
    where = None if no_litellm else environment or _install(console)
    plan = gateway_bench.QUICK if quick else gateway_bench.Plan()
    measured = run(gateway_bench.run(plan, where, _progress(console)))
    if as_json:
        click.echo(report.as_json(measured))
    else:
        report.show(measured, _wide())


@command.command("trajectory")
@click.option("--quick", is_flag=True, help="fewer and smaller sessions")
@click.option(
    "--peer-python",
    "peer_pythons",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="an interpreter whose environment has TRL, AReaL or both; may be given twice",
)
@_tokenizer_option
@json_option
def trajectory(quick: bool, peer_pythons: tuple[Path, ...], tokenizer: Path | None, as_json: bool) -> None:
    """Tokens a second into the token tree, what a session takes on disk, and what a turn at 30k tokens costs."""
    plan = trajectory_bench.QUICK if quick else trajectory_bench.FULL
    progress = _progress(Console(stderr=True))
    measured = run(trajectory_bench.run(plan, peer_pythons, progress, _folder(tokenizer)))
    if as_json:
        click.echo(trajectory_report.as_json(measured))
    else:
        trajectory_report.show(measured, _wide())


@command.command("fidelity")
@click.option(
    "--harness", "harnesses", multiple=True, help="only this one; may be given twice [default: all installed]"
)
@click.option("--turns", default=20, show_default=True, type=click.IntRange(min=4), help="of each session")
@_tokenizer_option
@json_option
def fidelity(harnesses: tuple[str, ...], turns: int, tokenizer: Path | None, as_json: bool) -> None:
    """Tokens trained in a wrong context, and tokens lost, with real harnesses and a baseline that merges by prompts.

    Harnesses are looked for on PATH and where `make` puts them; a small agent, `built-in`, is always there.
    """
    agents = fidelity_sessions.installed(harnesses, _HARNESSES)
    with _bar() as progress:
        measured = run(fidelity_bench.run(agents, turns=turns, tokenizer=_folder(tokenizer), progress=progress))
    if as_json:
        click.echo(fidelity_report.as_json(measured))
    else:
        fidelity_report.show(measured, _wide())


def _folder(tokenizer: Path | None) -> str | None:
    return None if tokenizer is None else str(tokenizer.absolute())


def _progress(console: Console) -> Callable[[str], None]:
    began = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {what}", highlight=False)

    return progress


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """For what is counted: takes what goes on, and how many are done of how many."""
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield progress


def _install(console: Console) -> Path:
    if litellm.executable(_ENVIRONMENT) is None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as bar:
            bar.add_task(f"installing LiteLLM {litellm.VERSION} into {_ENVIRONMENT}", total=None)
            litellm.install(_ENVIRONMENT)
    return _ENVIRONMENT


@command.command("sandbox")
@click.option("--quick", is_flag=True, help="one round")
@json_option
def sandbox(quick: bool, as_json: bool) -> None:
    """Cold start of a sandbox, and a ready one, against docker run."""
    plan = sandbox_bench.QUICK if quick else sandbox_bench.Plan()
    measured = run(sandbox_bench.run(plan, _progress(Console(stderr=True))))
    if as_json:
        click.echo(sandbox_report.as_json(measured))
    else:
        sandbox_report.show(measured, _wide())


@command.command("pipeline")
@click.option("--quick", is_flag=True, help="fewer and shorter sessions: two minutes instead of four")
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("pipeline.svg"),
    show_default=True,
    help="where the engine's batch over time is drawn",
)
@json_option
def pipeline(quick: bool, picture: Path, as_json: bool) -> None:
    """How busy the node's stages keep a simulated engine, against sessions run one by one."""
    plan = pipeline_bench.QUICK if quick else pipeline_bench.Plan()
    settle_process()
    with _bar() as progress:
        measured = run(pipeline_bench.run(plan, progress))
    picture.write_text(pipeline_picture(measured), encoding="utf-8")
    if as_json:
        click.echo(pipeline_report.as_json(measured))
    else:
        pipeline_report.show(measured, _wide())
    click.echo(f"The picture is in {picture}.", err=as_json)


@command.command("service")
@click.option("--quick", is_flag=True, help="fewer sessions, and 20,000 queued instead of 100,000")
@click.option(
    "--postgres", metavar="URL", help="of a server where databases may be made [default: pgserver, if it is there]"
)
@click.option(
    "--peer-python",
    "peer_pythons",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="an interpreter whose environment has huey, procrastinate or both; may be given twice",
)
@json_option
def service(quick: bool, postgres: str | None, peer_pythons: tuple[Path, ...], as_json: bool) -> None:
    """Sessions and results a second through the rollout service, and what a long queue costs."""
    plan = service_bench.QUICK if quick else service_bench.Plan()
    measured = run(service_bench.run(plan, postgres, peer_pythons, _progress(Console(stderr=True))))
    if as_json:
        click.echo(service_report.as_json(measured))
    else:
        service_report.show(measured, _wide())


def _wide() -> Console:
    """Tables of figures: rather wrapped by the terminal than cut."""
    return Console(width=max(Console().width, 130))
