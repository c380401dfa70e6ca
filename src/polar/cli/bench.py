"""polar bench: the benchmarks, each against its peers in the same run."""

import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polar.bench import gateway as gateway_bench
from polar.bench import report
from polar.bench.peers import litellm
from polar.cli.common import json_option, run

_ENVIRONMENT = Path(".cache/bench-litellm")


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
    began = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {what}", highlight=False)

    measured = run(gateway_bench.run(plan, where, progress))
    if as_json:
        click.echo(report.as_json(measured))
    else:
        report.show(measured, Console())


def _install(console: Console) -> Path:
    if litellm.executable(_ENVIRONMENT) is None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as bar:
            bar.add_task(f"installing LiteLLM {litellm.VERSION} into {_ENVIRONMENT}", total=None)
            litellm.install(_ENVIRONMENT)
    return _ENVIRONMENT
