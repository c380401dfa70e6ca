"""The prefix tree: a line is the tree of one group, in the contract's form (`nodes`, `terms`, `sessions`, `excluded`).

Sessions of one task share a tree, so their common prompt stands in it once. A session of no task is a tree of its own.

Who divides: nobody; each term has the weight of its tokens in its session.

What is lost: roles and agents, which are the traces' matter.
"""

from typing import Any, ClassVar

from polar.export.base import Item, JsonLines, Need
from polar.trajectory import wire
from polar.trajectory.builders import prefix_tree
from polar.trajectory.types import Sampled


class Tree(JsonLines):
    name: ClassVar[str] = "tree"
    needs: ClassVar[frozenset[Need]] = frozenset(("tree",))

    def __init__(self) -> None:
        super().__init__()
        self._group: str | None = None
        self._sessions: list[Sampled] = []

    def feed(self, item: Item) -> bytes:
        done = b"" if item.group == self._group else self.finish()
        self._group = item.group
        self._sessions.append(item.sampled)
        return done

    def finish(self) -> bytes:
        if not self._sessions:
            return b""
        built: dict[str, Any] = {"task_id": self._group} | wire.tree(prefix_tree(self._sessions))
        self._sessions = []
        return self.write([built])
