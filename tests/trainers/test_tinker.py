"""Tinker 0.36.0's `Datum`s of Polar's rollouts, with a real engine and real sessions, and a step on what they say."""

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
    settings = it.settings(name="tinker")
    return {"folder": str(folder), "settings": settings, "engine": it.engine, "model": str(it.model), "tasks": TASKS}


def test_two_steps(tmp_path: Path) -> None:
    """Datums say what was recorded, each token once; a session's advantages add up to its own over the batch's size."""
    with served(tmp_path) as it:
        found = found_by("loop_tinker.py", "train", asked(it, tmp_path), tmp_path)
        with BlockingBridge(it.settings(name="tinker")) as bridge:
            recorded = [bridge.run_groups(TASKS, f"step-{step}") for step in range(2)]
    someone = False
    for step, (told, groups) in enumerate(zip(found["steps"], recorded, strict=True)):
        rewards = np.array([group.rewards for group in groups])
        someone |= bool(np.ptp(rewards, axis=1).any())
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = np.where(
            spread > 0, (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-6), 0
        ).flatten()
        assert told["rewards"] == rewards.flatten().tolist()
        datums = iter(told["datums"])
        for item, advantage in zip((item for group in groups for item in group.items), advantages, strict=True):
            total = 0.0
            for trace in item.trajectory.traces:
                assert trace.logprobs is not None
                assert set(trace.policy_versions.tolist()) - {-1} == {step}
                datum = next(datums)
                ids = np.concatenate([trace.prompt_ids, trace.response_ids])
                start = len(trace.prompt_ids) - 1
                given = {name: np.array(values) for name, values in datum.items()}
                assert datum["model_input"] == ids[:-1].tolist()
                assert given["target_tokens"].tolist() == ids[1:].tolist()
                assert given["logprobs"][start:].astype(np.float32).tolist() == trace.logprobs.tolist()
                trains = given["advantages"] != 0
                assert not trains[:start].any()
                assert np.array_equal(trains[start:], (trace.loss_mask == 1) & (advantage != 0))
                total += given["advantages"].sum()
            assert np.isclose(total, advantage / rewards.size, atol=1e-6)
    assert (found["moved"] > 0) == someone


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        found = found_by("loop_tinker.py", "splitting", asked(it, tmp_path), tmp_path)
    assert found["gradient"] > 1e-3
    assert found["apart"] < 1e-5
