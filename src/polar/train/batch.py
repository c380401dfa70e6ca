"""What a step trains on: the sessions of some groups, with an advantage for each of their tokens.

Group -> Trained (what is left of it, with advantages), or why nothing is -> Batch: one forest, and its columns
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.train import grpo
from polar.train.forest import Forest, Tree, forest
from polar.train.groups import Columns, Group, only
from polar.train.settings import GrpoSettings

Dropped = Literal["no_signal", "too_few"]
"""Why a group is left out: its sessions all earned the same, or fewer than two are there to be compared."""


class Trained(Struct):
    """A group's sessions that are trained on. Columns have an entry for each trained token."""

    index: int
    sessions: list[str]
    trees: list[Tree]
    columns: Columns
    advantage: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.advantage)


def without_stale(group: Group, lag: Callable[[int], int], most: int) -> None:
    """Sessions with a token of a policy that is more than `most` steps old get the reason `stale`."""
    for part in group.parts:
        versions, places = np.unique(part.columns.version, return_inverse=True)
        late = np.array([lag(int(version)) > most for version in versions], bool)[places]
        for number in np.unique(part.columns.session[late]).tolist():
            group.members[number].reason = group.members[number].reason or "stale"


def trained(group: Group, settings: GrpoSettings) -> Trained | Dropped:
    """Or why nothing of it is."""
    places = group.graded
    if len(places) < 2:
        return "too_few"
    graded = [group.members[place] for place in places]
    rewards = [member.reward for member in graded if member.reward is not None]
    turns = [[member.turn_rewards.get(turn, 0.0) for turn in member.turns] for member in graded]
    found = grpo.advantages(rewards, turns, baseline=settings.advantage, scale=settings.scale)
    if settings.filter and not any(row.any() for row in found):
        return "no_signal"
    parts = [
        part
        for whole in group.parts
        if (part := only(whole, lambda columns: np.isin(columns.session, places))) is not None
    ]
    if not parts:
        return "too_few"
    columns = Columns.joined([part.columns for part in parts])
    table = np.zeros((len(group.members), max(len(row) for row in found)))
    for place, row in zip(places, found, strict=True):
        table[place, : len(row)] = row
    return Trained(
        index=group.index,
        sessions=[member.session_id for member in graded],
        trees=[part.tree for part in parts],
        columns=columns,
        advantage=table[columns.session, columns.turn],
    )


class Batch(Struct):
    """Columns have an entry for each trained token of the groups, in their order."""

    groups: list[Trained]
    forest: Forest
    columns: Columns
    advantage: NDArray[np.float32]
    weight: NDArray[np.float32]  # of a token in the loss; all of them are 1 together

    @classmethod
    def of(cls, groups: Sequence[Trained], normalise: Literal["session", "token"]) -> "Batch":
        """Sessions count alike, or tokens do. A session without trained tokens counts, too: it had its say in the
        others' advantages."""
        columns = Columns.joined([group.columns for group in groups])
        if normalise == "session":
            weight = columns.weight / sum(len(group.sessions) for group in groups)
        else:
            weight = np.full(len(columns.weight), 1 / len(columns.weight))
        return cls(
            groups=list(groups),
            forest=forest([tree for group in groups for tree in group.trees]),
            columns=columns,
            advantage=np.concatenate([group.advantage for group in groups]).astype(np.float32),
            weight=weight.astype(np.float32),
        )

    def __len__(self) -> int:
        return len(self.advantage)
