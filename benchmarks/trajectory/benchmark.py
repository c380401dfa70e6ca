"""`make bench-trajectory`: how fast tokens go into the tree, what a session costs on disk, and a turn in rendering.

    measure_tree_rates     whole sequences into the token tree on one core, against TRL's and AReaL's on the same data
    measure_stored_bytes   sessions of 10 to 200 turns in a real store
    rendering.measure      a turn at 30,000 tokens of context, by difference and whole (rendering.py)

Figures are CPU seconds, the best of several rounds, so that other work on the machine shows as little as can be.
"""

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec
import numpy as np
from msgspec import Struct, field
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from benchmarks import calls
from benchmarks.calls import draw_ids
from benchmarks.client import BenchmarkError
from benchmarks.command_line import (
    Progress,
    json_option,
    make_console,
    make_progress_printer,
    peer_python_option,
    tokenizer_option,
)
from benchmarks.process import run_async
from benchmarks.report import MB, Promise, describe_machine, make_promise_table
from benchmarks.trajectory import rendering
from benchmarks.trajectory.rendering import OWN, RenderingCost
from polar.records.exchange import TokenIds
from polar.records.session import Session
from polar.records.trajectory import SessionPaths
from polar.records.trajectory import TokenPath as TokenPath
from polar.store.sqlite import open_sqlite_store
from polar.trajectory import builders
from polar.trajectory.tree import build_token_tree

POLAR, POLAR_WHOLE = "Polar", "Polar, prefix_tree"
PEERS = {"trl": "TRL", "areal": "AReaL"}
_SCRIPT = Path(__file__).with_name("tree_builders.py")


class TrajectoryPlan(Struct, frozen=True):
    """How much is measured."""

    shapes: tuple[str, ...]
    rounds: int = 7
    turns: tuple[int, ...] = (10, 25, 50, 75, 100, 125, 150, 175, 200)
    context: int = 0  # tokens, at which a turn is rendered; 0 for none


class TreeRate(Struct):
    """A shape's tokens into a tree, on one core."""

    builder: str
    shape: str
    sequences: int
    tokens: int  # of all sequences
    unique: int  # of the tree
    seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


class StorageCost(Struct):
    """A session in the store's file."""

    turns: int
    unique: int  # tokens
    tokens: int  # of all prompts and replies
    stored: int  # bytes
    whole: int  # bytes, if each call were stored whole: request, reply, ids and log-probabilities


class TrajectoryReport(Struct):
    rates: list[TreeRate] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)  # of the peers
    absent: dict[str, str] = field(default_factory=dict)  # peers that were not measured, and why
    stored: list[StorageCost] = field(default_factory=list)
    rendered: rendering.RenderingCost | None = None


async def run(
    plan: TrajectoryPlan, peer_pythons: Sequence[Path], progress: Progress, tokenizer: str | None = None
) -> TrajectoryReport:
    """All measurements. A peer is measured in the first of the given interpreters that has it; turns are rendered with
    the given tokenizer's folder, or the scripted engine's."""
    report = TrajectoryReport()
    # In a thread: these are long calculations. It alone is pinned to one core, and with it the peers that it starts.
    with ThreadPoolExecutor(1) as worker:
        await asyncio.get_running_loop().run_in_executor(
            worker, measure_tree_rates, report, plan, peer_pythons, progress
        )
    await measure_stored_bytes(report, plan, progress)
    if plan.context:
        progress(f"a turn at {plan.context:,} tokens of context")
        report.rendered = await rendering.measure(tokenizer, plan.context)
    return report


# Tokens into the tree


