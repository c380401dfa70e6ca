"""polar bench: the benchmarks, each against its peers in the same run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polar.bench import fidelity as fidelity_bench
from polar.bench import (
    fidelity_report,
    fidelity_sessions,
    gateway_report,
    pipeline_report,
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
from polar.bench.pipeline_plot import draw_svg as pipeline_picture
from polar.cli.common import json_option, run_async
from polar.errors import ConfigError
from polar.gateway.process import tune_process

_LITELLM_ENVIRONMENT = Path(".cache/bench-litellm")
HARNESS_FOLDERS = (
    Path(".cache/node/node_modules/.bin"),
    Path(".cache/harnesses/node_modules/.bin"),
    Path(".cache/harnesses-venv/bin"),
)
"""Where `make` installs harnesses."""
_RECORDED_TREES = Path("tests/fixtures/trees")
"""Groups of real harnesses' sessions, see tools/record_trees.py."""


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
    help=f"a virtual environment with LiteLLM [default: {_LITELLM_ENVIRONMENT}, made if it is not there]",
)
@click.option("--no-litellm", is_flag=True, help="leave LiteLLM out")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Another checkout of Polar to measure in the same run, with this one's dependencies.",
)
@click.option("--cpu-only", is_flag=True, help="Measure CPU per call only: no latencies, streams or idle sessions.")
@json_option
def gateway(
    quick: bool, environment: Path | None, no_litellm: bool, against: Path | None, cpu_only: bool, as_json: bool
) -> None:
    """CPU per captured call, added latency, many streams and idle sessions."""
    console = Console(stderr=True)
    where = None if no_litellm else environment or _install_litellm(console)
    plan = gateway_bench.QUICK if quick else gateway_bench.GatewayPlan()
    measurements = (gateway_bench.measure_cpu_per_call,) if cpu_only else gateway_bench.MEASUREMENTS
    measured = run_async(
        gateway_bench.run(plan, where, _progress_printer(console), against=against, measurements=measurements)
    )
    if as_json:
        click.echo(gateway_report.as_json(measured))
    else:
        gateway_report.show(measured, _wide_console())


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
    progress = _progress_printer(Console(stderr=True))
    measured = run_async(trajectory_bench.run(plan, peer_pythons, progress, _absolute_folder(tokenizer)))
    if as_json:
        click.echo(trajectory_report.as_json(measured))
    else:
        trajectory_report.show(measured, _wide_console())


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
    agents = fidelity_sessions.find_installed_agents(harnesses, HARNESS_FOLDERS)
    with _progress_bar() as progress:
        measured = run_async(
            fidelity_bench.run(agents, turns=turns, tokenizer=_absolute_folder(tokenizer), progress=progress)
        )
    if as_json:
        click.echo(fidelity_report.as_json(measured))
    else:
        fidelity_report.show(measured, _wide_console())


def _absolute_folder(tokenizer: Path | None) -> str | None:
    return None if tokenizer is None else str(tokenizer.absolute())


def _progress_printer(console: Console) -> Callable[[str], None]:
    began = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {what}", highlight=False)

    return progress


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """For what is counted: takes what goes on, and how many are done of how many."""
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield progress


def _install_litellm(console: Console) -> Path:
    if litellm.find_executable(_LITELLM_ENVIRONMENT) is None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as bar:
            bar.add_task(f"installing LiteLLM {litellm.VERSION} into {_LITELLM_ENVIRONMENT}", total=None)
            litellm.install(_LITELLM_ENVIRONMENT)
    return _LITELLM_ENVIRONMENT


