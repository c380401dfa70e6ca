"""OpenRLHF 0.11.2's own loop over Polar's rollouts, with a real engine, real sessions and a real optimizer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.client.async_client import AsyncClient
from polar.export.base import SessionItem
from tests.bridging import TOKEN, Served, served
from tests.trainers.running import found_by

pytestmark = pytest.mark.trainers

TASKS = ["plain-0", "split-0"]


def asked(it: Served, folder: Path, tasks: list[str], rows: int) -> dict[str, Any]:
    data, settings = folder / "rows.jsonl", folder / "bridge.toml"
    data.write_text("\n".join(json.dumps({"prompt": "go", "task_id": task}) for task in tasks))
    settings.write_text(f'server = "{it.url}"\ntoken = "{TOKEN}"\ntasks = "{it.tasks}"\nname = "openrlhf"\n')
    return {
        "folder": str(folder),
        "rows": str(data),
        "settings": str(settings),
        "engine": it.engine,
        "model": str(it.model),
        "train_batch_size": rows,
    }


def test_a_step_of_its_trainer(tmp_path: Path) -> None:
    """The loss is given what was recorded, each token once, in one step; the engine and Polar have the new weights."""
    with served(tmp_path) as it:
        question = asked(it, tmp_path, TASKS, 20) | {"eval_steps": 1}
        found = found_by("loop_openrlhf.py", "train", question, tmp_path)
        versions, groups, evaluated = asyncio.run(seen(it))
    assert found["moved"] > 0
    assert found["optimizer_steps"] == 1
    assert versions == [1]
    assert evaluated == [1, 1]
    assert [len(group) for group in groups] == [4, 4]
    rows = [row for batch in found["batches"] for row in rows_given(batch)]
    assert len(rows) == 20  # of 16 traces
    expected = {key: (sampled, sign) for group in groups for key, sampled, sign in traces_of(group)}
    trained: dict[Any, set[int]] = {key: set() for key in expected}
    for ids, mask, logprobs, advantages in rows:
        sampled, sign = expected[ids]
        assert not trained[ids] & set(mask)  # no token twice
        trained[ids] |= set(mask)
        assert {place: logprobs[place] for place in mask} == {place: sampled[place] for place in mask}
        assert {float(np.sign(advantages[place])) for place in mask} == {sign}
    assert trained == {key: set(sampled) for key, (sampled, _) in expected.items()}


async def seen(it: Served) -> tuple[list[int], list[list[SessionItem]], list[int]]:
    """The versions of the engines, the step's groups as the service has them, and how many sessions evaluated it."""
    async with AsyncClient(it.url, TOKEN) as client:
        trained = [await client.task(f"openrlhf/train-0/{task}") for task in TASKS]
        evaluated = [await client.task(f"openrlhf/eval-1/{task}") for task in TASKS]
        versions = [replica["version"] for replica in (await client.policy())["replicas"]]
    return (
        versions,
        [[SessionItem.from_result(one) for one in task.results] for task in trained],
        [len(t.results) for t in evaluated],
    )


def traces_of(group: list[SessionItem]) -> list[tuple[tuple[int, ...], dict[int, float], float]]:
    """The tokens of each trace, the log-probability of each place that trains, and the sign of its advantage."""
    rewards = [float(one.session.reward or 0) for one in group]
    found = []
    for one, reward in zip(group, rewards, strict=True):
        for trace in one.trajectory.traces:
            assert trace.logprobs is not None
            begin = len(trace.prompt_ids)
            sampled = {begin + int(place): float(trace.logprobs[place]) for place in np.flatnonzero(trace.loss_mask)}
            ids = (*trace.prompt_ids.tolist(), *trace.response_ids.tolist())
            found.append((ids, sampled, float(np.sign(reward - np.mean(rewards)))))
    return found


def rows_given(batch: dict[str, Any]) -> list[tuple[tuple[int, ...], list[int], list[float], list[float]]]:
    """Places are those of tokens: OpenRLHF's arrays begin with the second one."""
    rows = []
    for index, ids in enumerate(batch["sequences"]):
        real = np.array(batch["attention_mask"][index], bool)
        mask = [int(place) + 1 for place in np.flatnonzero(batch["action_mask"][index])]
        logprobs, advantages = ([0.0, *batch[name][index]] for name in ("rollout_log_probs", "advantages"))
        rows.append((tuple(np.array(ids)[real].tolist()), mask, logprobs, advantages))
    return rows


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        question = asked(it, tmp_path, ["plain-0", "plain-1"], 14)
        found = found_by("loop_openrlhf.py", "splitting", question, tmp_path)
    assert max(found.values()) < 1e-5, found
