"""Groups as the rollout service tells them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from polar.records import wire
from polar.records.trajectory import SessionPaths
from polar.train import groups
from polar.train.groups import RolloutGroup
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree

_TRACES = {"per_request": per_request, "prefix_merging": prefix_merging}
BUILDERS = ("prefix_tree", *_TRACES)


def feed(sessions: Sequence[SessionPaths], builder: str, task_id: str = "t", cursor: int = 1) -> bytes:
    """An entry of the feed of groups."""
    results = [
        {
            "session_id": session.session_id,
            "task_id": task_id,
            "status": "COMPLETED" if session.reason is None else "ERROR",
            "reward": session.reward,
            "reason": session.reason,
            "metadata": {"suspicious": session.suspicious},
            "trajectory": wire.trajectory_to_dict(_TRACES.get(builder, prefix_merging)(session)),
        }
        for session in sessions
    ]
    counts = {"asked": len(results), "usable": len(results), "cancelled": 0}
    group = {"task_id": task_id, "status": "completed", "cursor": cursor, **counts, "results": results}
    return msgspec.json.encode(group)


def tree(sessions: Sequence[SessionPaths]) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(wire.tree_to_dict(prefix_tree(sessions))))
    return document


def group(sessions: Sequence[SessionPaths], builder: str = "prefix_tree", index: int = 0) -> RolloutGroup:
    data = feed(sessions, builder)
    return (
        groups.build_group_from_tree(data, tree(sessions), index)
        if builder == "prefix_tree"
        else groups.build_group_from_traces(data, index)
    )
