"""A group as it comes from the rollout service: all sessions of a task, as trees or traces, with what trains in them.

    a group's tree (prefix_tree), or its sessions' traces (any other builder) -> Group: trees with columns

A column has one entry for each trained token of each sampling; nothing of it depends on how a session was split.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.errors import PolarError
from polar.train.forest import Tree
from polar.trajectory.tree import ROOT

UNKNOWN = np.float32(np.nan)


class Member(Struct):
    """A session of the group."""

    session_id: str
    reward: float | None
    reason: str | None  # why it is not trained: the service's, or the trainer's own
    turns: list[str] = field(default_factory=list)  # its exchanges that train, in the order in which they were made
    turn_rewards: dict[str, float] = field(default_factory=dict)
    tokens: int = 0  # that train


class Columns(Struct):
    """Of the trained tokens. `session` and `turn` count through the group's members and a member's turns."""

    session: NDArray[np.int64]
    turn: NDArray[np.int64]
    behaviour: NDArray[np.float32]  # the engine's log-probability; UNKNOWN where it gave none
    version: NDArray[np.int32]
    weight: NDArray[np.float64]  # 1 / the session's trainable tokens

    def __getitem__(self, kept: NDArray[Any]) -> "Columns":
        return Columns(*(getattr(self, name)[kept] for name in self.__struct_fields__))

    @classmethod
    def joined(cls, parts: Sequence["Columns"]) -> "Columns":
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__struct_fields__))


class Part(Struct):
    """A tree and its columns, which have an entry for each of `tree.tokens`."""

    tree: Tree
    columns: Columns


class Group(Struct):
    index: int  # its place in the order of training
    task_id: str
    cursor: int
    members: list[Member]
    parts: list[Part]
    excluded: Counter[str] = field(default_factory=Counter)  # sampled tokens that don't train, by reason
    unique: int = 0  # tokens of its tree

    @property
    def graded(self) -> list[int]:
        """Members that are trained on."""
        return [
            number for number, member in enumerate(self.members) if member.reason is None and member.reward is not None
        ]


# As the service tells it


class _Node(Struct):
    parent: int | None
    ids: list[int]


class _Term(Struct):
    session_id: str
    exchange_id: str
    node: int
    start: int
    stop: int
    logprobs: list[float] | None
    policy_versions: list[int]
    weight: float
    scale: float | None = None


class _Session(Struct):
    session_id: str
    reward: float | None
    reason: str | None
    turn_rewards: dict[str, float] = {}


class _Excluded(Struct):
    start: int
    stop: int
    reason: str


class _Tokens(Struct, frozen=True):
    unique: int = 0


class _TreeDocument(Struct):
    nodes: list[_Node]
    terms: list[_Term]
    sessions: list[_Session]
    excluded: list[_Excluded] = []
    tokens: _Tokens = _Tokens()


class _Span(Struct):
    exchange_id: str
    start: int
    stop: int


class _TraceMetadata(Struct):
    spans: list[_Span]
    turn_rewards: dict[str, float] = {}
    scales: dict[str, float] = {}


class _Trace(Struct):
    prompt_ids: list[int]
    response_ids: list[int]
    response_logprobs: list[float] | None
    policy_versions: list[int]
    weight: float
    metadata: _TraceMetadata


class _TrajectoryMetadata(Struct):
    excluded: list[_Excluded] = []
    tokens: _Tokens = _Tokens()


class _Trajectory(Struct):
    traces: list[_Trace] = []
    metadata: _TrajectoryMetadata = field(default_factory=_TrajectoryMetadata)


class _Result(Struct):
    session_id: str
    reward: float | None
    reason: str | None
    trajectory: _Trajectory | None = None


class _GroupDocument(Struct):
    task_id: str
    cursor: int
    results: list[_Result]


class _Outcome(Struct):
    """A result without what it was made of."""

    session_id: str
    reward: float | None
    reason: str | None


class _Outcomes(Struct):
    task_id: str
    cursor: int
    results: list[_Outcome]


def of_tree(data: bytes, tree: dict[str, Any], index: int) -> Group:
    """`data` is the group as the feed gave it, and `tree` its `prefix_tree`. Sessions that aren't in the tree, since
    they ended before they began, say, are still members."""
    told = msgspec.json.decode(data, type=_Outcomes)
    document = msgspec.convert(tree, _TreeDocument)
    rewards = {session.session_id: session.turn_rewards for session in document.sessions}
    members = [
        Member(one.session_id, one.reward, one.reason, turn_rewards=rewards.get(one.session_id, {}))
        for one in told.results
    ]
    stretches = [
        _Stretch(
            term.session_id,
            term.exchange_id,
            term.start,
            term.logprobs,
            term.policy_versions,
            term.weight / (term.stop - term.start),
            term.scale,
            term.node,
        )
        for term in document.terms
    ]
    lengths = [len(node.ids) for node in document.nodes]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    parents = np.array([ROOT if node.parent is None else node.parent for node in document.nodes], np.int32)
    ids = np.array([token for node in document.nodes for token in node.ids], np.int32)
    group = Group(index, told.task_id, told.cursor, members, [], unique=document.tokens.unique)
    group.excluded.update(_excluded(document.excluded))
    return _built(group, [_Walk(ids, starts, parents, stretches)])


def of_traces(data: bytes, index: int) -> Group:
    """Of a group as the feed gave it: each trace is a tree of one path."""
    told = msgspec.json.decode(data, type=_GroupDocument)
    group = Group(index, told.task_id, told.cursor, [], [])
    walks = []
    for result in told.results:
        member = Member(result.session_id, result.reward, result.reason)
        group.members.append(member)
        if result.trajectory is None:
            continue
        group.excluded.update(_excluded(result.trajectory.metadata.excluded))
        group.unique += result.trajectory.metadata.tokens.unique
        for trace in result.trajectory.traces:
            member.turn_rewards |= trace.metadata.turn_rewards
            walks.append(_walk(result.session_id, trace))
    return _built(group, walks)


def _excluded(stretches: Iterable[_Excluded]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in stretches:
        found[one.reason] += one.stop - one.start
    return found


# From either form


class _Stretch(Struct):
    """Sampled tokens of one exchange that stand together; `start` counts from the node's first token."""

    session_id: str
    exchange_id: str
    start: int
    logprobs: list[float] | None
    versions: list[int]
    weight: float  # of each token
    scale: float | None
    node: int = 0


