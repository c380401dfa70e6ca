"""What `polar bench trajectory` measured, whether it reaches what is promised, and how it is shown."""

from collections.abc import Iterator

import msgspec
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from polar.bench.gateway_report import MB, Promise, describe_machine, promise_table
from polar.bench.rendering import OWN, RenderingCost
from polar.bench.trajectory import POLAR, POLAR_WHOLE, StorageCost, TrajectoryReport

TOKENS_PER_SECOND = 200e6
TIMES_A_PEER = 100
TIMES_CHEAPER = 15
EVEN = 1.25
"""Bytes per new token may grow by so much from a session's first turns to its last: they would by far more if what is
stored grew with turns squared."""


def list_promises(report: TrajectoryReport) -> list[Promise]:
    return [
        *_rate_promises(report),
        *_peer_promises(report),
        *_stored_promises(report),
        *_rendering_promises(report),
    ]


def _rate_promises(report: TrajectoryReport) -> Iterator[Promise]:
    own = [rate for rate in report.rates if rate.builder == POLAR]
    if own:
        slowest = min(own, key=lambda rate: rate.per_second)
        measured = f"{slowest.per_second / 1e6:.0f} million ({slowest.shape})"
        what = "tokens a second into the tree on one core, the slowest shape"
        yield Promise(what, "at least 200 million", measured, slowest.per_second >= TOKENS_PER_SECOND)


def _peer_promises(report: TrajectoryReport) -> Iterator[Promise]:
    own = {rate.shape: rate.per_second for rate in report.rates if rate.builder == POLAR}
    for peer in report.versions:
        times, shape = min((own[it.shape] / it.per_second, it.shape) for it in report.rates if it.builder == peer)
        what = f"the same against {peer}, the shape where it is nearest"
        yield Promise(what, f"at least {TIMES_A_PEER} times", f"{times:.0f} times ({shape})", times >= TIMES_A_PEER)


def _stored_promises(report: TrajectoryReport) -> Iterator[Promise]:
    if len(report.stored) >= 3:
        first, second, before, last = (report.stored[index] for index in (0, 1, -2, -1))
        ratio = _slope(before, last) / _slope(first, second)
        what = f"stored bytes per new token, turns {before.turns} to {last.turns} over {first.turns} to {second.turns}"
        yield Promise(what, f"at most {EVEN} times", f"{ratio:.2f} times", ratio <= EVEN)


def _rendering_promises(report: TrajectoryReport) -> Iterator[Promise]:
    # The scripted engine's tokenizer is small, and quick beyond any model's.
    if (found := report.rendered) is not None and found.tokenizer != OWN:
        what = f"a turn at {found.context:,} tokens, rendered and encoded by difference against whole"
        measured = f"{found.ratio:.1f} times cheaper"
        yield Promise(what, f"at least {TIMES_CHEAPER} times", measured, found.ratio >= TIMES_CHEAPER)


def _slope(earlier: StorageCost, later: StorageCost) -> float:
    return (later.stored - earlier.stored) / (later.unique - earlier.unique)


def as_json(report: TrajectoryReport) -> bytes:
    rates = [msgspec.to_builtins(rate) | {"tokens_per_second": rate.per_second} for rate in report.rates]
    return msgspec.json.encode(
        {
            "machine": describe_machine(),
            "rates": rates,
            "peers": report.versions,
            "absent": report.absent,
            "stored": report.stored,
            "rendered": report.rendered,
            "promises": list_promises(report),
        }
    )


def show(report: TrajectoryReport, console: Console) -> None:
    console.print(_rates(report))
    for peer, why in report.absent.items():
        console.print(f"{peer} was not measured: {why}.", highlight=False)
    console.print(_stored(report))
    if report.rendered is not None:
        console.print(_rendered(report.rendered))
    console.print(promise_table(list_promises(report)))


def _rates(report: TrajectoryReport) -> Table:
    table = Table(title="Tokens into the tree, on one core", title_justify="left")
    for name in ("session", "builder"):
        table.add_column(name)
    for name in ("tokens", "unique", "million a second", "Polar is faster by"):
        table.add_column(name, justify="right")
    own = {rate.shape: rate.per_second for rate in report.rates if rate.builder == POLAR}
    order = [POLAR, POLAR_WHOLE, *report.versions]
    for shape in own:
        found = sorted((it for it in report.rates if it.shape == shape), key=lambda it: order.index(it.builder))
        for rate in found:
            version = report.versions.get(rate.builder)
            times = f"{own[shape] / rate.per_second:.0f} x" if version else ""
            name = f"{rate.builder} {version}" if version else rate.builder
            per_second = rate.per_second / 1e6
            speed = f"{per_second:.0f}" if per_second >= 10 else f"{per_second:.2f}"
            table.add_row(shape, name, f"{rate.tokens:,}", f"{rate.unique:,}", speed, times)
        table.add_section()
    return table


def _stored(report: TrajectoryReport) -> Table:
    table = Table(title="A session in the store (MB), by its turns", title_justify="left")
    for name in ("turns", "unique tokens", "tokens of all calls", "calls whole", "stored"):
        table.add_column(name, justify="right")
    table.add_column("stored, to scale", width=42)
    most = max((row.stored for row in report.stored), default=0)
    for row in report.stored:
        figures = f"{row.unique:,}", f"{row.tokens:,}", f"{row.whole / MB:.1f}", f"{row.stored / MB:.2f}"
        table.add_row(str(row.turns), *figures, Bar(most, 0, row.stored))
    return table


def _rendered(found: RenderingCost) -> Table:
    table = Table(title="A turn at the end of a long conversation (ms)", title_justify="left")
    table.add_column("tokenizer")
    columns = "context", "messages", "by difference", "whole", "gateway adds to the first byte", "to the last"
    for name in columns:
        table.add_column(name, justify="right")
    figures = (f"{it:.1f}" for it in (found.incremental, found.whole, found.added_first, found.added))
    table.add_row(found.tokenizer, f"{found.context:,}", str(found.messages), *figures)
    return table
