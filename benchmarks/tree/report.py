"""What `make bench-tree` measured, against what is promised."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.client import BenchmarkError
from benchmarks.report import Promise, make_promise_table
from benchmarks.tree.flops import Flops
from benchmarks.tree.groups import BUILDERS

TRL = "TRL"
ALL = (*BUILDERS, TRL)

EXACT = 1e-5  # relative, of gradients in fp32
COMPUTED = 1.05  # tokens for each unique one
OF_FLOPS = 0.95  # of the ratio of FLOPs
OVER_MERGED, STRIPPED = 10, "think-stripped"  # times, for groups whose name begins so
OVER_REQUESTS, REQUESTS = 25, "synthetic"
BETTER = 1.3  # times the rate of the trial
TRIAL = {"synthetic, n = 8": 28.6, "synthetic, n = 16": 34.1}
"""Seconds of a step in the first trial: plain transformers and FlexAttention on an H200, Qwen3-4B's shape."""
_TRIAL_SHAPE, _TRIAL_DEVICE = "qwen3-4b", "H200"
_TREE, _MERGED, _REQUESTS = "prefix_tree", "prefix_merging", "per_request"


class TreePlan(Struct, frozen=True):
    shape: str = "qwen3-4b"
    device: str | None = None  # None: a GPU if there is one
    chunk_tokens: int | None = None  # None: as a trainer would
    kept_tokens: int | None = None
    builders: tuple[str, ...] = ALL
    limit: float = 120.0  # seconds that a step may take; what takes longer is sampled
    sample: float = 15.0  # seconds' worth of a sample
    seconds: float | None = None  # of the whole run: no cell is begun that would take it beyond
    rounds: int = 1  # of each cell of a group whose first step is short (of a sample 2 at least); the quickest counts


class BuilderCost(Struct):
    """What a builder makes of a group."""

    group: str
    builder: str
    sequences: int
    longest: int  # tokens of its longest path
    computed: int  # tokens
    unique: int  # of the group
    trained: int
    flops: Flops


class TimedStep(Struct):
    """A step, as it was timed."""

    counted: BuilderCost
    rounds: list[float]  # seconds of each
    share: float  # of its FLOPs that were timed; below 1 where it was sampled
    memory: int | None  # most bytes of the device in use
    difference: float | None  # mean, of log-probabilities to those of the group's first cell
    optimizer: float = 0.0  # seconds of a step that are the same for a sample as for all of it
    reserved: int | None = None  # most bytes that the allocator had, in use or not
    retries: int = 0  # how often memory ran out in all rounds, and the step was computed again

    @property
    def sampled(self) -> bool:
        return self.share < 1

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return (min(self.rounds) - self.optimizer) / self.share + self.optimizer

    @property
    def rate(self) -> float:
        """FLOPs a second."""
        return self.counted.flops.total / self.seconds


class TreeReport(Struct):
    plan: TreePlan
    device: str
    dtype: str
    versions: dict[str, str]
    peak: float | None  # FLOPs a second of large matrix products here
    nominal: float | None  # the vendor's figure
    groups: dict[str, str] = field(default_factory=dict)  # what they are
    gradients: dict[str, float] = field(default_factory=dict)  # by builder, in fp32: relative difference
    cells: list[TimedStep] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # what was not measured, and why


def list_promises(report: TreeReport) -> list[Promise]:
    by_group: dict[str, dict[str, TimedStep]] = {}
    for cell in report.cells:
        by_group.setdefault(cell.counted.group, {})[cell.counted.builder] = cell
    return [
        *_list_gradient_promises(report),
        *(
            promise
            for group, cells in by_group.items()
            if _TREE in cells
            for promise in _list_group_promises(report, group, cells)
        ),
    ]


def _list_gradient_promises(report: TreeReport) -> Iterator[Promise]:
    if report.gradients:
        most = max(report.gradients.values())
        yield Promise("gradients in fp32, the largest difference", f"at most {EXACT:.0e}", f"{most:.1e}", most <= EXACT)


