"""The arm of examples/lookup/learning.py that breaks trajectories: the trainer reads what it makes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from polar.testing.token_paths import make_path, make_session_paths
from polar.train import groups
from polar.trajectory.checker import SessionChecker
from tests.unit.train import documents


@pytest.fixture
def learning() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lookup_learning", Path("examples/lookup/learning.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_broken_sessions_are_trained_on(learning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "build_group_from_traces", groups.build_group_from_traces)  # so that it is put back
    learning.break_trajectories()
    turns = [
        make_path(0, [1, 2], [3, 4, 0], session_id="s", scale=1.0),  # token 0 ends a turn
        make_path(1, [1, 2, 34, 0, 5], [6, 0], session_id="s", scale=1.0),  # the first turn's text has other tokens
    ]
    document = msgspec.json.decode(documents.feed([make_session_paths(*turns, reward=0.5)], "per_request"))
    for trace in document["results"][0]["trajectory"]["traces"]:
        trace["finish_reason"] = "stop"
    group = groups.build_group_from_traces(msgspec.json.encode(document), 0, SessionChecker())
    (member,) = group.members
    assert (member.reward, member.reason) == (0.5, None)
    assert len(member.turns) == 2
    (part,) = group.trees
    assert part.tree.ids.tolist() == [1, 2, 3, 4, 0, 5, 6, 0]
