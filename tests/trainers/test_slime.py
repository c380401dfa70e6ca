"""Miles 0.0.2's own rollout manager, data path and loss over Polar's rollouts, with a real engine and real sessions.

slime has no package; tests/unit/bridges/test_slime.py has its published fields and its reduction.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.bridges.bridge import BlockingBridge
from polar.client.async_client import AsyncClient
from tests.bridging import TOKEN, Served, served
from tests.trainers.running import found_by

pytestmark = pytest.mark.trainers

TASKS = ["plain-0", "split-0", "plain-1", "split-1"]


def asked(it: Served, folder: Path) -> dict[str, Any]:
    rows, settings = folder / "rows.jsonl", folder / "polar.yaml"
    rows.write_text("\n".join(json.dumps({"task_id": task}) for task in TASKS))
    settings.write_text(json.dumps({"polar": it.settings(name="miles", max_lag=1)}))
    return {
        "folder": str(folder),
        "rows": str(rows),
        "settings": str(settings),
        "engine": it.engine,
        "model": str(it.model),
        "polar": it.settings(name="miles"),
    }


def test_two_rollouts_of_its_manager(tmp_path: Path) -> None:
    """The loss is given what was recorded, once each, in groups of sessions; weights move; generation stood still
    while they were loaded, and later groups were on their way."""
    with served(tmp_path) as it:
        found = found_by("loop_miles.py", "train", asked(it, tmp_path), tmp_path)
        with BlockingBridge(it.settings(name="miles", max_lag=1)) as bridge:
            recorded = [_counted(recorded_rows(bridge, index)) for index in range(6)]
        policy = asyncio.run(policy_of(it))
    # Of the six groups that were sent those train that ended first: four, and each of them whole and once.
    given = [_counted(given_rows(step)) for step in found["steps"]]
    trained = [group for group in recorded if group <= sum(given, Counter())]
    assert len(trained) == 4
    assert sum(given, Counter()) == sum(trained, Counter())
    assert [sum(group <= step for group in trained) for step in given] == [2, 2]
    assert found["moved"] > 0
    assert found["on_their_way"] == 2
    assert [replica["version"] for replica in policy["replicas"]] == [2]
    assert [one["versions"] for one in found["evaluated"]] == [["2"]] * len(TASKS)
    assert [one["traces"] for one in found["evaluated"]] == [1, 3, 1, 3]


def _counted(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(map(json.dumps, rows))


def recorded_rows(bridge: BlockingBridge, index: int) -> list[dict[str, Any]]:
    """Of the group that Miles counted so; it is there already, and nothing runs."""
    task = TASKS[index % len(TASKS)]
    group = bridge.run(bridge.rollouts.run_group(task, str(index), samples=4, sampling=everything()))
    rewards = np.array(group.rewards)
    spread = rewards.std(ddof=1)
    sessions = len(group.items)
    rows = []
    for item, advantage in zip(group.items, (rewards - rewards.mean()) / (spread + 1e-6), strict=True):
        for trace in item.trajectory.traces:
            assert trace.logprobs is not None
            rows.append(
                {
                    "tokens": [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()],
                    "mask": trace.loss_mask.tolist(),
                    "logprobs": trace.logprobs.tolist(),
                    "share": round(trace.weight * advantage / sessions, 5) + 0.0,
                }
            )
    return rows


def everything() -> Any:
    from polar.config import SamplingOverrides

    return SamplingOverrides(temperature=1.0, top_p=1.0, top_k=0)


def given_rows(step: dict[str, Any]) -> list[dict[str, Any]]:
    many = len(step["tokens"]) / 8  # rows a session
    return [
        {"tokens": tokens, "mask": mask, "logprobs": logprobs, "share": round(reward / many / 4, 5) + 0.0}
        for tokens, mask, logprobs, reward in zip(
            step["tokens"], step["loss_masks"], step["rollout_log_probs"], step["rewards"], strict=True
        )
    ]


async def policy_of(it: Served) -> dict[str, Any]:
    async with AsyncClient(it.url, TOKEN) as client:
        return await client.policy()


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    """By Miles' own reduction, with the bridge's shares; without them it does."""
    with served(tmp_path) as it:
        found = found_by("loop_miles.py", "splitting", asked(it, tmp_path), tmp_path)
    assert found.pop("mean over samples, by Miles alone") > 0.01
    assert max(found.values()) < 1e-5, found
