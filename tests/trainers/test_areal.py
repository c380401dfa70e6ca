"""AReaL 1.0.4's own executor and PPO actor over Polar's rollouts, with a real engine, real sessions and a real step."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.bridges.bridge import BlockingBridge
from polar.bridges.rollouts import build_sampling_overrides
from tests.bridging import Served, served
from tests.trainers.running import found_by

pytestmark = pytest.mark.trainers

TASKS = ["plain-0", "split-0"]


def asked(it: Served, folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "settings": it.settings(name="areal"),
        "engine": it.engine,
        "model": str(it.model),
        "tasks": TASKS,
    }


def test_two_steps_of_its_executor(tmp_path: Path) -> None:
    """The loss is given what was recorded, once each, with the advantage of the session; versions go with the weights;
    weights move wherever somebody had an advantage."""
    with served(tmp_path) as it:
        found = found_by("loop_areal.py", "train", asked(it, tmp_path), tmp_path)
        with BlockingBridge(it.settings(name="areal")) as bridge:
            over = build_sampling_overrides(temperature=1.0, top_p=1.0, top_k=-1)  # AReaL's, where nobody says anything
            asked_again = partial(bridge.rollouts.run_group, sampling=over)
            recorded = [[bridge.run(asked_again(task, f"v{version}")) for task in TASKS] for version in range(2)]
    assert found["versions"] == [[0], [1]]
    someone = False
    for given, groups in zip(found["given"], recorded, strict=True):
        rows = []
        for group in groups:
            rewards = np.array(group.rewards)
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            someone |= bool(np.ptp(rewards))
            for item, advantage in zip(group.items, advantages, strict=True):
                for trace in item.trajectory.traces:
                    assert trace.logprobs is not None
                    start, number = len(trace.prompt_ids), len(trace.prompt_ids) + len(trace.response_ids)
                    mask = np.zeros(number)  # AReaL's are of the token behind
                    mask[start - 1 : -1] = trace.loss_mask
                    logprobs = np.zeros(number, np.float32)
                    logprobs[start - 1 : -1] = trace.logprobs
                    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
                    rows.append((ids, mask.tolist(), logprobs.tolist(), round(float(advantage), 4) + 0.0))
        assert sorted(rows_of(given)) == sorted(rows)
    assert (found["moved"] > 0) == someone


def rows_of(given: dict[str, Any]) -> list[Any]:
    bounds = given["cu_seqlens"]
    rows = []
    for start, stop in pairwise(bounds):
        mask = given["loss_mask"][start:stop]
        (advantage,) = {round(a, 4) + 0.0 for a, m in zip(given["advantages"][start:stop], mask, strict=True) if m}
        rows.append((given["input_ids"][start:stop], mask, given["logprobs"][start:stop], advantage))
    return rows


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        found = found_by("loop_areal.py", "splitting", asked(it, tmp_path), tmp_path)
    assert found["gradient"] > 1e-3
    assert found["apart"] < 1e-5
