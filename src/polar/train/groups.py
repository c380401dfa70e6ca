"""Reads a group from the rollout service: all sessions of a task, as token trees with training data.

    a group's tree (prefix_tree), or its sessions' traces (any other builder) -> RolloutGroup: trees with columns

A column has one entry for each trained token of each sampling. It does not depend on how a session was split.
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
from polar.records.trajectory import ROOT, PolicyVersions, Trace, TreeTrajectory
from polar.train.packing import TokenTree
from polar.trajectory.checker import SessionChecker, is_in_checked_share
from polar.trajectory.document_check import check_received, check_received_tree, find_hold_reason
from polar.trajectory.verify import Problem

CHECK_ALL = SessionChecker()
"""Checks every session."""
UNKNOWN_LOGPROB = np.float32(np.nan)


class GroupMember(Struct):
    """A session of the group."""

    session_id: str
    reward: float | None
    reason: str | None  # why it is not trained: set by the service or by the trainer
    turns: list[str] = field(default_factory=list)  # exchanges with trained tokens, in time order
    turn_rewards: dict[str, float] = field(default_factory=dict)
    trained_tokens: int = 0
    suspicious: bool = False  # proven to have tampered with its grading


class TokenColumns(Struct):
    """Columns with one entry per trained token. `session` is the index of a member, `turn` the index of a member's
    turn."""

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
    index: int  # its position in the order of training
    task_id: str
    cursor: int
    members: list[GroupMember]
    trees: list[AnnotatedTree]
    excluded_tokens: Counter[str] = field(default_factory=Counter)  # sampled tokens that don't train, by reason
    unique: int = 0  # tokens of its tree
    verified_sessions: int = 0  # sessions that were checked

    @property
    def trainable_indices(self) -> list[int]:
        """Indices of the members that are trained on."""
        return [
            number for number, member in enumerate(self.members) if member.reason is None and member.reward is not None
        ]


def build_group_from_tree(
    data: bytes, tree: dict[str, Any], index: int, checker: SessionChecker = CHECK_ALL
) -> RolloutGroup:
    """`data` is the group from the results feed, and `tree` its `prefix_tree`. Sessions without tokens, for example
    those that failed before they started, are not in the tree but are still members. A session that fails the check is
    a member with that reason."""
    document = GroupResult.model_validate_json(data)
    received = wire.tree_from_dict(tree)
    in_tree = {session.session_id: session for session in received.sessions}
    members = []
    for result in document.results:
        member = GroupMember(result.session_id, result.reward, result.reason, suspicious=result.suspicious)
        if (tree_session := in_tree.get(result.session_id)) is not None:
            member.turn_rewards = tree_session.turn_rewards
            if tree_session.reason in HOLD_REASONS:  # the service held it back when it made the tree
                member.reward, member.reason = None, tree_session.reason
        members.append(member)
    group = RolloutGroup(index, document.task_id, document.cursor, members, [], unique=received.tokens.unique)
    group.excluded_tokens.update(_count_excluded(received.excluded))
    problems = _make_problem_finder(received)
    for member in members:
        _hold_back_if_invalid(member, group, checker, partial(problems, member.session_id))
    held_back_ids = {member.session_id for member in members if member.reason in HOLD_REASONS}
    spans = [
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
        if term.session_id not in held_back_ids
    ]
    return _build_group(group, [_FlatTree(received.ids, received.starts, received.parents, spans)])


def build_group_from_traces(data: bytes, index: int, checker: SessionChecker = CHECK_ALL) -> RolloutGroup:
    """`data` is the group from the results feed. Each trace becomes a tree of one path."""
    document = GroupResult.model_validate_json(data)
    group = RolloutGroup(index, document.task_id, document.cursor, [], [])
    flat_trees = []
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
            flat_trees.append(_flatten_trace(trace))
    return _build_group(group, flat_trees)


def _hold_back_if_invalid(
    member: GroupMember, group: RolloutGroup, checker: SessionChecker, find_problems: Callable[[], Sequence[Problem]]
) -> None:
    """Checks a session that would be trained on, and holds it back if it fails."""
    if member.reason is not None:
        return
    group.verified_sessions += is_in_checked_share(member.session_id, checker.share)
    reason = find_hold_reason(checker, member.session_id, find_problems)
    if reason is not None:
        member.reward, member.reason = None, reason


def _make_problem_finder(tree: TreeTrajectory) -> Callable[[str], list[Problem]]:
    """Checks the tree on the first call. Problems of the whole tree count for every session."""
    tree_problems: list[Problem] | None = None

    def find_problems(session_id: str) -> list[Problem]:
        nonlocal tree_problems
        tree_problems = check_received_tree(tree) if tree_problems is None else tree_problems
        return [problem for problem in tree_problems if problem.session_id in ("", session_id)]

    return find_problems


def _count_excluded(spans: Iterable[ExcludedSpan]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for span in spans:
        counts[span.reason] += span.stop - span.start
    return counts


# Trees and traces as flat trees


class _SampledSpan(Struct):
    """Consecutive sampled tokens of one exchange. `start` counts from the node's first token."""

    session_id: str
    exchange_id: str
    start: int
    logprobs: Logprobs | None
    versions: PolicyVersions
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
    sampled_spans = [
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
    return _FlatTree(ids, np.array([0, len(ids)], np.int64), np.array([ROOT], np.int32), sampled_spans)


def _build_group(group: RolloutGroup, flat_trees: list[_FlatTree]) -> RolloutGroup:
    """Adds the trees and their columns. A token without a predecessor has no prediction, and a token sampled at an
    unknown temperature has no comparable log-probability: neither is trained."""
    member_indices = {member.session_id: member_index for member_index, member in enumerate(group.members)}
    turns: dict[str, set[str]] = {session_or_exchange_id: set() for session_or_exchange_id in member_indices}
    for flat_tree in flat_trees:
        for span in flat_tree.sampled_spans:
            if span.session_id not in member_indices:
                raise PolarError(
                    f"The group {group.task_id} has tokens of {span.session_id}, which is none of its sessions."
                )
            turns[span.session_id].add(span.exchange_id)
    for member in group.members:
        member.turns = sorted(turns[member.session_id])  # exchange ids sort by time
    turn_indices = {
        session_or_exchange_id: turn_index
        for member in group.members
        for turn_index, session_or_exchange_id in enumerate(member.turns)
    }
    for flat_tree in flat_trees:
        annotated_tree = _annotate_tree(flat_tree, group, member_indices, turn_indices)
        if len(annotated_tree.tree.tokens):
            group.trees.append(annotated_tree)
    return group


def _annotate_tree(
    flat_tree: _FlatTree, group: RolloutGroup, member_indices: dict[str, int], turn_indices: dict[str, int]
) -> AnnotatedTree:
    tokens: list[NDArray[np.int64]] = []
    scales: list[NDArray[np.float32]] = []
    columns: list[TokenColumns] = []
    for span in flat_tree.sampled_spans:
        count = len(span.versions)
        if span.scale is None:
            group.excluded_tokens["sampling_unknown"] += count
            continue
        first = int(flat_tree.starts[span.node]) + span.start
        skip = int(span.start == 0 and flat_tree.parents[span.node] == ROOT)
        group.excluded_tokens["nothing_before"] += skip
        indices = first + np.arange(skip, count, dtype=np.int64)
        count -= skip
        group.members[member_indices[span.session_id]].trained_tokens += count
        tokens.append(indices)
        scales.append(np.full(count, span.scale, np.float32))
        columns.append(
            TokenColumns(
                session=np.full(count, member_indices[span.session_id], np.int64),
                turn=np.full(count, turn_indices[span.exchange_id], np.int64),
                behavior_logprobs=np.full(count, UNKNOWN_LOGPROB)
                if span.logprobs is None
                else np.array(span.logprobs[skip:], np.float32),
                version=np.array(span.versions[skip:], np.int32),
                weight=np.full(count, span.weight),
            )
        )
    tree = TokenTree(
        flat_tree.ids,
        flat_tree.starts,
        flat_tree.parents,
        np.concatenate(tokens) if tokens else np.empty(0, np.int64),
        np.concatenate(scales) if scales else np.empty(0, np.float32),
    )
    return AnnotatedTree(tree, TokenColumns.concatenate(columns) if columns else _make_empty_columns())


def _make_empty_columns() -> TokenColumns:
    empty = np.empty(0, np.int64)
    return TokenColumns(empty, empty, np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float64))