@command.command("sandbox")
@click.option("--quick", is_flag=True, help="one round")
@json_option
def sandbox(quick: bool, as_json: bool) -> None:
    """Cold start of a sandbox, and a ready one, against docker run."""
    plan = sandbox_bench.QUICK if quick else sandbox_bench.SandboxPlan()
    measured = run_async(sandbox_bench.run(plan, _progress_printer(Console(stderr=True))))
    if as_json:
        click.echo(sandbox_report.as_json(measured))
    else:
        sandbox_report.show(measured, _wide_console())


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
    plan = pipeline_bench.QUICK if quick else pipeline_bench.PipelinePlan()
    tune_process()
    with _progress_bar() as progress:
        measured = run_async(pipeline_bench.run(plan, progress))
    picture.write_text(pipeline_picture(measured), encoding="utf-8")
    if as_json:
        click.echo(pipeline_report.as_json(measured))
    else:
        pipeline_report.show(measured, _wide_console())
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
    plan = service_bench.QUICK if quick else service_bench.ServicePlan()
    measured = run_async(service_bench.run(plan, postgres, peer_pythons, _progress_printer(Console(stderr=True))))
    if as_json:
        click.echo(service_report.as_json(measured))
    else:
        service_report.show(measured, _wide_console())


@command.command("tree")
@click.option(
    "--shape",
    default=None,
    help="tiny, qwen3-4b, or a model's folder; weights are random [default: qwen3-4b on a GPU, else tiny]",
)
@click.option("--device", help="where to compute, as PyTorch calls it [default: a GPU if there is one]")
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help=f"a folder of recorded groups [default: {_RECORDED_TREES}, if it is there]",
)
@click.option("--group", "groups", multiple=True, help="only those whose name begins so; may be given twice")
@click.option("--builder", "builders", multiple=True, help="only this one; may be given twice")
@click.option("--quick", is_flag=True, help="small synthetic groups only: for a look, on a CPU")
@click.option("--limit", default=120.0, show_default=True, help="seconds of a step; what takes longer is sampled")
@click.option("--sample", default=15.0, show_default=True, help="seconds' worth of sequences that a sample has")
@click.option("--seconds", type=float, help="of the whole run: what would take it beyond is left out, and says so")
@click.option(
    "--rounds", default=1, show_default=True, help="steps of each kind, where one is short (6 s); the quickest counts"
)
@click.option("--chunk-tokens", type=int, help="that go through the model at once")
@click.option("--kept-tokens", type=int, help="whose activations are kept")
@click.option("--count", "rate", type=float, metavar="TFLOPS", help="only count, and tell the time at such a rate")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="a JSON file, rewritten with every figure"
)
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="an SVG file, likewise")
@click.option(
    "--show",
    "kept",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="such a JSON file: measure nothing, show it; may be given twice",
)
@json_option
def tree(
    shape: str | None,
    device: str | None,
    recorded: Path | None,
    groups: tuple[str, ...],
    builders: tuple[str, ...],
    quick: bool,
    limit: float,
    sample: float,
    seconds: float | None,
    rounds: int,
    chunk_tokens: int | None,
    kept_tokens: int | None,
    rate: float | None,
    output: Path | None,
    picture: Path | None,
    kept: tuple[Path, ...],
    as_json: bool,
) -> None:
    """A training step with a trace per call, with merged traces, and with a group's tree: time, FLOPs, memory."""
    try:
        from polar.bench import tree_model
    except ImportError as error:
        raise ConfigError(f"polar bench tree needs the extra `train`: pip install 'polar[train]' ({error}).") from error
    from polar.bench import tree as tree_bench
    from polar.bench import tree_report
    from polar.bench.tree_flops import ModelSizes
    from polar.bench.tree_plot import draw_svg as draw

    if unknown := set(builders) - set(tree_bench.ALL):
        raise ConfigError(f"There is no builder {', '.join(unknown)}, but {', '.join(tree_bench.ALL)}.")
    where = tree_model.choose_device(device)
    plan = tree_bench.TreePlan(
        shape=shape or ("qwen3-4b" if where.type == "cuda" else "tiny"),
        device=str(where),
        chunk_tokens=chunk_tokens,
        kept_tokens=kept_tokens,
        builders=builders or tree_bench.ALL,
        limit=limit,
        sample=sample,
        seconds=seconds,
        rounds=rounds,
    )
    chosen = tree_bench.make_groups(
        recorded or (_RECORDED_TREES if _RECORDED_TREES.is_dir() else None), groups, quick=quick
    )
    if rate is not None:
        sizes = ModelSizes.of(tree_model.load_config(plan.shape))
        counted = [it for group in chosen for it in tree_bench.count_costs(group, sizes, plan.builders)]
        tree_report.show_counts(counted, rate * 1e12, _wide_console(150))
        return

    def keep(report: tree_bench.TreeReport) -> None:
        if output is not None:
            output.write_bytes(tree_report.as_json(report))
        if picture is not None:
            picture.write_text(draw(report), encoding="utf-8")

    if kept:
        measured = tree_report.read_reports(kept)
        keep(measured)
    else:
        measured = tree_bench.run(plan, chosen, _progress_printer(Console(stderr=True)), keep)
    if as_json:
        click.echo(tree_report.as_json(measured))
    else:
        tree_report.show(measured, _wide_console(190))