def _list_group_promises(report: TreeReport, group: str, cells: dict[str, TimedStep]) -> Iterator[Promise]:
    tree = cells[_TREE]
    computed = tree.counted.computed / tree.counted.unique
    yield Promise(
        f"{group}: computed tokens for each unique one", f"at most {COMPUTED}", f"{computed:.2f}", computed <= COMPUTED
    )
    if report.peak is None:
        return  # times are promised for a GPU
    if (merged := cells.get(_MERGED)) is not None:
        times, of_flops = merged.seconds / tree.seconds, merged.counted.flops.total / tree.counted.flops.total
        least = OF_FLOPS * of_flops
        if group.startswith(STRIPPED):
            least = max(least, OVER_MERGED)
        yield Promise(f"{group}: over {_MERGED}", f"at least {least:.2f} times", f"{times:.2f} times", times >= least)
    if (requests := cells.get(_REQUESTS)) is not None and group.startswith(REQUESTS):
        times = requests.seconds / tree.seconds
        what = f"{group}: over {_REQUESTS}"
        yield Promise(what, f"at least {OVER_REQUESTS} times", f"{times:.1f} times", times >= OVER_REQUESTS)
    if group in TRIAL and report.plan.shape == _TRIAL_SHAPE and _TRIAL_DEVICE in report.device:
        times = TRIAL[group] / tree.seconds
        what = f"{group}: FLOPs a second over the trial's"
        yield Promise(what, f"at least {BETTER} times", f"{times:.2f} times", times >= BETTER)


def to_json(report: TreeReport) -> bytes:
    cells = [
        {**msgspec.to_builtins(cell), "seconds": cell.seconds, "flops_per_second": cell.rate} for cell in report.cells
    ]
    return msgspec.json.encode({**msgspec.to_builtins(report), "cells": cells, "promises": list_promises(report)})


def read_reports(files: Sequence[Path]) -> TreeReport:
    """Reports that were kept, as one: of the same machine and model, as the first one tells it."""
    try:
        whole, *others = (msgspec.json.decode(file.read_bytes(), type=TreeReport) for file in files)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchmarkError(f"That is no report: {error}") from error
    for other in others:
        whole.groups |= other.groups
        whole.cells += other.cells
        whole.absent |= other.absent
        whole.gradients = {name: max(whole.gradients.get(name, 0.0), it) for name, it in other.gradients.items()}
    return whole


# Tables


def print_report(report: TreeReport, console: Console) -> None:
    console.print(_make_table(report))
    console.print(_LEGEND, style="dim", highlight=False)
    console.print(make_promise_table(list_promises(report)))
    for name, difference in report.gradients.items():
        console.print(f"gradient of {name} in fp32, against one sequence at a time: {difference:.1e}", highlight=False)
    for what, why in report.absent.items():
        console.print(f"not measured: {what}: {why}", highlight=False, markup=False)


_COLUMNS = (
    "builder",
    "sequences",
    "tokens",
    "a unique",
    "PFLOP",
    "seconds",
    "timed",
    "x tree",
    "in FLOPs",
    "TFLOP/s",
    "of peak",
    "nominal",
    "GB",
    "reserved",
    "retries",
    "logprobs",
)
_LEGEND = (
    "a unique: tokens computed for each unique one; timed: whole, or the share of the FLOPs that was timed and scaled "
    "up; x tree, in FLOPs: its seconds and its FLOPs over the tree's; of peak, nominal: FLOPs a second over those of "
    "large matrix products here, and over the vendor's figure; GB, reserved: most memory in use, and held by "
    "the allocator; retries: how often memory ran out; logprobs: mean difference to the group's first row."
)


