"""Groups of sessions for `make bench-tree`, and what each builder makes of them.

A recorded group is an outline: how long the nodes of its token tree are and who stands on whom, and which way each call
goes through it. Which tokens they were doesn't matter to a model with random weights, so the ids are drawn anew; two
tokens are the same wherever they were the same token of the same prefix, and nowhere else that would matter.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from benchmarks.client import BenchmarkError
from polar.records.trajectory import ROOT, SessionPaths, Trajectory
from polar.records.trajectory import TokenPath as TokenPath
from polar.train.packing import Floats, Indices, Ints, TokenTree, make_path_tree
from polar.trajectory import builders
from polar.trajectory.tree import build_token_tree

_SEED = 6
_SAMPLED, _OBSERVED = 150, 350  # tokens of a turn
_IDS = 1024  # ids are below this one: every model's vocabulary has them


class TrainedCall(Struct, frozen=True, array_like=True):
    """A call that trains: its prompt and what was sampled behind it, as a way from a root to node `end`."""

    session: int
    end: int
    prompt: int  # tokens
    sampled: int


class TreeOutline(Struct):
    """A group's token tree without its tokens. A parent stands before its children."""

    name: str
    about: str  # where it comes from
    lengths: list[int]  # of each node
    parents: list[int]
    walks: list[TrainedCall]


class BenchGroup(Struct):
    name: str
    about: str
    sessions: list[SessionPaths]

    def first(self, count: int, name: str) -> "BenchGroup":
        """The same task sampled fewer times."""
        return BenchGroup(name, self.about, self.sessions[:count])


class BuilderBatch(Struct):
    """What one builder makes of a group, ready to be packed. A step's loss is the sum of -weight * log-probability over
    the entries of all trees."""

    trees: list[TokenTree]
    weights: list[Floats]  # of each tree's entries
    numbers: list[Indices]  # of each tree's entries: which of the group's sampled tokens it is

    @property
    def tokens(self) -> int:
        return sum(len(tree.ids) for tree in self.trees)

    def some(self, chosen: Sequence[int]) -> "BuilderBatch":
        return BuilderBatch(
            [self.trees[it] for it in chosen],
            [self.weights[it] for it in chosen],
            [self.numbers[it] for it in chosen],
        )


# Groups


def make_synthetic_group(
    name: str, *, sessions: int, system: int, turns: int, sampled: int, observed: int
) -> BenchGroup:
    """Sessions that share a system prompt and nothing else. A turn is so many observed tokens, then the sampled."""
    drawn = np.random.default_rng(_SEED)
    prefix = _draw_ids(drawn, system)
    group = []
    for number in range(sessions):
        calls = _make_conversation(drawn, number, prefix, turns, sampled, observed)
        group.append(_make_session(number, calls, sampled))
    about = f"{sessions} sessions, system prompt {system:,}, {turns} turns of {sampled} sampled + {observed} observed"
    return BenchGroup(name, about, group)


