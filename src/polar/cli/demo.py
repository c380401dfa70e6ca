"""polar demo: a small model learns to use a tool, out of nothing but what its agent earns, on this machine."""

import asyncio
import itertools
import json
import time
from importlib.util import find_spec
from pathlib import Path

import click
from click.core import ParameterSource
from msgspec import Struct
from rich.console import Console

from polar.cli.common import json_option, log_options, run_async, start_logging
from polar.cli.show import open_existing_store
from polar.cli.train import train_with_progress
from polar.cli.verify import DEFAULT_TOLERANCE, VerifyFindings, verify_sessions
from polar.config import Settings
from polar.demo import demo_folder
from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.models import ensure_default_model, show_progress
from polar.telemetry.logs import LogFormat, LogLevel
from polar.train.settings import TrainSettings

_RECOMPUTED_SESSIONS = 8
"""Sessions whose log-probabilities are recomputed: the newest, which are of the last weights."""


@click.command("demo")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of the questions, and of training")
@click.option("--steps", type=click.IntRange(1), default=14, show_default=True)
@click.option("--harness", help="who answers the questions [default: the agent of examples/lookup]")
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="that learns [default: SmolLM2-135M-Instruct, which is fetched once]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="folder of everything; one with a demo in it is taken up [default: runs/demo-N]",
)
@log_options
@json_option
def command(
    seed: int,
    steps: int,
    harness: str | None,
    model: Path | None,
    output: Path | None,
    log_format: LogFormat | None,
    log_level: LogLevel | None,
    as_json: bool,
) -> int:
    """A model learns to answer questions with a tool: live, in minutes, on two cores."""
    start_logging(Settings(), log_format, log_level)
    _check_installed(harness)
    began = time.monotonic()
    folder = output or _next_free_folder()
    if (settings := demo_folder.load_existing(folder)) is not None:
        _check_no_other_options(folder)
    else:
        if model is None:
            with show_progress() as bar:
                model = ensure_default_model(bar)
        wanted = demo_folder.DemoOptions(model, _half_the_layers(model), seed, steps, harness=harness)
        settings = demo_folder.create_demo_folder(folder, wanted)
    name = Path(settings.model.folder or "").name
    console = Console(stderr=True)
    if not as_json:
        console.print(
            f"{name} learns to look things up. Each answer stands in a file that only the agent's tool reads.\n"
            f"Questions, settings and all that is kept are in {folder}.",
            highlight=False,
            soft_wrap=True,
        )
    ended = run_async(run_demo(settings, console, silent=as_json))
    if isinstance(ended, int):
        return ended
    return report(ended, time.monotonic() - began, as_json=as_json)


def _check_no_other_options(folder: Path) -> None:
    context = click.get_current_context()
    for name in ("seed", "steps", "harness", "model"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"{folder} has a demo with settings of its own: leave out --{name}, or name another folder."
            )


class DemoResult(Struct):
    reward_before: float | None
    reward_after: float | None
    picture: Path
    output: Path
    verified: VerifyFindings  # every session
    recomputed: VerifyFindings  # some, with the model


async def run_demo(settings: TrainSettings, console: Console, *, silent: bool) -> DemoResult | int:
    """Or an exit status, where it was interrupted."""

    def interrupted() -> None:
        click.echo(f"polar: Interrupted. To go on: polar demo --output {settings.output_folder}", err=True)

    outcome = await train_with_progress(settings, console, interrupted, silent=silent)
    if isinstance(outcome, int):
        return outcome
    data = outcome.output / "service"
    verified = await verify_sessions(Settings(), data, ())
    recomputed = await _recompute(data, outcome.model, outcome.history[-1].version)
    return DemoResult(
        outcome.held_out_before, outcome.held_out_after, outcome.plot, outcome.output, verified, recomputed
    )


async def _recompute(data: Path, model: Path, version: int) -> VerifyFindings:
    """The newest sessions' log-probabilities, with the weights that sampled them."""
    from polar.trajectory.teacher import Teacher

    store = open_existing_store(Settings(), data)
    try:
        newest = [session.session_id for session in (await store.sessions())[:_RECOMPUTED_SESSIONS]]
    finally:
        await store.close()
    teacher = await asyncio.to_thread(Teacher.load, model)
    return await verify_sessions(Settings(), data, newest, teacher, version)


def report(result: DemoResult, duration_seconds: float, *, as_json: bool) -> int:
    """Prints what came of it; the exit status."""
    complaint = result.verified.describe_failure(DEFAULT_TOLERANCE) or result.recomputed.describe_failure(
        DEFAULT_TOLERANCE
    )
    sessions, sound = result.verified.sessions, result.verified.sessions - result.verified.num_faulty
    compared = result.recomputed.comparison
    if as_json:
        told = {
            "held_out_before": result.reward_before,
            "held_out_after": result.reward_after,
            "seconds": round(duration_seconds, 1),
            "sessions": sessions,
            "verified": sound == sessions,
            "largest_difference": None if compared is None else compared.largest,
            "picture": str(result.picture),
        }
        click.echo(json.dumps(told))
    else:
        console = Console()
        rows = [
            (
                "held-out questions",
                f"{_format_share(result.reward_before)} right before, {_format_share(result.reward_after)} after",
            ),
            ("trajectories", f"{sound} of {sessions} sessions verified, token by token"),
            ("reward curve", str(result.picture)),
            ("a session", f"polar show --data {result.output / 'service'}"),
            ("time", f"{duration_seconds / 60:.1f} minutes"),
        ]
        if compared is not None:
            difference = f"{compared.tokens} recomputed with the model differ by at most {compared.largest:.1e}"
            rows.insert(2, ("log-probabilities", difference))
        for name, value in rows:
            console.print(f"{name:<19} {value}", highlight=False, soft_wrap=True)
    if complaint is not None:
        click.echo(f"polar: {complaint}", err=True)
        return 1
    return 0


def _format_share(reward: float | None) -> str:
    return "unknown" if reward is None else f"{reward:.0%}"


def _check_installed(harness: str | None) -> None:
    needed = ["torch", "transformers", "safetensors", "matplotlib", "fastapi"]
    if harness is None:
        needed.append("openai")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigError(f"polar demo takes {', '.join(missing)}: {install_hint('train')}.")


def _half_the_layers(model: Path) -> int:
    """Layers. Half of them learn as well as all, in less time."""
    try:
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model} is no model: its config.json does not say how many layers it has.") from error
    return max(1, int(layers) // 2)


def _next_free_folder() -> Path:
    return next(path for number in itertools.count(1) if not (path := Path(f"runs/demo-{number}")).exists())
