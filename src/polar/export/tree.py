"""The prefix tree: a line is the tree of one group, in the contract's form (`nodes`, `terms`, `sessions`, `excluded`).

Sessions of one task share a tree, so their common prompt stands in it once. A session of no task is a tree of its own.

Who divides: nobody; each term has the weight of its tokens in its session.

What is lost: roles and agents, which are the traces' matter.
"""

from typing import Any, ClassVar

from polar.export.base import ExportNeed, JsonLines, SessionItem
from polar.records import wire
from polar.records.session import HeldBackError
from polar.records.trajectory import SessionPaths
from polar.trajectory.builders import prefix_tree
from polar.trajectory.checker import SessionCheck


class TreeExporter(JsonLines):
    name: ClassVar[str] = "tree"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("tree",))

    def __init__(self) -> None:
        super().__init__()
        self._group_id: str | None = None
        self._sessions: list[SessionPaths] = []
        self._checks: list[SessionCheck] = []

    def feed(self, item: SessionItem) -> bytes:
        done = b"" if item.group_id == self._group_id else self.finish()
        self._group_id = item.group_id
        self._sessions.append(item.session_paths)
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
            except HeldBackError as held:
                self.left_out[str(held)] += 1
                return b""
        built: dict[str, Any] = {"task_id": self._group_id} | wire.tree_to_dict(tree)
        return self.encode_rows([built])