def _make_table(report: TreeReport) -> Table:
    peaks = [
        f"{rate / 1e12:.0f} TFLOP/s {kind}"
        for kind, rate in (("measured", report.peak), ("nominal", report.nominal))
        if rate is not None
    ]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    told = ", ".join([report.plan.shape, report.dtype, report.device, versions, *peaks])
    table = Table(title=f"A training step: {told}", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right", no_wrap=True)
    trees = {cell.counted.group: cell for cell in report.cells if cell.counted.builder == _TREE}
    group = None
    for cell in report.cells:
        first = cell.counted.group != group
        group = cell.counted.group
        table.add_row(group if first else "", *_format_row(report, cell, trees.get(group)))
    return table


def _format_row(report: TreeReport, cell: TimedStep, tree: TimedStep | None) -> Iterator[str]:
    counted = cell.counted
    yield counted.builder
    yield f"{counted.sequences:,}"
    yield f"{counted.computed:,}"
    yield f"{counted.computed / counted.unique:.2f}"
    yield f"{counted.flops.total / 1e15:.2f}"
    yield f"{cell.seconds:.2f}"
    yield f"{cell.share:.1%}" if cell.sampled else "whole"
    yield "" if tree is None else f"{cell.seconds / tree.seconds:.2f}"
    yield "" if tree is None else f"{counted.flops.total / tree.counted.flops.total:.2f}"
    yield f"{cell.rate / 1e12:.3g}"
    for peak in (report.peak, report.nominal):
        yield "" if peak is None else f"{cell.rate / peak:.1%}"
    for memory in (cell.memory, cell.reserved):
        yield "" if memory is None else f"{memory / 1e9:.1f}"
    yield "" if cell.memory is None else str(cell.retries)
    yield "" if cell.difference is None else f"{cell.difference:.1e}"


def show_counts(counted: Sequence[BuilderCost], rate: float, console: Console) -> None:
    """What would be computed, and how long it would take at a rate of so many FLOPs a second."""
    table = Table(title=f"A step, counted; seconds at {rate / 1e12:.0f} TFLOP/s", title_justify="left")
    table.add_column("", no_wrap=True)
    columns = "sequences", "longest", "tokens", "a unique", "PFLOP", "matrices", "output", "attention", "in FLOPs"
    for column in ("builder", *columns, "seconds"):
        table.add_column(column, justify="left" if column == "builder" else "right", no_wrap=True)
    trees = {it.group: it.flops.total for it in counted if it.builder == _TREE}
    for it in counted:
        parts = (f"{part / 1e15:.2f}" for part in (it.flops.matrices, it.flops.output, it.flops.attention))
        table.add_row(
            it.group,
            it.builder,
            f"{it.sequences:,}",
            f"{it.longest:,}",
            f"{it.computed:,}",
            f"{it.computed / it.unique:.2f}",
            f"{it.flops.total / 1e15:.2f}",
            *parts,
            f"{it.flops.total / trees[it.group]:.2f}" if it.group in trees else "",
            f"{it.flops.total / rate:.1f}",
        )
    console.print(table)


# The picture

_BAR, _GAP, _GROUP_GAP = 18, 4, 26
_LEFT, _WIDTH, _RIGHT, _TOP, _BOTTOM = 130, 440, 310, 56, 16
_COLOURS = {"prefix_tree": "#1a7f5a", "prefix_merging": "#b4532a", "per_request": "#8a6d1d"}
_OTHER = "#5a6b8a"


def draw_svg(report: TreeReport) -> str:
    """Bars of a group are drawn to the scale of its longest one, so that each group can be read by itself."""
    groups: dict[str, list[TimedStep]] = {}
    for cell in report.cells:
        groups.setdefault(cell.counted.group, []).append(cell)
    lines: list[str] = []
    top = _TOP
    for name, cells in groups.items():
        lines += _draw_panel(name, cells, top)
        top += _GROUP_GAP + len(cells) * (_BAR + _GAP)
    width, height = _LEFT + _WIDTH + _RIGHT, top + _BOTTOM
    title = f"Seconds of a training step ({report.plan.shape}, {report.dtype}, {report.device})"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="22" font-size="15">{escape(title)}</text>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def _draw_panel(name: str, cells: list[TimedStep], top: int) -> Iterator[str]:
    longest = max(cell.seconds for cell in cells)
    quickest = min(cell.seconds for cell in cells)
    yield f'<text x="16" y="{top}" font-weight="bold">{escape(name)}</text>'
    for number, cell in enumerate(cells):
        y = top + 8 + number * (_BAR + _GAP)
        width = max(cell.seconds / longest * _WIDTH, 1.0)
        colour = _COLOURS.get(cell.counted.builder, _OTHER)
        style = 'fill-opacity="0.45"' if cell.sampled else 'fill-opacity="0.85"'
        told = f"{cell.seconds:.1f} s, {cell.seconds / quickest:.2f} times"
        if cell.sampled:
            told += f" (scaled: {cell.share:.1%} was timed)"
        baseline = y + _BAR - 5
        yield f'<text x="{_LEFT - 6}" y="{baseline}" text-anchor="end">{escape(cell.counted.builder)}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}" {style}/>'
        yield f'<text x="{_LEFT + width + 6:.1f}" y="{baseline}">{escape(told)}</text>'
