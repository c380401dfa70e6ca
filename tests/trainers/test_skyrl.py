"""SkyRL 0.3.0's own loop over Polar's rollouts, with a real engine, real sessions and a real optimizer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.client.async_client import AsyncClient, ClientError
from polar.export.base import SessionItem
from tests.bridging import TOKEN, Served, served
from tests.trainers.running import found_by

pytestmark = pytest.mark.trainers

TASKS = ["plain-0", "split-0", "plain-1", "split-1"]


def asked(it: Served, folder: Path, tasks: list[str]) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": [{"role": "user", "content": "go"}], "task_id": t}) for t in tasks))
    settings = it.settings(name="skyrl")
    return {
        "folder": str(folder),
        "rows": str(rows),
        "settings": settings,
        "engine": it.engine,
        "model": str(it.model),
    }


def test_two_steps_of_its_trainer(tmp_path: Path) -> None:
    """The loss is given what was recorded, once each; weights move, and the engine and Polar have them."""
    with served(tmp_path) as it:
        found = found_by("loop_skyrl.py", "train", asked(it, tmp_path, TASKS), tmp_path)
        versions, ran = asyncio.run(seen(it))
    assert found["moved"] > 0
    assert versions == [2]
    assert [len(groups) for groups in ran] == [2, 2]
    for version, (groups, inputs) in enumerate(zip(ran, found["steps"], strict=True)):
        assert sorted(rows_given(inputs), key=repr) == sorted(rows_of(groups), key=repr)
        traces = [trace for group in groups for item in group for trace in item.trajectory.traces]
        assert {int(found) for trace in traces for found in trace.policy_versions[trace.loss_mask == 1]} == {version}
    assert {log["polar/sessions"] for log in found["logs"] if "polar/sessions" in log} == {8}
    assert sum("eval/all/avg_score" in log for log in found["logs"]) == 3  # before, and after each step


async def seen(it: Served) -> tuple[list[int], list[list[list[SessionItem]]]]:
    """The versions of the engines, and the groups of each step as the service has them."""
    async with AsyncClient(it.url, TOKEN) as client:
        steps = []
        for step in (1, 2):
            names = [f"skyrl/train-{step}/{task}" for task in TASKS]
            known = [await client.task(name) for name in names if await has(client, name)]
            steps.append([[SessionItem.from_result(result) for result in one.results] for one in known])
        return [replica["version"] for replica in (await client.policy())["replicas"]], steps


async def has(client: AsyncClient, task: str) -> bool:
    try:
        await client.task(task, results=False)
    except ClientError as error:
        if error.status != 404:
            raise
        return False
    return True


def rows_of(groups: list[list[SessionItem]]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        rewards = [float(one.session.reward or 0) for one in group]
        for one, reward in zip(group, rewards, strict=True):
            for trace in one.trajectory.traces:
                assert trace.logprobs is not None
                rows.append(
                    {
                        "ids": [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()],
                        "mask": trace.loss_mask.tolist(),
                        "logprobs": trace.logprobs.tolist(),
                        "sign": float(np.sign(reward - np.mean(rewards))),  # of its advantage, among sessions
                    }
                )
    return rows


def rows_given(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for index, ids in enumerate(inputs["sequences"]):
        real = np.array(inputs["attention_mask"][index], bool)
        responds = np.array(inputs["response_mask"][index], bool)
        advantages = np.array(inputs["advantages"][index])[responds]
        assert len(set(advantages.tolist())) == 1
        rows.append(
            {
                "ids": np.array(ids)[real].tolist(),
                "mask": np.array(inputs["loss_mask"][index])[responds].astype(int).tolist(),
                "logprobs": [float(np.float32(v)) for v in np.array(inputs["rollout_logprobs"][index])[responds]],
                "sign": float(np.sign(advantages[0])),
            }
        )
    return rows


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        found = found_by("loop_skyrl.py", "splitting", asked(it, tmp_path, ["plain-0", "plain-1"]), tmp_path)
    alone = found.pop("sequence_mean, by SkyRL alone")
    assert alone > 0.01
    assert max(found.values()) < 1e-5, found
