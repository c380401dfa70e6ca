"""A group as it comes from the rollout service: all sessions of a task, as trees or traces, with what trains in them.

    a group's tree (prefix_tree), or its sessions' traces (any other builder) -> Group: trees with columns

A column has one entry for each trained token of each sampling; nothing of it depends on how a session was split.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.errors import PolarError
from polar.records import wire
from polar.records.exchange import Logprobs
from polar.records.result import GroupResult
from polar.records.session import HOLD_REASONS
from polar.records.spans import ExcludedSpan
from polar.records.trajectory import ROOT, Ids, Trace, TreeTrajectory
from polar.train.packing import TokenTree
from polar.trajectory.checker import SessionChecker, is_in_checked_share
from polar.trajectory.document_check import check_received, check_received_tree, find_hold_reason
from polar.trajectory.verify import Problem

CHECK_ALL = SessionChecker()
"""Checks every session that comes."""
UNKNOWN_LOGPROB = np.float32(np.nan)


class GroupMember(Struct):
    """A session of the group."""

    session_id: str
    reward: float | None
    reason: str | None  # why it is not trained: the service's, or the trainer's own
    turns: list[str] = field(default_factory=list)  # its exchanges that train, in the order in which they were made
    turn_rewards: dict[str, float] = field(default_factory=dict)
    trained_tokens: int = 0  # that train
    suspicious: bool = False  # proven to have tampered with its grading


class TokenColumns(Struct):
    """Of the trained tokens. `session` and `turn` count through the group's members and a member's turns."""

    session: NDArray[np.int64]
    turn: NDArray[np.int64]
    behavior_logprobs: NDArray[np.float32]  # the engine's log-probability; UNKNOWN where it gave none
    version: NDArray[np.int32]
    weight: NDArray[np.float64]  # 1 / the session's trainable tokens

    def __getitem__(self, kept: NDArray[Any]) -> "TokenColumns":
        return TokenColumns(*(getattr(self, name)[kept] for name in self.__struct_fields__))

    @classmethod
    def concatenate(cls, parts: Sequence["TokenColumns"]) -> "TokenColumns":
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__struct_fields__))


class AnnotatedTree(Struct):
    """A tree and its columns, which have an entry for each of `tree.tokens`."""

    tree: TokenTree
    columns: TokenColumns


class RolloutGroup(Struct):
    index: int  # its place in the order of training
    task_id: str
    cursor: int
    members: list[GroupMember]
    trees: list[AnnotatedTree]
    excluded_tokens: Counter[str] = field(default_factory=Counter)  # sampled tokens that don't train, by reason
    unique: int = 0  # tokens of its tree
    verified_sessions: int = 0  # sessions that were checked

    @property
    def trainable_indices(self) -> list[int]:
        """Members that are trained on."""
        return [
            number for number, member in enumerate(self.members) if member.reason is None and member.reward is not None
        ]


def build_group_from_tree(
    data: bytes, tree: dict[str, Any], index: int, checker: SessionChecker = CHECK_ALL
) -> RolloutGroup:
    """`data` is the group as the feed gave it, and `tree` its `prefix_tree`. Sessions that aren't in the tree, since
    they ended before they began, say, are still members. Those that fail the check are members with that reason."""
    document = GroupResult.model_validate_json(data)
    received = wire.tree_from_dict(tree)
    in_tree = {session.session_id: session for session in received.sessions}
    members = []
    for one in document.results:
        member = GroupMember(one.session_id, one.reward, one.reason, suspicious=one.suspicious)
        if (there := in_tree.get(one.session_id)) is not None:
            member.turn_rewards = there.turn_rewards
            if there.reason in HOLD_REASONS:  # the service held it back when it made the tree
                member.reward, member.reason = None, there.reason
        members.append(member)
    group = RolloutGroup(index, document.task_id, document.cursor, members, [], unique=received.tokens.unique)
    group.excluded_tokens.update(_count_excluded(received.excluded))
    problems = _make_problem_finder(received)
    for member in members:
        _hold_back_if_invalid(member, group, checker, partial(problems, member.session_id))
    held = {member.session_id for member in members if member.reason in HOLD_REASONS}
    stretches = [
        _SampledSpan(
            term.session_id,
            term.exchange_id,
            term.start,
            term.logprobs,
            term.policy_versions,
            term.weight / (term.stop - term.start),
            term.scale,
            term.node,
        )
        for term in received.terms
        if term.session_id not in held
    ]
    return _build_group(group, [_FlatTree(received.ids, received.starts, received.parents, stretches)])


def build_group_from_traces(data: bytes, index: int, checker: SessionChecker = CHECK_ALL) -> RolloutGroup:
    """Of a group as the feed gave it: each trace is a tree of one path."""
    document = GroupResult.model_validate_json(data)
    group = RolloutGroup(index, document.task_id, document.cursor, [], [])
    walks = []
    for result in document.results:
        member = GroupMember(result.session_id, result.reward, result.reason, suspicious=result.suspicious)
        group.members.append(member)
        trajectory = wire.trajectory_from_result(result)
        group.excluded_tokens.update(_count_excluded(trajectory.excluded))
        group.unique += trajectory.tokens.unique
        _hold_back_if_invalid(member, group, checker, partial(check_received, trajectory))
        if member.reason in HOLD_REASONS:
            continue
        for trace in trajectory.traces:
            member.turn_rewards |= trace.turn_rewards
            walks.append(_flatten_trace(trace))
    return _build_group(group, walks)


def _hold_back_if_invalid(
    member: GroupMember, group: RolloutGroup, checker: SessionChecker, find_problems: Callable[[], Sequence[Problem]]
) -> None:
    """Checks a session that would be trained on."""
    if member.reason is not None:
        return
    group.verified_sessions += is_in_checked_share(member.session_id, checker.share)
    reason = find_hold_reason(checker, member.session_id, find_problems)
    if reason is not None:
        member.reward, member.reason = None, reason


def _make_problem_finder(tree: TreeTrajectory) -> Callable[[str], list[Problem]]:
    """Looks for problems when they are first needed. What is wrong with a whole tree counts for every session."""
    found: list[Problem] | None = None

    def problems(session_id: str) -> list[Problem]:
        nonlocal found
        found = check_received_tree(tree) if found is None else found
        return [one for one in found if one.session_id in ("", session_id)]

    return problems


def _count_excluded(stretches: Iterable[ExcludedSpan]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in stretches:
        found[one.reason] += one.stop - one.start
    return found


# From either form


class _SampledSpan(Struct):
    """Sampled tokens of one exchange that stand together; `start` counts from the node's first token."""

    session_id: str
    exchange_id: str
    start: int
    logprobs: Logprobs | None
    versions: Ids
    weight: float  # of each token
    scale: float | None
    node: int = 0


