"""`make bench-tree`: what a training step costs with each builder.

    group x builder -> trees -> packed -> one step (forward, backward, optimizer) -> seconds, memory, FLOPs

The same recorded and synthetic groups go through the same model, as a trace per call (`per_request`), as merged traces
(`prefix_merging`) and as one tree (`prefix_tree`); and through TRL's tree packing, where it is installed. What would
take longer than a limit is timed on some of its sequences, of all lengths, and scaled by FLOPs.

A report is handed on after every cell, so that a run that is cut off leaves what it had.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import torch
import transformers

from benchmarks.client import BenchmarkError
from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer
from benchmarks.tree.flops import ModelSizes, add_flops, count_flops
from benchmarks.tree.groups import (
    BUILDERS,
    BenchGroup,
    BuilderBatch,
    make_compaction_group,
    make_group,
    make_subagent_group,
    make_synthetic_group,
    read_outline,
)
from benchmarks.tree.model import (
    StepTiming,
    TrainingStepper,
    choose_device,
    choose_dtype,
    compute_gradient_differences,
    describe_device,
    get_nominal_peak,
    load_config,
    measure_peak,
)
from benchmarks.tree.report import (
    ALL,
    TRL,
    BuilderCost,
    TimedStep,
    TreePlan,
    TreeReport,
    draw_svg,
    print_report,
    read_reports,
    show_counts,
    to_json,
)
from benchmarks.tree.trl import TrlPacking, get_version
from polar.errors import ConfigError, PolarError
from polar.train.memory import enable_expandable_segments
from polar.train.packing import Floats, Indices, pack_trees

SHORT = 10.0
"""Seconds: what a step takes once, for memory that it never had before, counts in a shorter one."""


# Groups


def make_groups(folder: Path | None, wanted: Sequence[str] = (), *, quick: bool = False) -> list[BenchGroup]:
    """The synthetic ones and those recorded in a folder, 16 sessions each and the first 8 of them; those whose name
    begins with one of `wanted`, in its order (default: all). A quick run has the synthetic ones alone, at a tenth of
    the lengths. Large ones, which show whether memory suffices, are there only for who names them."""
    scale = 10 if quick else 1
    found = [
        make_synthetic_group(
            f"synthetic, n = {sessions}",
            sessions=sessions,
            system=system // scale,
            turns=turns,
            sampled=150 // scale,
            observed=350 // scale,
        )
        for sessions, system, turns in ((8, 12_000, 30), (16, 20_000, 15))
    ]
    for file in sorted(folder.glob("*.json")) if folder is not None and not quick else ():
        group = make_group(read_outline(file))
        found += [group.first(count, f"{group.name}, n = {count}") for count in (8, 16) if count <= len(group.sessions)]
    if wanted and not quick:
        found += make_large_groups()
    chosen = [group for name in wanted or [""] for group in found if group.name.startswith(name)]
    if not chosen:
        raise BenchmarkError(
            f"No group is called {', '.join(wanted)}. There are: {', '.join(it.name for it in found)}."
        )
    return chosen


def make_large_groups() -> list[BenchGroup]:
    return [
        make_subagent_group("sub-agents, n = 8", sessions=8, system=9000, turns=20, errands=2, errand_turns=14),
        make_compaction_group("compacting, n = 8", sessions=8, system=10_000, turns=38, windows=2),
        make_synthetic_group("long, n = 2", sessions=2, system=4000, turns=192, sampled=150, observed=350),
    ]


def make_small_group(scale: int = 1) -> BenchGroup:
    """Forks everywhere, and little else: for the gradients' check."""
    return make_synthetic_group(
        "small", sessions=3, system=100 * scale, turns=4, sampled=15 * scale, observed=35 * scale
    )


def count_costs(group: BenchGroup, sizes: ModelSizes, names: Sequence[str] = ALL) -> list[BuilderCost]:
    unique = BUILDERS["prefix_tree"](group).tokens
    return [
        _count_builder(group.name, name, BUILDERS[name](group), unique, sizes)[0] for name in names if name in BUILDERS
    ]


def _count_builder(
    group: str, builder: str, batch: BuilderBatch, unique: int, sizes: ModelSizes
) -> tuple[BuilderCost, list[float]]:
    """And the FLOPs of each sequence."""
    packed = [pack_trees([tree]) for tree in batch.trees]
    each = [count_flops(sizes, one) for one in packed]
    counted = BuilderCost(
        group=group,
        builder=builder,
        sequences=len(packed),
        longest=max(int(one.depths.max()) + 1 for one in packed),
        computed=sum(map(len, packed)),
        unique=unique,
        trained=sum(len(one.terms) for one in packed),
        flops=add_flops(each),
    )
    return counted, [it.total for it in each]


# The run


