"""The training data of a step: the sessions of some groups, with an advantage for each of their tokens.

RolloutGroup -> TrainingGroup (or the reason why the group is dropped) -> Batch: the packed trees, and their columns
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.train import grpo
from polar.train.groups import RolloutGroup, TokenColumns, prune_tree
from polar.train.packing import PackedTrees, TokenTree, pack_trees
from polar.train.settings import GrpoSettings

DropReason = Literal["no_signal", "too_few"]
"""Why a group is dropped: its sessions all earned the same, or fewer than two can be compared."""


class TrainingGroup(Struct):
    """A group's sessions that are trained on. Columns have an entry for each trained token."""

    index: int
    sessions: list[str]
    trees: list[TokenTree]
    columns: TokenColumns
    advantage: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.advantage)


def mark_stale_sessions(group: RolloutGroup, lag_of_version: Callable[[int], int], max_lag: int) -> None:
    """Gives sessions with a token whose policy is more than `max_lag` steps old the reason `stale`."""
    for annotated_tree in group.trees:
        versions, version_indices = np.unique(annotated_tree.columns.version, return_inverse=True)
        is_stale = np.array([lag_of_version(int(version)) > max_lag for version in versions], bool)[version_indices]
        for member_index in np.unique(annotated_tree.columns.session[is_stale]).tolist():
            group.members[member_index].reason = group.members[member_index].reason or "stale"


def select_training_sessions(group: RolloutGroup, settings: GrpoSettings) -> TrainingGroup | DropReason:
    """The group's sessions that are trained on, with their advantages, or the reason why the group is dropped."""
    member_indices = group.trainable_indices
    if len(member_indices) < 2:
        return "too_few"
    graded = [group.members[member_index] for member_index in member_indices]
    rewards = [member.reward for member in graded if member.reward is not None]
    turns = [[member.turn_rewards.get(turn, 0.0) for turn in member.turns] for member in graded]
    advantages = grpo.compute_advantages(rewards, turns, baseline=settings.advantage, scale=settings.scale)
    if settings.filter and not any(row.any() for row in advantages):
        return "no_signal"
    pruned_trees = [
        pruned
        for annotated_tree in group.trees
        if (pruned := prune_tree(annotated_tree, np.isin(annotated_tree.columns.session, member_indices))) is not None
    ]
    if not pruned_trees:
        return "too_few"
    columns = TokenColumns.concatenate([pruned.columns for pruned in pruned_trees])
    table = np.zeros((len(group.members), max(len(row) for row in advantages)))
    for member_index, row in zip(member_indices, advantages, strict=True):
        table[member_index, : len(row)] = row
    return TrainingGroup(
        index=group.index,
        sessions=[member.session_id for member in graded],
        trees=[pruned.tree for pruned in pruned_trees],
        columns=columns,
        advantage=table[columns.session, columns.turn],
    )


class Batch(Struct):
    """Columns have an entry for each trained token of the groups, in their order."""

    groups: list[TrainingGroup]
    packed: PackedTrees
    columns: TokenColumns
    advantage: NDArray[np.float32]
    weight: NDArray[np.float32]  # of each token in the loss; they add up to 1

    @classmethod
    def from_groups(cls, groups: Sequence[TrainingGroup], normalize: Literal["session", "token"]) -> "Batch":
        """With `session`, sessions have equal weight, including those without trained tokens, which affected the
        others' advantages. With `token`, tokens have equal weight."""
        columns = TokenColumns.concatenate([group.columns for group in groups])
        if normalize == "session":
            weight = columns.weight / sum(len(group.sessions) for group in groups)
        else:
            weight = np.full(len(columns.weight), 1 / len(columns.weight))
        return cls(
            groups=list(groups),
            packed=pack_trees([tree for group in groups for tree in group.trees]),
            columns=columns,
            advantage=np.concatenate([group.advantage for group in groups]).astype(np.float32),
            weight=weight.astype(np.float32),
        )

    def __len__(self) -> int:
        return len(self.advantage)