@command.command("tax")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="the embedded engine's [default: SmolLM2-135M-Instruct]",
)
@click.option("--device", help="of the embedded engine [default: a GPU where there is one]")
@click.option("--threads", type=int, help="of the embedded engine's CPU [default: torch's own choice]")
@click.option("--vllm", metavar="URL", help="measure this one, too; it runs on this machine")
@click.option("--no-embedded", is_flag=True, help="measure vLLM alone")
@click.option("--conversations", type=click.IntRange(min=1), help="at the same time [default: 16]")
@click.option("--turns", type=click.IntRange(min=2), help="of each [default: 3]")
@click.option("--words", type=click.IntRange(min=1), help="that each begins with [default: 60]")
@click.option("--tokens", type=click.IntRange(min=1), help="sampled in a turn, at most [default: 32]")
@click.option("--rounds", type=click.IntRange(min=1), help="of each way [default: 3]")
@click.option("--quick", is_flag=True, help="fewer and shorter conversations")
@json_option
def tax(
    model: Path | None,
    device: str | None,
    threads: int | None,
    vllm: str | None,
    no_embedded: bool,
    quick: bool,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Tokens a second of an engine whose calls are captured, against those of the engine alone."""
    from polar.bench import tax as tax_bench
    from polar.bench import tax_load, tax_report
    from polar.config import EngineSettings

    given = {name: size for name, size in sizes.items() if size is not None}
    plan = msgspec.structs.replace(tax_load.QUICK if quick else tax_load.TaxPlan(), **given)
    options = {name: value for name, value in {"device": device, "threads": threads}.items() if value is not None}
    folder = None if model is None else str(model)
    embedded = None if no_embedded else EngineSettings(kind="embedded", model=folder, options=options)
    measured = run_async(tax_bench.run(plan, embedded, vllm, _progress_printer(Console(stderr=True))))
    if as_json:
        click.echo(tax_report.as_json(measured))
    else:
        tax_report.show(measured, _wide_console())


@command.command("vllm")
@click.argument("url")
@click.option("--level", "levels", type=click.IntRange(min=1), multiple=True, help="Sessions at once; may be repeated.")
@click.option("--turns", type=click.IntRange(min=1), help="Turns of a session.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of every level and way.")
@click.option("--clients", type=click.IntRange(min=1), help="Processes that make the load.")
@click.option("--seconds", type=float, help="Seconds of the whole run; rounds that would exceed them are left out.")
@click.option("--whole", is_flag=True, help="Ask for whole replies instead of streams.")
@click.option("--quick", is_flag=True, help="Few and short sessions, for a look.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The model's folder, with tokenizer and chat template [default: where the server has its model from].",
)
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), help="Keep what was captured here, for `polar verify`."
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a JSON file, anew after each measurement."
)
@json_option
def vllm(
    url: str,
    levels: tuple[int, ...],
    whole: bool,
    quick: bool,
    tokenizer: Path | None,
    data: Path | None,
    output: Path | None,
    as_json: bool,
    turns: int | None,
    **sizes: float | None,
) -> None:
    """Measure tokens a second of the vLLM server at URL: through a capturing gateway, its chat API, and with ids.

    Exit with status 1 where a call failed, or where one that was captured can't be trained on.
    """
    from polar.bench import vllm as vllm_bench
    from polar.bench import vllm_report

    plan = vllm_bench.QUICK if quick else vllm_bench.VllmPlan()
    shape = msgspec.structs.replace(plan.shape, stream=not whole, turns=turns or plan.shape.turns)
    given = {name: size for name, size in sizes.items() if size is not None}
    plan = msgspec.structs.replace(plan, levels=levels or plan.levels, shape=shape, **given)

    def keep(report: vllm_bench.VllmReport) -> None:
        if output is not None:
            output.write_bytes(vllm_report.as_json(report))

    progress = _progress_printer(Console(stderr=True))
    measured = run_async(
        vllm_bench.run(plan, url, progress, tokenizer=_absolute_folder(tokenizer), data=data, keep=keep)
    )
    if as_json:
        click.echo(vllm_report.as_json(measured))
    else:
        vllm_report.show(measured, _wide_console(150))
    if not measured.passed:
        raise SystemExit(1)


@command.command("stall")
@click.option("--quick", is_flag=True, help="one round: a minute and a half instead of six")
@click.option(
    "--only", "kinds", multiple=True, help="measure only the kinds of bodies that begin so; may be given twice"
)
@_tokenizer_option
@json_option
def stall(quick: bool, kinds: tuple[str, ...], tokenizer: Path | None, as_json: bool) -> None:
    """Measure what a caller with the longest allowed bodies costs other callers, /health and nodes.

    Exit with status 1 where an innocent call or /health is more than 50 ms slower than idle (p99), or a node is lost.
    """
    from polar.bench import stall as stall_bench

    plan = stall_bench.QUICK if quick else stall_bench.StallPlan()
    if tokenizer is not None:
        plan = msgspec.structs.replace(plan, tokenizer=_absolute_folder(tokenizer))
    if kinds:
        plan = msgspec.structs.replace(plan, kinds=tuple(kind for kind in plan.kinds if kind.startswith(kinds)))
    measured = run_async(stall_bench.run(plan, _progress_printer(Console(stderr=True))))
    if as_json:
        click.echo(msgspec.json.encode(measured))
    else:
        stall_bench.show(measured, _wide_console(150))
    if not measured.passed:
        raise SystemExit(1)


@command.command("soak")
@click.option("--calls", default=50_000, show_default=True, type=click.IntRange(min=2_000), help="make this many")
@click.option("--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="write the samples to this file")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="draw the samples into this file: .svg or .png"
)
@json_option
def soak(calls: int, table: Path | None, plot: Path | None, as_json: bool) -> None:
    """Make many calls in many sessions and watch the service's resident memory.

    Exit with status 1 where the memory grows by 2 % or more in the last half of the calls.
    """
    from polar.bench import soak as soak_bench

    measured = run_async(soak_bench.run(soak_bench.SoakPlan(calls=calls), _progress_printer(Console(stderr=True))))
    if table is not None:
        soak_bench.write_csv(measured, table)
    if plot is not None:
        soak_bench.draw_memory(measured, plot)
    if as_json:
        click.echo(msgspec.json.encode(measured))
    else:
        last = measured.samples[-1]
        click.echo(
            f"{last.calls:,} calls in {last.sessions:,} sessions, {last.seconds:.0f} s: {last.resident / 1e6:.0f} MB "
            f"resident, {measured.growth:+.2%} in the last half (allowed: +{soak_bench.ALLOWED_GROWTH:.0%})"
        )
    if not measured.passed:
        raise SystemExit(1)


def _wide_console(min_width: int = 130) -> Console:
    """Tables of figures: rather wrapped by the terminal than cut."""
    return Console(width=max(Console().width, min_width))