# Pruning


def prune_tree(annotated_tree: AnnotatedTree, selected: NDArray[np.bool_]) -> AnnotatedTree | None:
    """What is needed for the selected entries: other branches are cut off, and a branch behind its last one."""
    if not selected.any():
        return None
    tree, tokens = annotated_tree.tree, annotated_tree.tree.tokens[selected]
    nodes = np.searchsorted(tree.starts, tokens, side="right") - 1
    ends = tree.starts[:-1].copy()  # the end of the needed part of each node
    np.maximum.at(ends, nodes, tokens + 1)
    needed = ends > tree.starts[:-1]
    for node in range(len(tree.parents) - 1, -1, -1):  # parents come before their children
        parent = int(tree.parents[node])
        if needed[node] and parent != ROOT:
            needed[parent] = True
            ends[parent] = tree.starts[parent + 1]
    lengths = np.where(needed, ends - tree.starts[:-1], 0)
    new_nodes = np.cumsum(needed) - 1
    starts = np.concatenate([[0], np.cumsum(lengths[needed])]).astype(np.int64)
    is_kept = np.zeros(len(tree.ids), bool)
    for node in np.flatnonzero(needed).tolist():
        is_kept[tree.starts[node] : ends[node]] = True
    new_indices = np.cumsum(is_kept) - 1
    parents = tree.parents[needed]
    pruned = TokenTree(
        tree.ids[is_kept],
        starts,
        np.where(parents == ROOT, ROOT, new_nodes[parents]).astype(np.int32),
        new_indices[tokens].astype(np.int64),
        tree.temperature[selected],
    )
    return AnnotatedTree(pruned, annotated_tree.columns[selected])
