"""polar train: reinforcement learning over the rollout service, from one file of settings."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar.cli.common import json_option, log_options, run_async, start_logging
from polar.cli.interrupts import Interrupts
from polar.config import Settings
from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.telemetry.logs import LogFormat, LogLevel
from polar.train.metrics import STEP_PHASES, StepMetrics
from polar.train.settings import TrainSettings

if TYPE_CHECKING:
    from polar.train.run import TrainingResult


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
        raise ConfigError(f"polar train needs the extra `train`: {install_hint('train')} ({error}).") from error
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


# The live display: current stage, last steps, reward curve

_MAX_STEPS_SHOWN = 8  # steps that are shown
_CURVE_HEIGHT, _CURVE_WIDTH = 8, 60  # of the curve
_BLOCKS = " ▁▂▃▄▅▆▇█"


class TrainProgress:
    """A trainer.Watcher. Without a terminal it prints a line for each step; `silent`, nothing."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self._console = console
        self._silent = silent
        self._history: list[StepMetrics] = []
        self._steps = 0
        self._activity = "starting"
        self._started_at = time.monotonic()
        self._live: Live | None = None

    def __rich__(self) -> Group:
        minutes, seconds = divmod(int(time.monotonic() - self._started_at), 60)
        step = self._history[-1].step if self._history else 0
        head = Text(f"step {step} of {self._steps}   {self._activity}   {minutes}:{seconds:02}")
        return Group(head, _step_table(self._history[-_MAX_STEPS_SHOWN:]), render_reward_curve(self._history))

    def make_live(self) -> Live | None:
        if self._silent or not self._console.is_terminal:
            return None
        self._live = Live(self, console=self._console, refresh_per_second=2)
        return self._live

    def on_begin(self, history: Sequence[StepMetrics], steps: int) -> None:
        self._history, self._steps = list(history), steps
        if history:
            self.on_message(f"Going on behind step {history[-1].step}.")

    def on_wait(self, ready: int, wanted: int) -> None:
        self._activity = f"sampling: {ready} of {wanted} groups"

    def on_learn(self, step: int, sessions: int) -> None:
        self._activity = f"step {step}: learning from {sessions} sessions"

    def on_evaluate(self, step: int) -> None:
        self._activity = f"evaluating on held-out tasks after step {step}"

    def on_message(self, text: str) -> None:
        if not self._silent:
            self._console.print(text, highlight=False, soft_wrap=True)

    def on_step(self, metrics: StepMetrics) -> None:
        self._history.append(metrics)
        if self._live is None:
            self.on_message(_format_step(metrics, self._steps))


async def train_with_progress(
    settings: TrainSettings, console: Console, interrupted: Callable[[], None], *, silent: bool
) -> "TrainingResult | int":
    """Trains before people's eyes. An exit status, where they interrupted it."""
    from polar.train.run import train

    with show_progress(console, silent=silent) as watcher, Interrupts(interrupted, lambda: None) as interrupts:
        try:
            return await train(settings, watcher)
        except asyncio.CancelledError:
            if interrupts.exit_status is None:
                raise
            return interrupts.exit_status


@contextlib.contextmanager
def show_progress(console: Console, *, silent: bool) -> Iterator[TrainProgress]:
    shown = TrainProgress(console, silent=silent)
    live = shown.make_live()
    with live or contextlib.nullcontext():
        yield shown


def _format_number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _format_step(metrics: StepMetrics, steps: int) -> str:
    parts = [f"step {metrics.step}/{steps}"]
    for name, value, form in (
        ("reward", metrics.reward, ".3f"),
        ("held out", metrics.held_out, ".3f"),
        ("loss", metrics.loss, ".4f"),
        ("gradient", metrics.grad_norm, ".3g"),
        ("ratio", metrics.ratio_mean, ".4f"),
        ("lag", metrics.lag_mean, ".2f"),
    ):
        if value is not None:
            parts.append(f"{name} {value:{form}}")
    if metrics.groups_filtered:
        parts.append("filtered " + ", ".join(f"{count} {why}" for why, count in metrics.groups_filtered.items()))
    if told := [f"{phase} {metrics.seconds[phase]:.1f}s" for phase in STEP_PHASES if phase in metrics.seconds]:
        parts.append(" ".join(told))
    return "   ".join(parts)


def _step_table(rows: Sequence[StepMetrics]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("step", "reward", "held out", "loss", "gradient", "ratio", "lag", "filtered", "wait", "learn", "sync"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.step),
            _format_number(row.reward),
            _format_number(row.held_out),
            _format_number(row.loss, ".4f"),
            _format_number(row.grad_norm, ".3g"),
            _format_number(row.ratio_mean, ".4f"),
            _format_number(row.lag_mean, ".2f"),
            str(sum(row.groups_filtered.values()) or ""),
            *(_format_number(row.seconds.get(phase), ".1f") for phase in ("wait", "compute", "sync")),
        )
    return table


def render_reward_curve(history: Sequence[StepMetrics]) -> Text:
    """The training tasks' reward as columns, in eighths of a line; held-out rewards as numbers below."""
    rewards = [row.reward for row in history if row.reward is not None][-_CURVE_WIDTH:]
    text = Text()
    if not rewards:
        return text
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    filled = [round((reward - low) / (high - low) * 8 * _CURVE_HEIGHT) for reward in rewards]
    for line in range(_CURVE_HEIGHT - 1, -1, -1):
        label = f"{high:5.2f} " if line == _CURVE_HEIGHT - 1 else f"{low:5.2f} " if line == 0 else " " * 6
        text.append(label, "dim")
        text.append("".join(_BLOCKS[min(8, max(0, one - 8 * line))] for one in filled) + "\n", "cyan")
    held_out = [f"{row.held_out:.2f}" for row in history if row.held_out is not None]
    if held_out:
        text.append("held out " + " → ".join(held_out), "bold")
    return text