class _Walk(Struct):
    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    parents: NDArray[np.int32]
    stretches: list[_Stretch]


def _walk(session_id: str, trace: _Trace) -> _Walk:
    context = len(trace.prompt_ids)
    trained = sum(span.stop - span.start for span in trace.metadata.spans)
    stretches = [
        _Stretch(
            session_id,
            span.exchange_id,
            context + span.start,
            None if trace.response_logprobs is None else trace.response_logprobs[span.start : span.stop],
            trace.policy_versions[span.start : span.stop],
            trace.weight / trained,
            trace.metadata.scales.get(span.exchange_id),
        )
        for span in trace.metadata.spans
    ]
    ids = np.array([*trace.prompt_ids, *trace.response_ids], np.int32)
    return _Walk(ids, np.array([0, len(ids)], np.int64), np.array([ROOT], np.int32), stretches)


def _built(group: Group, walks: list[_Walk]) -> Group:
    """A token without anything before it is predicted by nothing, and those of whose sampling nobody knows the
    temperature can't be compared with anything: neither is trained."""
    places = {member.session_id: place for place, member in enumerate(group.members)}
    turns: dict[str, set[str]] = {name: set() for name in places}
    for walk in walks:
        for stretch in walk.stretches:
            if stretch.session_id not in places:
                raise PolarError(
                    f"The group {group.task_id} has tokens of {stretch.session_id}, which is none of its sessions."
                )
            turns[stretch.session_id].add(stretch.exchange_id)
    for member in group.members:
        member.turns = sorted(turns[member.session_id])  # exchanges are named by their time
    numbers = {name: number for member in group.members for number, name in enumerate(member.turns)}
    for walk in walks:
        part = _part(walk, group, places, numbers)
        if len(part.tree.tokens):
            group.parts.append(part)
    return group


def _part(walk: _Walk, group: Group, places: dict[str, int], numbers: dict[str, int]) -> Part:
    tokens: list[NDArray[np.int64]] = []
    scales: list[NDArray[np.float32]] = []
    columns: list[Columns] = []
    for stretch in walk.stretches:
        count = len(stretch.versions)
        if stretch.scale is None:
            group.excluded["sampling_unknown"] += count
            continue
        first = int(walk.starts[stretch.node]) + stretch.start
        skip = int(stretch.start == 0 and walk.parents[stretch.node] == ROOT)
        group.excluded["nothing_before"] += skip
        at = first + np.arange(skip, count, dtype=np.int64)
        count -= skip
        group.members[places[stretch.session_id]].tokens += count
        tokens.append(at)
        scales.append(np.full(count, stretch.scale, np.float32))
        columns.append(
            Columns(
                session=np.full(count, places[stretch.session_id], np.int64),
                turn=np.full(count, numbers[stretch.exchange_id], np.int64),
                behaviour=np.full(count, UNKNOWN)
                if stretch.logprobs is None
                else np.array(stretch.logprobs[skip:], np.float32),
                version=np.array(stretch.versions[skip:], np.int32),
                weight=np.full(count, stretch.weight),
            )
        )
    tree = Tree(
        walk.ids,
        walk.starts,
        walk.parents,
        np.concatenate(tokens) if tokens else np.empty(0, np.int64),
        np.concatenate(scales) if scales else np.empty(0, np.float32),
    )
    return Part(tree, Columns.joined(columns) if columns else _nothing())


def _nothing() -> Columns:
    whole = np.empty(0, np.int64)
    return Columns(whole, whole, np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float64))


# What is left of it


def only(part: Part, kept: Callable[[Columns], NDArray[np.bool_]]) -> Part | None:
    """What is needed for some of its entries: other branches are cut off, and a branch behind its last one."""
    wanted = kept(part.columns)
    if not wanted.any():
        return None
    tree, tokens = part.tree, part.tree.tokens[wanted]
    nodes = np.searchsorted(tree.starts, tokens, side="right") - 1
    ends = tree.starts[:-1].copy()  # how far each node is needed
    np.maximum.at(ends, nodes, tokens + 1)
    needed = ends > tree.starts[:-1]
    for node in range(len(tree.parents) - 1, -1, -1):  # parents stand before their children
        parent = int(tree.parents[node])
        if needed[node] and parent != ROOT:
            needed[parent] = True
            ends[parent] = tree.starts[parent + 1]
    lengths = np.where(needed, ends - tree.starts[:-1], 0)
    numbers = np.cumsum(needed) - 1
    starts = np.concatenate([[0], np.cumsum(lengths[needed])]).astype(np.int64)
    keeps = np.zeros(len(tree.ids), bool)
    for node in np.flatnonzero(needed).tolist():
        keeps[tree.starts[node] : ends[node]] = True
    moved = np.cumsum(keeps) - 1
    parents = tree.parents[needed]
    cut = Tree(
        tree.ids[keeps],
        starts,
        np.where(parents == ROOT, ROOT, numbers[parents]).astype(np.int32),
        moved[tokens].astype(np.int64),
        tree.temperature[wanted],
    )
    return Part(cut, part.columns[wanted])
