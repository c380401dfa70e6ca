"""What `polar bench tree` measured, against what is promised."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.client import BenchError
from polar.bench.gateway_report import Promise, promise_table
from polar.bench.tree import BuilderCost, TimedStep, TreeReport

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


def list_promises(report: TreeReport) -> list[Promise]:
    by_group: dict[str, dict[str, TimedStep]] = {}
    for cell in report.cells:
        by_group.setdefault(cell.counted.group, {})[cell.counted.builder] = cell
    return [
        *_gradients(report),
        *(promise for group, cells in by_group.items() if _TREE in cells for promise in _group(report, group, cells)),
    ]


def _gradients(report: TreeReport) -> Iterator[Promise]:
    if report.gradients:
        most = max(report.gradients.values())
        yield Promise("gradients in fp32, the largest difference", f"at most {EXACT:.0e}", f"{most:.1e}", most <= EXACT)


def _group(report: TreeReport, group: str, cells: dict[str, TimedStep]) -> Iterator[Promise]:
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


def as_json(report: TreeReport) -> bytes:
    cells = [
        {**msgspec.to_builtins(cell), "seconds": cell.seconds, "flops_per_second": cell.rate} for cell in report.cells
    ]
    return msgspec.json.encode({**msgspec.to_builtins(report), "cells": cells, "promises": list_promises(report)})


def read_reports(files: Sequence[Path]) -> TreeReport:
    """Reports that were kept, as one: of the same machine and model, as the first one tells it."""
    try:
        whole, *others = (msgspec.json.decode(file.read_bytes(), type=TreeReport) for file in files)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"That is no report: {error}") from error
    for other in others:
        whole.groups |= other.groups
        whole.cells += other.cells
        whole.absent |= other.absent
        whole.gradients = {name: max(whole.gradients.get(name, 0.0), it) for name, it in other.gradients.items()}
    return whole


# Tables


def show(report: TreeReport, console: Console) -> None:
    console.print(_cells(report))
    console.print(_LEGEND, style="dim", highlight=False)
    console.print(promise_table(list_promises(report)))
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


def _cells(report: TreeReport) -> Table:
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
        table.add_row(group if first else "", *_row(report, cell, trees.get(group)))
    return table


def _row(report: TreeReport, cell: TimedStep, tree: TimedStep | None) -> Iterator[str]:
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
