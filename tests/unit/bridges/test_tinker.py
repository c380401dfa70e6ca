"""What Tinker's sums are made of; its own types are in tests/trainers/test_tinker.py."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polar.bridges import tinker
from polar.bridges.advantages import compute_session_advantages
from polar.bridges.rollouts import SessionGroup
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import make_session_item
from polar.testing.token_paths import make_path
from tests.trainers.splitting import split


def group(*rewards: float) -> SessionGroup:
    """Sessions of 3, 6, 9, ... trainable tokens."""
    items = [
        make_session_item(
            SessionPaths(f"s{n}", [make_path(k, [9] * k + [k], [1, 2, 3]) for k in range(n + 1)], reward), task_id="t"
        )
        for n, reward in enumerate(rewards)
    ]
    return SessionGroup("t", "t", len(rewards), items, [], Counter({"timeout": 1}))


def totals(monkeypatch: pytest.MonkeyPatch, groups: list[SessionGroup], **options: Any) -> dict[str, float]:
    """The advantages of each session, added up over its tokens."""
    monkeypatch.setattr(tinker, "to_datum", lambda row, advantage: (row["polar"], advantage))
    found: Counter[str] = Counter()
    for facts, advantage in tinker.build_batch(groups, **options).datums:
        found[facts["session_id"]] += advantage * sum(stop - start for start, stop in facts["spans"])
    return dict(found)


@pytest.mark.parametrize("change", [lambda one: one, split])
def test_sessions_count_the_same(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """However long they are, and however many traces they have; or, if so asked, tokens do."""
    one = group(1.0, 0.0, 0.5)
    one.items = [change(each) for each in one.items]
    by_session = totals(monkeypatch, [one])
    assert by_session == pytest.approx({"s0": 1 / 3, "s1": -1 / 3, "s2": 0.0}, abs=1e-5)
    by_token = totals(monkeypatch, [one], per_token=True)
    assert by_token == pytest.approx({"s0": 3 / 18, "s1": -6 / 18, "s2": 0.0}, abs=1e-5)


def test_what_is_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = group(1.0, 0.0)
    trace = one.items[0].trajectory.traces[0]
    trace.prompt_ids = np.zeros(0, np.int32)
    monkeypatch.setattr(tinker, "to_datum", lambda row, advantage: row)
    batch = tinker.build_batch([one])
    assert batch.left_out == {"timeout": 1, "trace without a prompt": 1}
    assert batch.rewards == [1.0, 0.0]


def test_generation_that_an_earlier_trainer_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Goes on before the first batch."""
    told: list[Any] = []
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "t", "instruction": "Go.", "agent": {"custom_shell": {"command": "true"}}}')

    def groups(*_: Any, **__: Any) -> list[SessionGroup]:
        told.append("groups")
        return []

    with tinker.Tinker({"name": "run-1", "tasks": [str(file)]}) as polar:
        monkeypatch.setattr(polar, "engines", SimpleNamespace(resume_if_paused=lambda: "begin"))
        monkeypatch.setattr(polar, "run", told.append)
        monkeypatch.setattr(polar, "run_groups", groups)
        for step in range(2):
            polar.batch(["t"], step)
    assert told == ["begin", "groups", "groups"]


def test_advantages_of_sessions() -> None:
    assert compute_session_advantages([1.0, 0.0, 0.5], scale=False) == pytest.approx([0.5, -0.5, 0.0])
    assert compute_session_advantages([1.0, 0.0, 0.5]) == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)
    assert compute_session_advantages([1.0, 0.0], ddof=0) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert compute_session_advantages([0.1 + 0.2, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert compute_session_advantages([5.0]) == compute_session_advantages([5.0], ddof=0) == [0.0]
    assert compute_session_advantages([]) == []
