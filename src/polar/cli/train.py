"""polar train: reinforcement learning over the rollout service, from one file of settings."""

import asyncio
import json
import os
from pathlib import Path

import click
from rich.console import Console

from polar.cli.common import json_option, log_options, run, start_log
from polar.cli.train_progress import watched
from polar.config import Settings
from polar.errors import ConfigError
from polar.telemetry.logs import Format, Level


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
    log_format: Format | None,
    log_level: Level | None,
    as_json: bool,
) -> int:
    """Train the model of CONFIG on its tasks. A run that was interrupted goes on where it was: start it again."""
    start_log(Settings(), log_format, log_level)
    return run(_train(config, None if output is None else os.path.abspath(output), steps, seed, as_json))


async def _train(config: Path, output: str | None, steps: int | None, seed: int | None, as_json: bool) -> int:
    try:
        from polar.models import default_model, shown
        from polar.train.settings import load
    except ImportError as error:
        raise ConfigError(f"polar train needs the extra `train`: pip install 'polar[train]' ({error}).") from error
    settings = load(config, output=output, steps=steps, seed=seed)
    if settings.model.folder is None:
        with shown() as bar:
            await asyncio.to_thread(default_model, bar)
    outcome = await watched(settings, Console(stderr=True), _interrupted, silent=as_json)
    if isinstance(outcome, int):
        return outcome
    if as_json:
        told = {
            "steps": outcome.history[-1].step,
            "held_out_before": outcome.before,
            "held_out_after": outcome.after,
            "output": str(outcome.output),
            "model": str(outcome.model),
            "picture": str(outcome.picture),
        }
        click.echo(json.dumps(told))
        return 0
    console = Console()
    if outcome.before is not None and outcome.after is not None:
        console.print(f"held-out tasks  {outcome.before:.3f} before, {outcome.after:.3f} after", highlight=False)
    for name, path in (("model", outcome.model), ("reward curve", outcome.picture), ("everything", outcome.output)):
        console.print(f"{name:<15} {path}", highlight=False, soft_wrap=True)
    return 0


def _interrupted() -> None:
    click.echo(
        "polar: Interrupted: what runs is torn down. The same command goes on from the last checkpoint.", err=True
    )
