"""polar train: reinforcement learning over the rollout service, from one file of settings."""

import asyncio
import json
import os
from pathlib import Path

import click
from rich.console import Console

from polar.cli.common import json_option, log_options, run_async, start_logging
from polar.cli.train_progress import train_with_progress
from polar.config import Settings
from polar.errors import ConfigError
from polar.telemetry.logs import LogFormat, LogLevel


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--output", help="the folder of everything that is kept; one with a run in it is taken up")
@click.option("--steps", type=click.IntRange(1), help="instead of the settings' own")
@click.option("--seed", type=click.IntRange(0), help="instead of the settings' own")
@log_options
@json_option
def command(
    config: Path,
    output: str | None,
    steps: int | None,
    seed: int | None,
    log_format: LogFormat | None,
    log_level: LogLevel | None,
    as_json: bool,
) -> int:
    """Train the model of CONFIG on its tasks. A run that was interrupted goes on where it was: start it again."""
    start_logging(Settings(), log_format, log_level)
    return run_async(_train(config, None if output is None else os.path.abspath(output), steps, seed, as_json))


async def _train(config: Path, output: str | None, steps: int | None, seed: int | None, as_json: bool) -> int:
    try:
        from polar.models import ensure_default_model, show_progress
        from polar.train.settings import load_settings
    except ImportError as error:
        raise ConfigError(f"polar train needs the extra `train`: pip install 'polar[train]' ({error}).") from error
    settings = load_settings(config, output=output, steps=steps, seed=seed)
    if settings.model.folder is None:
        with show_progress() as bar:
            await asyncio.to_thread(ensure_default_model, bar)
    outcome = await train_with_progress(settings, Console(stderr=True), _report_interrupted, silent=as_json)
    if isinstance(outcome, int):
        return outcome
    if as_json:
        told = {
            "steps": outcome.history[-1].step,
            "held_out_before": outcome.held_out_before,
            "held_out_after": outcome.held_out_after,
            "output": str(outcome.output),
            "model": str(outcome.model),
            "picture": str(outcome.plot),
        }
        click.echo(json.dumps(told))
        return 0
    console = Console()
    if outcome.held_out_before is not None and outcome.held_out_after is not None:
        console.print(
            f"held-out tasks  {outcome.held_out_before:.3f} before, {outcome.held_out_after:.3f} after", highlight=False
        )
    for name, path in (("model", outcome.model), ("reward curve", outcome.plot), ("everything", outcome.output)):
        console.print(f"{name:<15} {path}", highlight=False, soft_wrap=True)
    return 0


def _report_interrupted() -> None:
    click.echo(
        "polar: Interrupted: what runs is torn down. The same command goes on from the last checkpoint.", err=True
    )