def measure_tree_rates(
    report: TrajectoryReport, plan: TrajectoryPlan, peer_pythons: Sequence[Path], progress: Progress
) -> None:
    """Pins the calling thread to one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        sizes = {}
        for shape in plan.shapes:
            progress(f"tokens into the tree, {shape}")
            paths = SHAPES[shape](np.random.default_rng(0))
            report.rates += _measure_own_rates(shape, paths, plan.rounds)
            sizes[shape] = report.rates[-1]
            sequences = [np.concatenate([path.prompt, path.sampled]) for path in paths]
            np.save(Path(name) / f"{shape}.ids.npy", np.concatenate(sequences))
            np.save(Path(name) / f"{shape}.lengths.npy", np.array([len(it) for it in sequences]))
        for peer in PEERS:
            progress(f"tokens into the tree, {PEERS[peer]}")
            _measure_peer_rates(report, peer, Path(name), sizes, peer_pythons)


def _measure_own_rates(shape: str, paths: list[TokenPath], rounds: int) -> Iterator[TreeRate]:
    tokens = sum(len(path.prompt) + len(path.sampled) for path in paths)
    session = [SessionPaths("bench", paths)]
    unique = build_token_tree(paths).num_tokens
    for builder, build in (
        (POLAR, lambda: build_token_tree(paths)),
        (POLAR_WHOLE, lambda: builders.prefix_tree(session)),
    ):
        seconds = min(_time_on_thread(build) for _ in range(rounds))
        yield TreeRate(builder, shape, len(paths), tokens, unique, seconds)


def _time_on_thread(work: Callable[[], object]) -> float:
    started_at = time.thread_time()
    work()
    return time.thread_time() - started_at


class _Answer(Struct):
    version: str
    shape: str
    seconds: float
    unique: int


def _measure_peer_rates(
    report: TrajectoryReport, peer: str, folder: Path, sizes: dict[str, TreeRate], pythons: Sequence[Path]
) -> None:
    name = PEERS[peer]
    report.absent[name] = f"name an interpreter that has {peer} with --peer-python"
    for python in pythons:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        argv = [str(python), str(_SCRIPT), peer, str(folder)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
        except OSError as error:
            report.absent[name] = f"{python}: {error.strerror}"
            continue
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            report.absent[name] = f"{python}: {reason}"
            continue
        for answer in (msgspec.json.decode(line, type=_Answer) for line in done.stdout.splitlines()):
            ours = sizes[answer.shape]
            check_peer(name, ours, answer.unique)
            report.versions[name] = answer.version
            report.rates.append(
                TreeRate(name, answer.shape, ours.sequences, ours.tokens, answer.unique, answer.seconds)
            )
        del report.absent[name]
        return


def check_peer(name: str, ours: TreeRate, unique: int) -> None:
    """The figures are those of the same tree, or there are none. TRL's has one more token at the end of each sequence
    and of each branch."""
    if not ours.unique <= unique <= ours.unique + 3 * ours.sequences:
        raise BenchmarkError(f"{name} made a tree of {unique} tokens of {ours.shape}; Polar's has {ours.unique}.")


# Sessions of agents, as tokens


def _make_session(
    rng: np.random.Generator,
    turns: int,
    tokens: int,
    *,
    prompt: TokenIds | None = None,
    drops_thinking: bool = False,
    subagents: int = 0,
) -> list[TokenPath]:
    """A conversation that grows to about `tokens`: a third of each turn is sampled, the rest are results of tools. With
    thinking dropped, later prompts lack the first half of what was sampled. Sub-agents begin with the first part of the
    system prompt and take turns with the main agent."""
    beginning = draw_ids(rng, tokens // 10) if prompt is None else prompt
    growth = (tokens - len(beginning)) // turns
    contexts = [beginning]
    paths: list[TokenPath] = []
    for turn in range(turns):
        for agent, context in enumerate(contexts):
            sampled = draw_ids(rng, growth // 3)
            paths.append(_make_path(len(paths), context, sampled))
            echoed = sampled[len(sampled) // 2 :] if drops_thinking else sampled
            contexts[agent] = np.concatenate([context, echoed, draw_ids(rng, growth - len(sampled))])
        if len(contexts) <= subagents and turn % 10 == 0:
            contexts.append(np.concatenate([beginning[: len(beginning) // 2], draw_ids(rng, 500)]))
    return paths


def _make_group(rng: np.random.Generator) -> list[TokenPath]:
    prompt = draw_ids(rng, 8_000)
    return [path for _ in range(16) for path in _make_session(rng, 40, 40_000, prompt=prompt)]


def _make_siblings(rng: np.random.Generator) -> list[TokenPath]:
    prompt = draw_ids(rng, 8_000)
    return [_make_path(number, prompt.copy(), draw_ids(rng, 300)) for number in range(1_000)]


def _make_shuffled(rng: np.random.Generator) -> list[TokenPath]:
    paths = _make_session(rng, 100, 60_000, drops_thinking=True)
    return [paths[index] for index in rng.permutation(len(paths))]


SHAPES: dict[str, Callable[[np.random.Generator], list[TokenPath]]] = {
    "20 turns to 30k": lambda rng: _make_session(rng, 20, 30_000),
    "200 turns to 100k": lambda rng: _make_session(rng, 200, 100_000),
    "200 turns to 100k, thinking dropped": lambda rng: _make_session(rng, 200, 100_000, drops_thinking=True),
    "100 turns to 60k, 4 sub-agents": lambda rng: _make_session(rng, 100, 60_000, subagents=4),
    "100 turns to 60k, thinking dropped, shuffled": _make_shuffled,
    "group of 16, 40 turns to 40k each": _make_group,
    "1000 siblings after 8k": _make_siblings,
}
FULL = TrajectoryPlan(tuple(SHAPES), context=rendering.CONTEXT)
QUICK = TrajectoryPlan(
    ("20 turns to 30k", "100 turns to 60k, thinking dropped, shuffled"),
    rounds=3,
    turns=(10, 50, 100),
    context=rendering.CONTEXT,
)


def _make_path(seq: int, prompt: TokenIds, sampled: TokenIds) -> TokenPath:
    logprobs, versions = np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.int32)
    return TokenPath("bench", f"x{seq}", seq, prompt, sampled, logprobs, versions, len(sampled))


# Bytes on disk


async def measure_stored_bytes(report: TrajectoryReport, plan: TrajectoryPlan, progress: Progress) -> None:
    progress(f"bytes of a session of {plan.turns[0]} to {plan.turns[-1]} turns")
    exchanges, wholes = calls.make_conversation(max(plan.turns))
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        for turns in plan.turns:
            path = Path(name) / f"{turns}.db"
            store = open_sqlite_store(path)
            await store.create_session(Session("bench", b"bench", 0.0))
            for exchange in exchanges[:turns]:
                await store.append(exchange)
            await store.close()
            lengths = [calls.count_tokens(exchange) for exchange in exchanges[:turns]]
            whole = sum(wholes[:turns])
            report.stored.append(StorageCost(turns, lengths[-1], sum(lengths), path.stat().st_size, whole))


# Promises and tables

TOKENS_PER_SECOND = 200e6
TIMES_A_PEER = 100
TIMES_CHEAPER = 15
EVEN = 1.25
"""Bytes per new token may grow by so much from a session's first turns to its last: they would by far more if what is
stored grew with turns squared."""


def list_promises(report: TrajectoryReport) -> list[Promise]:
    return [
        *_list_rate_promises(report),
        *_list_peer_promises(report),
        *_list_stored_promises(report),
        *_list_rendering_promises(report),
    ]


def _list_rate_promises(report: TrajectoryReport) -> Iterator[Promise]:
    own = [rate for rate in report.rates if rate.builder == POLAR]
    if own:
        slowest = min(own, key=lambda rate: rate.per_second)
        measured = f"{slowest.per_second / 1e6:.0f} million ({slowest.shape})"
        what = "tokens a second into the tree on one core, the slowest shape"
        yield Promise(what, "at least 200 million", measured, slowest.per_second >= TOKENS_PER_SECOND)


def _list_peer_promises(report: TrajectoryReport) -> Iterator[Promise]:
    own = {rate.shape: rate.per_second for rate in report.rates if rate.builder == POLAR}
    for peer in report.versions:
        times, shape = min((own[it.shape] / it.per_second, it.shape) for it in report.rates if it.builder == peer)
        what = f"the same against {peer}, the shape where it is nearest"
        yield Promise(what, f"at least {TIMES_A_PEER} times", f"{times:.0f} times ({shape})", times >= TIMES_A_PEER)


def _list_stored_promises(report: TrajectoryReport) -> Iterator[Promise]:
    if len(report.stored) >= 3:
        first, second, before, last = (report.stored[index] for index in (0, 1, -2, -1))
        ratio = _compute_slope(before, last) / _compute_slope(first, second)
        what = f"stored bytes per new token, turns {before.turns} to {last.turns} over {first.turns} to {second.turns}"
        yield Promise(what, f"at most {EVEN} times", f"{ratio:.2f} times", ratio <= EVEN)


def _list_rendering_promises(report: TrajectoryReport) -> Iterator[Promise]:
    # The scripted engine's tokenizer is small, and quick beyond any model's.
    if (found := report.rendered) is not None and found.tokenizer != OWN:
        what = f"a turn at {found.context:,} tokens, rendered and encoded by difference against whole"
        measured = f"{found.ratio:.1f} times cheaper"
        yield Promise(what, f"at least {TIMES_CHEAPER} times", measured, found.ratio >= TIMES_CHEAPER)


def _compute_slope(earlier: StorageCost, later: StorageCost) -> float:
    return (later.stored - earlier.stored) / (later.unique - earlier.unique)


def to_json(report: TrajectoryReport) -> bytes:
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


def print_report(report: TrajectoryReport, console: Console) -> None:
    console.print(_make_rate_table(report))
    for peer, why in report.absent.items():
        console.print(f"{peer} was not measured: {why}.", highlight=False)
    console.print(_make_storage_table(report))
    if report.rendered is not None:
        console.print(_make_rendering_table(report.rendered))
    console.print(make_promise_table(list_promises(report)))


def _make_rate_table(report: TrajectoryReport) -> Table:
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


def _make_storage_table(report: TrajectoryReport) -> Table:
    table = Table(title="A session in the store (MB), by its turns", title_justify="left")
    for name in ("turns", "unique tokens", "tokens of all calls", "calls whole", "stored"):
        table.add_column(name, justify="right")
    table.add_column("stored, to scale", width=42)
    most = max((row.stored for row in report.stored), default=0)
    for row in report.stored:
        figures = f"{row.unique:,}", f"{row.tokens:,}", f"{row.whole / MB:.1f}", f"{row.stored / MB:.2f}"
        table.add_row(str(row.turns), *figures, Bar(most, 0, row.stored))
    return table


def _make_rendering_table(found: RenderingCost) -> Table:
    table = Table(title="A turn at the end of a long conversation (ms)", title_justify="left")
    table.add_column("tokenizer")
    columns = "context", "messages", "by difference", "whole", "gateway adds to the first byte", "to the last"
    for name in columns:
        table.add_column(name, justify="right")
    figures = (f"{it:.1f}" for it in (found.incremental, found.whole, found.added_first, found.added))
    table.add_row(found.tokenizer, f"{found.context:,}", str(found.messages), *figures)
    return table


# The command


@click.command("trajectory")
@click.option("--quick", is_flag=True, help="Measure fewer and smaller sessions.")
@peer_python_option
@tokenizer_option
@json_option
def command(quick: bool, peer_pythons: tuple[Path, ...], tokenizer: Path | None, as_json: bool) -> None:
    """Measure tokens a second into the token tree, a session's bytes on disk, and a turn at 30,000 tokens.

    Peers are TRL and AReaL.
    """
    plan = QUICK if quick else FULL
    folder = None if tokenizer is None else str(tokenizer)
    measured = run_async(run(plan, peer_pythons, make_progress_printer(), folder))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())