def run(
    plan: TreePlan, chosen: Sequence[BenchGroup], progress: Progress, keep: Callable[[TreeReport], None]
) -> TreeReport:
    """`keep` is given the report as far as it is, after every cell."""
    enable_expandable_segments()  # before anything is on the GPU
    until = None if plan.seconds is None else time.monotonic() + plan.seconds
    where = choose_device(plan.device)
    progress(f"{plan.shape} on {describe_device(where)}")
    peak, nominal = measure_peak(where), get_nominal_peak(where)
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    about = {group.name: group.about for group in chosen}
    dtype = str(choose_dtype(where)).removeprefix("torch.")
    report = TreeReport(plan, describe_device(where), dtype, versions, peak, nominal, about)

    def attempt(what: str, measure: Callable[[], str]) -> None:
        try:
            progress(f"{what}: {measure()}")
        except (PolarError, RuntimeError) as error:  # a device's memory, a kernel that doesn't compile
            report.absent[what] = " ".join(str(error).split())[:300]
            progress(f"{what}: not measured: {report.absent[what]}")
        keep(report)

    def gradients() -> str:
        scale = 1 if where.type == "cpu" else 4  # not too small for any kernel
        report.gradients = compute_gradient_differences(make_small_group(scale), where, 96 * scale)
        return f"at most {max(report.gradients.values()):.1e} apart"

    attempt("gradients, in fp32", gradients)
    stepper = TrainingStepper(plan.shape, where, chunk_tokens=plan.chunk_tokens, kept_tokens=plan.kept_tokens)
    stepper.step(BUILDERS["prefix_tree"](make_small_group()))  # makes the optimizer's state
    sizes = ModelSizes.from_config(load_config(plan.shape))
    for group in chosen:
        steps = _Group(group, stepper, sizes, plan, until)
        for name in plan.builders:

            def cell(steps: _Group = steps, name: str = name) -> str:
                report.cells.append(steps.peer(report) if name == TRL else steps.cell(name, report.cells))
                return _describe_step(report.cells[-1])

            attempt(f"{group.name}, {name}", cell)
    return report


def _describe_step(cell: TimedStep) -> str:
    scaled = f" (scaled: {cell.share:.1%} was timed)" if cell.sampled else ""
    memory = "" if cell.memory is None else f", {cell.memory / 1e9:.1f} GB"
    reserved = "" if cell.reserved is None else f" of {cell.reserved / 1e9:.1f} GB reserved"
    retries = f", memory ran out {cell.retries} times" if cell.retries else ""
    return f"{cell.seconds:.2f} s{scaled}, {cell.rate / 1e12:.3g} TFLOP/s{memory}{reserved}{retries}"


class _Group:
    """One group's cells."""

    def __init__(
        self, group: BenchGroup, stepper: TrainingStepper, sizes: ModelSizes, plan: TreePlan, until: float | None
    ) -> None:
        self._group = group
        self._stepper = stepper
        self._sizes = sizes
        self._plan = plan
        self._until = until
        self._unique = BUILDERS["prefix_tree"](group).tokens
        self._rounds: int | None = None  # of each cell
        self._logprobs: Floats | None = None  # of the first cell that was timed whole, by the tokens' numbers

    def cell(self, name: str, before: Sequence[TimedStep]) -> TimedStep:
        """How long it will take is told by the last cell; the first one is timed whole, whatever it takes."""
        batch = BUILDERS[name](self._group)
        counted, each = _count_builder(self._group.name, name, batch, self._unique, self._sizes)
        rate = before[-1].rate if before else None
        chosen = list(range(len(each)))
        if rate is not None and counted.flops.total > self._plan.limit * rate:
            chosen = choose_spread(each, self._plan.sample * rate)
        timed = sum(each[it] for it in chosen)
        self._check_time(timed, rate)
        some = batch.some(chosen)
        self._stepper.warm_up(some)
        share = 1.0 if len(chosen) == len(each) else timed / counted.flops.total
        return self._time_step(counted, lambda: self._stepper.step(some), some, share)

    def peer(self, report: TreeReport) -> TimedStep:
        """TRL, on merged traces."""
        packing = TrlPacking(self._stepper.model)
        report.versions[TRL] = f"{get_version()} with {packing.kernel}"
        merged = BUILDERS["prefix_merging"](self._group)
        rows = packing.rows(merged)
        counted = BuilderCost(
            group=self._group.name,
            builder=TRL,
            sequences=len(rows),
            longest=max(int(row.packed["position_ids"].max()) + 1 for row in rows),
            computed=sum(row.tokens for row in rows),
            unique=self._unique,
            trained=sum(len(row.places) for row in rows),
            flops=add_flops([row.flops(self._sizes) for row in rows]),
        )
        self._check_time(counted.flops.total, report.cells[-1].rate if report.cells else None)
        short = packing.rows(BUILDERS["prefix_merging"](make_small_group()))
        self._stepper.timed(lambda: packing.backward(short))
        return self._time_step(counted, lambda: self._stepper.timed(lambda: packing.backward(rows)), merged, 1.0)

    def _check_time(self, work: float, rate: float | None) -> None:
        """Of so many FLOPs: is there time left for them?"""
        if rate is not None and self._until is not None and time.monotonic() + work / rate > self._until:
            raise BenchmarkError(f"there was no time left: it takes about {work / rate:.0f} s")

    def _time_step(
        self, counted: BuilderCost, step: Callable[[], StepTiming], batch: BuilderBatch, share: float
    ) -> TimedStep:
        steps = [step()]
        if self._rounds is None:
            self._rounds = self._plan.rounds if steps[0].seconds < SHORT else 1
        rounds = self._rounds if share == 1 else max(2, self._rounds)  # a sample is short
        steps += [step() for _ in range(rounds - 1)]
        return TimedStep(
            counted=counted,
            rounds=[it.seconds for it in steps],
            share=share,
            memory=steps[0].memory,
            difference=self._compare_logprobs(np.concatenate(batch.numbers), steps[0].logprobs, counted.trained),
            optimizer=min(it.optimizer for it in steps),
            reserved=steps[0].reserved,
            retries=sum(it.retries for it in steps),
        )

    def _compare_logprobs(self, numbers: Indices, logprobs: Floats, trained: int) -> float | None:
        if self._logprobs is not None:
            return float(np.abs(self._logprobs[numbers] - logprobs).mean())
        if len(numbers) == trained:
            self._logprobs = np.empty(trained, np.float32)
            self._logprobs[numbers] = logprobs
        return None


