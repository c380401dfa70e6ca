"""The prefix tree: a line is the tree of one group, in the contract's form (`nodes`, `terms`, `sessions`, `excluded`).

Sessions of one task share a tree, so their common prompt stands in it once. A session of no task is a tree of its own.

Who divides: nobody; each term has the weight of its tokens in its session.

What is lost: roles and agents, which are the traces' matter.
"""

from typing import Any, ClassVar

from polar.export.base import Item, JsonLines, Need
from polar.trajectory import wire
from polar.trajectory.builders import prefix_tree
from polar.trajectory.checker import HeldBack, SessionCheck
from polar.trajectory.types import Sampled


class Tree(JsonLines):
    name: ClassVar[str] = "tree"
    needs: ClassVar[frozenset[Need]] = frozenset(("tree",))

    def __init__(self) -> None:
        super().__init__()
        self._group: str | None = None
        self._sessions: list[Sampled] = []
        self._checks: list[SessionCheck] = []

    def feed(self, item: Item) -> bytes:
        done = b"" if item.group == self._group else self.finish()
        self._group = item.group
        self._sessions.append(item.sampled)
        if item.check is not None:
            self._checks.append(item.check)
        return done

    def finish(self) -> bytes:
        if not self._sessions:
            return b""
        tree, checks = prefix_tree(self._sessions), self._checks
        self._sessions, self._checks = [], []
        if checks:
            try:
                checks[0].checker.check_tree(checks, tree)
            except HeldBack as held:
                self.left_out[str(held)] += 1
                return b""
        built: dict[str, Any] = {"task_id": self._group} | wire.tree(tree)
        return self.write([built])
