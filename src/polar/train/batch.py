"""What a step trains on: the sessions of some groups, with an advantage for each of their tokens.

Group -> Trained (what is left of it, with advantages), or why nothing is -> Batch: the packed trees, and their columns
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
"""Why a group is left out: its sessions all earned the same, or fewer than two are there to be compared."""


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
    """Sessions with a token of a policy that is more than `most` steps old get the reason `stale`."""
    for part in group.trees:
        versions, places = np.unique(part.columns.version, return_inverse=True)
        late = np.array([lag_of_version(int(version)) > max_lag for version in versions], bool)[places]
        for number in np.unique(part.columns.session[late]).tolist():
            group.members[number].reason = group.members[number].reason or "stale"


def select_training_sessions(group: RolloutGroup, settings: GrpoSettings) -> TrainingGroup | DropReason:
    """Or why nothing of it is."""
    places = group.trainable_indices
    if len(places) < 2:
        return "too_few"
    graded = [group.members[place] for place in places]
    rewards = [member.reward for member in graded if member.reward is not None]
    turns = [[member.turn_rewards.get(turn, 0.0) for turn in member.turns] for member in graded]
    found = grpo.compute_advantages(rewards, turns, baseline=settings.advantage, scale=settings.scale)
    if settings.filter and not any(row.any() for row in found):
        return "no_signal"
    parts = [
        part
        for whole in group.trees
        if (part := prune_tree(whole, lambda columns: np.isin(columns.session, places))) is not None
    ]
    if not parts:
        return "too_few"
    columns = TokenColumns.concatenate([part.columns for part in parts])
    table = np.zeros((len(group.members), max(len(row) for row in found)))
    for place, row in zip(places, found, strict=True):
        table[place, : len(row)] = row
    return TrainingGroup(
        index=group.index,
        sessions=[member.session_id for member in graded],
        trees=[part.tree for part in parts],
        columns=columns,
        advantage=table[columns.session, columns.turn],
    )


class Batch(Struct):
    """Columns have an entry for each trained token of the groups, in their order."""

    groups: list[TrainingGroup]
    packed: PackedTrees
    columns: TokenColumns
    advantage: NDArray[np.float32]
    weight: NDArray[np.float32]  # of a token in the loss; all of them are 1 together

    @classmethod
    def from_groups(cls, groups: Sequence[TrainingGroup], normalize: Literal["session", "token"]) -> "Batch":
        """Sessions count alike, or tokens do. A session without trained tokens counts, too: it had its say in the
        others' advantages."""
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