class _FlatTree(Struct):
    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    parents: NDArray[np.int32]
    sampled_spans: list[_SampledSpan]


def _flatten_trace(trace: Trace) -> _FlatTree:
    context = len(trace.prompt_ids)
    trained = sum(span.stop - span.start for span in trace.spans)
    stretches = [
        _SampledSpan(
            trace.session_id,
            span.exchange_id,
            context + span.start,
            None if trace.logprobs is None else trace.logprobs[span.start : span.stop],
            trace.policy_versions[span.start : span.stop],
            trace.weight / trained,
            trace.scales.get(span.exchange_id),
        )
        for span in trace.spans
    ]
    ids = np.concatenate((trace.prompt_ids, trace.response_ids))
    return _FlatTree(ids, np.array([0, len(ids)], np.int64), np.array([ROOT], np.int32), stretches)


def _build_group(group: RolloutGroup, walks: list[_FlatTree]) -> RolloutGroup:
    """A token without anything before it is predicted by nothing, and those that were sampled at an unknown
    temperature can't be compared with anything: neither is trained."""
    places = {member.session_id: place for place, member in enumerate(group.members)}
    turns: dict[str, set[str]] = {name: set() for name in places}
    for walk in walks:
        for stretch in walk.sampled_spans:
            if stretch.session_id not in places:
                raise PolarError(
                    f"The group {group.task_id} has tokens of {stretch.session_id}, which is none of its sessions."
                )
            turns[stretch.session_id].add(stretch.exchange_id)
    for member in group.members:
        member.turns = sorted(turns[member.session_id])  # exchanges are named by their time
    numbers = {name: number for member in group.members for number, name in enumerate(member.turns)}
    for walk in walks:
        part = _annotate_tree(walk, group, places, numbers)
        if len(part.tree.tokens):
            group.trees.append(part)
    return group


def _annotate_tree(
    walk: _FlatTree, group: RolloutGroup, places: dict[str, int], numbers: dict[str, int]
) -> AnnotatedTree:
    tokens: list[NDArray[np.int64]] = []
    scales: list[NDArray[np.float32]] = []
    columns: list[TokenColumns] = []
    for stretch in walk.sampled_spans:
        count = len(stretch.versions)
        if stretch.scale is None:
            group.excluded_tokens["sampling_unknown"] += count
            continue
        first = int(walk.starts[stretch.node]) + stretch.start
        skip = int(stretch.start == 0 and walk.parents[stretch.node] == ROOT)
        group.excluded_tokens["nothing_before"] += skip
        at = first + np.arange(skip, count, dtype=np.int64)
        count -= skip
        group.members[places[stretch.session_id]].trained_tokens += count
        tokens.append(at)
        scales.append(np.full(count, stretch.scale, np.float32))
        columns.append(
            TokenColumns(
                session=np.full(count, places[stretch.session_id], np.int64),
                turn=np.full(count, numbers[stretch.exchange_id], np.int64),
                behavior_logprobs=np.full(count, UNKNOWN_LOGPROB)
                if stretch.logprobs is None
                else np.array(stretch.logprobs[skip:], np.float32),
                version=np.array(stretch.versions[skip:], np.int32),
                weight=np.full(count, stretch.weight),
            )
        )
    tree = TokenTree(
        walk.ids,
        walk.starts,
        walk.parents,
        np.concatenate(tokens) if tokens else np.empty(0, np.int64),
        np.concatenate(scales) if scales else np.empty(0, np.float32),
    )
    return AnnotatedTree(tree, TokenColumns.concatenate(columns) if columns else _make_empty_columns())


def _make_empty_columns() -> TokenColumns:
    whole = np.empty(0, np.int64)
    return TokenColumns(whole, whole, np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float64))


# What is left of it


def prune_tree(part: AnnotatedTree, select: Callable[[TokenColumns], NDArray[np.bool_]]) -> AnnotatedTree | None:
    """What is needed for some of its entries: other branches are cut off, and a branch behind its last one."""
    wanted = select(part.columns)
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
    cut = TokenTree(
        tree.ids[keeps],
        starts,
        np.where(parents == ROOT, ROOT, numbers[parents]).astype(np.int32),
        moved[tokens].astype(np.int64),
        tree.temperature[wanted],
    )
    return AnnotatedTree(cut, part.columns[wanted])
