"""ART 0.5.18's own local backend over Polar's rollouts, with a real engine, real sessions and a real step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.bridges.bridge import BlockingBridge
from tests.bridging import Served, served
from tests.trainers.running import found_by

pytestmark = pytest.mark.trainers

TASKS = ["plain-0", "split-0"]


def asked(it: Served, folder: Path) -> dict[str, Any]:
    settings = it.settings(name="art")
    return {"folder": str(folder), "settings": settings, "engine": it.engine, "model": str(it.model), "tasks": TASKS}


def test_a_step_of_its_backend(tmp_path: Path) -> None:
    """The loss is given what was recorded, once each; a session's traces have its advantage, and its weight together;
    and weights move."""
    with served(tmp_path) as it:
        found = found_by("loop_art.py", "train", asked(it, tmp_path), tmp_path)
        with BlockingBridge(it.settings(name="art")) as bridge:
            groups = bridge.run_groups(TASKS, "step-3")
    assert found["moved"] > 0
    assert found["versions"] == [3]
    assert (found["tasks"], found["rewards"]) == (TASKS, [group.rewards for group in groups])
    (given,) = found["given"]
    rows = {}
    for index, groups_of in enumerate(given["group_ids"]):
        number = sum(one != -1 for one in groups_of)
        cut = {name: values[index][:number] for name, values in given.items()}
        assert cut["input_pos"] == list(range(number))
        (advantage,) = {np.sign(a) for a, m in zip(cut["advantages"], cut["assistant_mask"], strict=True) if m}
        (weight,) = {round(w, 5) for w, m in zip(cut["weights"], cut["assistant_mask"], strict=True) if m}
        rows[tuple(cut["tokens"])] = (cut["assistant_mask"], cut["logprobs"], advantage, weight)
    expected = 0
    weights: dict[str, set[float]] = {}
    for group in groups:
        for place, item in enumerate(group.items):
            for trace in item.trajectory.traces:
                assert trace.logprobs is not None
                expected += 1
                begin = len(trace.prompt_ids)
                tokens = (*trace.prompt_ids.tolist(), *trace.response_ids.tolist())
                mask, logprobs, advantage, weight = rows[tokens]
                assert mask == [False] * begin + (trace.loss_mask == 1).tolist()
                trains = np.array(mask)
                assert np.array_equal(np.array(logprobs, np.float32)[trains], trace.logprobs[trace.loss_mask == 1])
                assert np.isnan(np.array(logprobs, float)[~trains]).all()
                assert advantage == (1.0 if place % 2 else -1.0)
                weights.setdefault(item.session.session_id, set()).add(weight)
    assert len(rows) == expected
    assert all(len(of_session) == 1 for of_session in weights.values())


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        found = found_by("loop_art.py", "splitting", asked(it, tmp_path), tmp_path)
    assert found["gradient"] > 1e-3
    assert found["apart"] < 1e-5