def choose_spread(each: Sequence[float], budget: float) -> list[int]:
    """Sequences worth `budget` FLOPs together, or a little less, one at least: of all lengths alike."""
    order = np.argsort(each, kind="stable")
    for wanted in range(len(order), 1, -1):
        chosen = order[((np.arange(wanted) + 0.5) * len(order) / wanted).astype(np.int64)]
        if sum(each[it] for it in chosen) <= budget:
            return sorted(int(it) for it in chosen)
    return [int(order[len(order) // 2])]


# The command


_RECORDED_TREES = Path("tests/fixtures/trees")
"""Groups of real harnesses' sessions, see recorder.py."""


@click.command("tree")
@click.option(
    "--shape",
    help="Train random weights of this shape: tiny, qwen3-4b, or a folder [default: qwen3-4b on a GPU, else tiny].",
)
@click.option("--device", help="Compute on this device, as PyTorch calls it [default: a GPU if there is one].")
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help=f"Read recorded groups from this folder [default: {_RECORDED_TREES}, if it is there].",
)
@click.option("--group", "groups", multiple=True, help="Take only groups whose name begins so; may be repeated.")
@click.option("--builder", "builders", multiple=True, help="Take only this builder; may be repeated.")
@click.option("--quick", is_flag=True, help="Take small synthetic groups only, for a look on a CPU.")
@click.option("--limit", default=120.0, show_default=True, help="Sample steps that would take more than these seconds.")
@click.option("--sample", default=15.0, show_default=True, help="Give a sample so many seconds' worth of sequences.")
@click.option("--seconds", type=float, help="Leave out what would take the whole run beyond these seconds.")
@click.option(
    "--rounds", default=1, show_default=True, help="Time steps of less than 10 seconds so often; the quickest counts."
)
@click.option("--chunk-tokens", type=int, help="Take so many tokens through the model at once.")
@click.option("--kept-tokens", type=int, help="Keep the activations of so many tokens.")
@click.option("--count", "rate", type=float, metavar="TFLOPS", help="Only count, and estimate the time at this rate.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a JSON file, anew after each measurement."
)
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw an SVG file, likewise.")
@click.option(
    "--show",
    "kept",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Measure nothing; show the JSON file of an earlier run. May be repeated.",
)
@json_option
def command(
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
    """Measure a training step with a trace per call, merged traces, and a group's tree: time, FLOPs, memory."""
    if unknown := set(builders) - set(ALL):
        raise ConfigError(f"There is no builder {', '.join(unknown)}, but {', '.join(ALL)}.")
    where = choose_device(device)
    plan = TreePlan(
        shape=shape or ("qwen3-4b" if where.type == "cuda" else "tiny"),
        device=str(where),
        chunk_tokens=chunk_tokens,
        kept_tokens=kept_tokens,
        builders=builders or ALL,
        limit=limit,
        sample=sample,
        seconds=seconds,
        rounds=rounds,
    )
    chosen = make_groups(recorded or (_RECORDED_TREES if _RECORDED_TREES.is_dir() else None), groups, quick=quick)
    if rate is not None:
        sizes = ModelSizes.from_config(load_config(plan.shape))
        counted = [it for group in chosen for it in count_costs(group, sizes, plan.builders)]
        show_counts(counted, rate * 1e12, make_console(150))
        return

    def keep(measured: TreeReport) -> None:
        if output is not None:
            output.write_bytes(to_json(measured))
        if picture is not None:
            picture.write_text(draw_svg(measured), encoding="utf-8")

    if kept:
        measured = read_reports(kept)
        keep(measured)
    else:
        measured = run(plan, chosen, make_progress_printer(), keep)
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console(190))
