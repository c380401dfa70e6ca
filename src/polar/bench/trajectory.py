"""`polar bench trajectory`: how fast tokens go into the tree, what a session costs on disk, and a turn in rendering.

    measure_tree_rates     whole sequences into the token tree on one core, against TRL's and AReaL's on the same data
    measure_stored_bytes   sessions of 10 to 200 turns in a real store
    rendering      a turn at 30,000 tokens of context, by difference and whole (rendering.py)

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

import msgspec
import numpy as np
from msgspec import Struct, field

from polar.bench import calls, rendering
from polar.bench.client import BenchError
from polar.dialects.base import Dialect
from polar.plugins import load
from polar.records.exchange import Exchange, VersionSpan
from polar.records.session import Session
from polar.records.trajectory import Ids, SessionPaths
from polar.records.trajectory import TokenPath as TokenPath
from polar.store.sqlite import SqliteStore
from polar.trajectory import builders
from polar.trajectory.tree import build_token_tree
from polar.types import Reply, SamplingParams, Text

POLAR, POLAR_WHOLE = "Polar", "Polar, prefix_tree"
PEERS = {"trl": "TRL", "areal": "AReaL"}
_SCRIPT = Path(__file__).parent / "peers" / "tree_builders.py"
_VOCABULARY = 150_000

Progress = Callable[[str], None]


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
            report.rates += _own_rates(shape, paths, plan.rounds)
            sizes[shape] = report.rates[-1]
            sequences = [np.concatenate([path.prompt, path.sampled]) for path in paths]
            np.save(Path(name) / f"{shape}.ids.npy", np.concatenate(sequences))
            np.save(Path(name) / f"{shape}.lengths.npy", np.array([len(it) for it in sequences]))
        for peer in PEERS:
            progress(f"tokens into the tree, {PEERS[peer]}")
            _peer_rates(report, peer, Path(name), sizes, peer_pythons)


def _own_rates(shape: str, paths: list[TokenPath], rounds: int) -> Iterator[TreeRate]:
    tokens = sum(len(path.prompt) + len(path.sampled) for path in paths)
    session = [SessionPaths("bench", paths)]
    unique = build_token_tree(paths).num_tokens
    for builder, build in (
        (POLAR, lambda: build_token_tree(paths)),
        (POLAR_WHOLE, lambda: builders.prefix_tree(session)),
    ):
        seconds = min(_thread_seconds(build) for _ in range(rounds))
        yield TreeRate(builder, shape, len(paths), tokens, unique, seconds)


def _thread_seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


class _Answer(Struct):
    version: str
    shape: str
    seconds: float
    unique: int


def _peer_rates(
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
            _check_peer(name, ours, answer.unique)
            report.versions[name] = answer.version
            report.rates.append(
                TreeRate(name, answer.shape, ours.sequences, ours.tokens, answer.unique, answer.seconds)
            )
        del report.absent[name]
        return


def _check_peer(name: str, ours: TreeRate, unique: int) -> None:
    """The figures are those of the same tree, or there are none. TRL's has one more token at the end of each sequence
    and of each branch."""
    if not ours.unique <= unique <= ours.unique + 3 * ours.sequences:
        raise BenchError(f"{name} made a tree of {unique} tokens of {ours.shape}; Polar's has {ours.unique}.")


# Sessions of agents, as tokens


def _session(
    rng: np.random.Generator,
    turns: int,
    tokens: int,
    *,
    prompt: Ids | None = None,
    drops_thinking: bool = False,
    subagents: int = 0,
) -> list[TokenPath]:
    """A conversation that grows to about `tokens`: a third of each turn is sampled, the rest are results of tools. With
    thinking dropped, later prompts lack the first half of what was sampled. Sub-agents begin with the first part of the
    system prompt and take turns with the main agent."""
    beginning = _ids(rng, tokens // 10) if prompt is None else prompt
    growth = (tokens - len(beginning)) // turns
    contexts = [beginning]
    paths: list[TokenPath] = []
    for turn in range(turns):
        for agent, context in enumerate(contexts):
            sampled = _ids(rng, growth // 3)
            paths.append(_path(len(paths), context, sampled))
            echoed = sampled[len(sampled) // 2 :] if drops_thinking else sampled
            contexts[agent] = np.concatenate([context, echoed, _ids(rng, growth - len(sampled))])
        if len(contexts) <= subagents and turn % 10 == 0:
            contexts.append(np.concatenate([beginning[: len(beginning) // 2], _ids(rng, 500)]))
    return paths


def _group(rng: np.random.Generator) -> list[TokenPath]:
    prompt = _ids(rng, 8_000)
    return [path for _ in range(16) for path in _session(rng, 40, 40_000, prompt=prompt)]


def _siblings(rng: np.random.Generator) -> list[TokenPath]:
    prompt = _ids(rng, 8_000)
    return [_path(number, prompt.copy(), _ids(rng, 300)) for number in range(1_000)]


def _shuffled(rng: np.random.Generator) -> list[TokenPath]:
    paths = _session(rng, 100, 60_000, drops_thinking=True)
    return [paths[index] for index in rng.permutation(len(paths))]


SHAPES: dict[str, Callable[[np.random.Generator], list[TokenPath]]] = {
    "20 turns to 30k": lambda rng: _session(rng, 20, 30_000),
    "200 turns to 100k": lambda rng: _session(rng, 200, 100_000),
    "200 turns to 100k, thinking dropped": lambda rng: _session(rng, 200, 100_000, drops_thinking=True),
    "100 turns to 60k, 4 sub-agents": lambda rng: _session(rng, 100, 60_000, subagents=4),
    "100 turns to 60k, thinking dropped, shuffled": _shuffled,
    "group of 16, 40 turns to 40k each": _group,
    "1000 siblings after 8k": _siblings,
}
FULL = TrajectoryPlan(tuple(SHAPES), context=rendering.CONTEXT)
QUICK = TrajectoryPlan(
    ("20 turns to 30k", "100 turns to 60k, thinking dropped, shuffled"),
    rounds=3,
    turns=(10, 50, 100),
    context=rendering.CONTEXT,
)


def _ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, _VOCABULARY, count, dtype=np.int32)


def _path(seq: int, prompt: Ids, sampled: Ids) -> TokenPath:
    logprobs, versions = np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.int32)
    return TokenPath("bench", f"x{seq}", seq, prompt, sampled, logprobs, versions, len(sampled))


# Bytes on disk


async def measure_stored_bytes(report: TrajectoryReport, plan: TrajectoryPlan, progress: Progress) -> None:
    progress(f"bytes of a session of {plan.turns[0]} to {plan.turns[-1]} turns")
    exchanges, wholes = make_conversation(max(plan.turns))
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        for turns in plan.turns:
            path = Path(name) / f"{turns}.db"
            store = SqliteStore.open(path)
            await store.create_session(Session("bench", b"bench", 0.0))
            for exchange in exchanges[:turns]:
                await store.append(exchange)
            await store.close()
            lengths = [_length(exchange) for exchange in exchanges[:turns]]
            whole = sum(wholes[:turns])
            report.stored.append(StorageCost(turns, lengths[-1], sum(lengths), path.stat().st_size, whole))


def make_conversation(turns: int) -> tuple[list[Exchange], list[int]]:
    """A coding agent's session, call by call, and the bytes of each call as it went over the wire."""
    rng = np.random.default_rng(0)
    dialect: Dialect = load("dialects", "openai_chat")()
    context = _ids(rng, calls.S.prompt_tokens // 2)
    exchanges, wholes = [], []
    for seq in range(turns):
        sampled = _ids(rng, calls.S.sampled_tokens)
        text = calls.reply_text(calls.S, seq)
        body = calls.make_template(calls.S, seq).body(calls.make_nonce(1))
        exchange = Exchange(
            exchange_id=f"x{seq}",
            session_id="bench",
            seq=seq,
            dialect="openai_chat",
            params={},
            hints={},
            raw_request=dialect.split(body),
            status="complete",
            started_at=float(seq),
            ended_at=seq + 0.5,
            reply=Reply(f"x{seq}", "bench", 0, [Text(text)]),
            prompt_ids=context,
            sampled_ids=sampled,
            logprobs=rng.random(len(sampled), np.float32) - 1,
            logprob_kind="raw",
            delivered=len(sampled),
            sampling=SamplingParams(temperature=1.0),
            versions=[VersionSpan(0, 0, len(sampled))],
            finish_reason="stop",
        )
        exchanges.append(exchange)
        wholes.append(len(body) + len(text) + 4 * _length(exchange) + 4 * len(sampled))
        context = np.concatenate([context, sampled, _ids(rng, 700)])
    return exchanges, wholes


def _length(exchange: Exchange) -> int:
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    return len(exchange.prompt_ids) + len(exchange.sampled_ids)