def make_subagent_group(
    name: str, *, sessions: int, system: int, turns: int, errands: int, errand_turns: int
) -> BenchGroup:
    """Sessions that give errands to agents with a system prompt of their own. Turns are as in `synthetic`."""
    drawn = np.random.default_rng(_SEED)
    prefix, helper = _draw_ids(drawn, system), _draw_ids(drawn, system // 2)
    group = []
    for number in range(sessions):
        calls = _make_conversation(drawn, number, prefix, turns, _SAMPLED, _OBSERVED)
        for errand in range(errands):
            first = sessions + number * errands + errand
            calls += _make_conversation(drawn, first, helper, errand_turns, _SAMPLED, _OBSERVED)
        group.append(_make_session(number, calls, _SAMPLED))
    about = f"{sessions} sessions, system prompt {system:,}, {turns} turns, {errands} sub-agents of {errand_turns}"
    return BenchGroup(name, about, group)


def make_compaction_group(name: str, *, sessions: int, system: int, turns: int, windows: int) -> BenchGroup:
    """Sessions that sum up what they have done after so many turns, and go on from there."""
    drawn = np.random.default_rng(_SEED)
    prefix = _draw_ids(drawn, system)
    group = []
    for number in range(sessions):
        calls: list[Ints] = []
        begin = prefix
        for window in range(windows):
            calls += _make_conversation(drawn, number * windows + window, begin, turns, _SAMPLED, _OBSERVED)
            begin = np.concatenate([prefix, calls[-1][-_SAMPLED:]])  # the last turn was the summary
        group.append(_make_session(number, calls, _SAMPLED))
    about = f"{sessions} sessions, system prompt {system:,}, {windows} windows of {turns} turns"
    return BenchGroup(name, about, group)


def _make_conversation(
    drawn: np.random.Generator, first: int, prefix: Ints, turns: int, sampled: int, observed: int
) -> list[Ints]:
    """What each turn's call sees and samples. The token behind the prefix is `first`: so conversations part there."""
    rest = _draw_ids(drawn, turns * (observed + sampled))
    rest[0] = first
    whole = np.concatenate([prefix, rest])
    return [whole[: len(prefix) + turn * (observed + sampled)] for turn in range(1, turns + 1)]


def _make_session(number: int, calls: Sequence[Ints], sampled: int) -> SessionPaths:
    return SessionPaths(str(number), [_make_path(number, seq, ids, sampled) for seq, ids in enumerate(calls)])


def make_outline(name: str, about: str, sessions: Sequence[SessionPaths]) -> TreeOutline:
    """What of a group is kept: only calls that train."""
    paths = [
        (number, msgspec.structs.replace(path, sampled=path.sampled[: path.num_trainable]))
        for number, session in enumerate(sessions)
        for path in sorted(session.paths, key=lambda it: it.seq)
        if path.num_trainable
    ]
    tree = build_token_tree([path for _, path in paths])
    return TreeOutline(
        name=name,
        about=about,
        lengths=[node.stop - node.start for node in tree.nodes],
        parents=[node.parent for node in tree.nodes],
        walks=[
            TrainedCall(number, end, len(path.prompt), len(path.sampled))
            for (number, path), end in zip(paths, tree.ends, strict=True)
        ],
    )


def make_group(drawing: TreeOutline) -> BenchGroup:
    """The group of an outline, with ids of our own: siblings begin with different ones, all else is random."""
    drawn = np.random.default_rng(_SEED)
    siblings: dict[int, int] = {}
    whole: list[Ints] = []  # of each node, from the root to its end
    for length, parent in zip(drawing.lengths, drawing.parents, strict=True):
        ids = _draw_ids(drawn, length)
        ids[0] = siblings[parent] = siblings.get(parent, -1) + 1
        whole.append(ids if parent == ROOT else np.concatenate([whole[parent], ids]))
    sessions: dict[int, SessionPaths] = {}
    for walk in drawing.walks:
        session = sessions.setdefault(walk.session, SessionPaths(str(walk.session), []))
        ids = whole[walk.end][: walk.prompt + walk.sampled]
        session.paths.append(_make_path(walk.session, len(session.paths), ids, walk.sampled))
    return BenchGroup(drawing.name, drawing.about, list(sessions.values()))


def read_outline(file: Path) -> TreeOutline:
    try:
        return msgspec.json.decode(file.read_bytes(), type=TreeOutline)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchmarkError(f"{file} is no recorded group: {error}") from error


def _make_path(session: int, seq: int, ids: Ints, sampled: int) -> TokenPath:
    context = len(ids) - sampled
    return TokenPath(
        session_id=str(session),
        exchange_id=f"{session}/{seq}",
        seq=seq,
        prompt=ids[:context],
        sampled=ids[context:],
        logprobs=None,
        versions=None,
        num_trainable=sampled,
    )


def _draw_ids(drawn: np.random.Generator, count: int) -> Ints:
    return drawn.integers(0, _IDS, count, dtype=np.int32)


# What builders make of them


def per_request(group: BenchGroup) -> BuilderBatch:
    return _batch_traces(group, builders.per_request)


def prefix_merging(group: BenchGroup) -> BuilderBatch:
    return _batch_traces(group, builders.prefix_merging)


def prefix_tree(group: BenchGroup) -> BuilderBatch:
    built = builders.prefix_tree(group.sessions)
    advantages, first = _make_advantages(group), _number_calls(group)
    tokens, weights, numbers = [], [], []
    for term in built.terms:
        count = term.stop - term.start
        tokens.append(built.starts[term.node] + np.arange(term.start, term.stop))
        weights.append(np.full(count, advantages[term.session_id] * term.weight / count, np.float32))
        numbers.append(first[term.exchange_id] + term.offset + np.arange(count))
    tree = TokenTree(
        ids=built.ids,
        starts=built.starts,
        parents=built.parents,
        tokens=np.concatenate(tokens),
        temperature=np.ones(built.tokens.trainable, np.float32),
    )
    return BuilderBatch([tree], [np.concatenate(weights)], [np.concatenate(numbers)])


BUILDERS: dict[str, Callable[[BenchGroup], BuilderBatch]] = {
    "prefix_tree": prefix_tree,
    "prefix_merging": prefix_merging,
    "per_request": per_request,
}


def _batch_traces(group: BenchGroup, build: Callable[[SessionPaths], Trajectory]) -> BuilderBatch:
    advantages, first = _make_advantages(group), _number_calls(group)
    batch = BuilderBatch([], [], [])
    for session in group.sessions:
        for trace in build(session).traces:
            tokens = len(trace.prompt_ids) + np.flatnonzero(trace.loss_mask)
            count = len(tokens)
            ids = np.concatenate([trace.prompt_ids, trace.response_ids])
            batch.trees.append(make_path_tree(ids, tokens, np.ones(count, np.float32)))
            batch.weights.append(np.full(count, advantages[session.session_id] * trace.weight / count, np.float32))
            spans = [first[span.exchange_id] + span.offset + np.arange(span.stop - span.start) for span in trace.spans]
            batch.numbers.append(np.concatenate(spans))
    return batch


def _make_advantages(group: BenchGroup) -> dict[str, float]:
    """Some that differ, divided by the number of sessions."""
    count = len(group.sessions)
    spread = np.linspace(-1.0, 2.0, count)
    return {session.session_id: float(it) / count for session, it in zip(group.sessions, spread, strict=True)}


def _number_calls(group: BenchGroup) -> dict[str, int]:
    """The number of each call's first sampled token."""
    paths = [path for session in group.sessions for path in session.paths]
    numbers = np.cumsum([0, *(path.num_trainable for path in paths)])
    return {path.exchange_id: int(number) for path, number in zip(paths, numbers[:-1], strict=True)}
