"""verifiers 0.4.0's own loop over Polar's environment, with a real engine, real sessions and a real optimizer."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.client.async_client import AsyncClient
from polar.export.base import SessionItem
from polar.records.trajectory import Trace
from tests.bridging import TOKEN, Served, served, task
from tests.trainers.running import found_by

pytestmark = pytest.mark.trainers


def asked(it: Served, folder: Path, *tasks: str) -> dict[str, Any]:
    silent = task("silent", "plain") | {"agent": {"custom_shell": {"command": f"{sys.executable} -c ''"}}}
    more = folder / "more.jsonl"
    more.write_text(json.dumps(silent))
    settings = it.settings(name="verifiers", tasks=[str(it.tasks), str(more)])
    file = folder / "polar.toml"
    file.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items()))
    return {"settings": str(file), "tasks": tasks, "model": str(it.model), "output": str(folder / "output")}


def sample(trace: Trace) -> dict[str, Any]:
    assert trace.logprobs is not None
    before = len(trace.prompt_ids)
    return {
        "ids": [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()],
        "mask": [False] * before + [bool(bit) for bit in trace.loss_mask],
        "logprobs": [0.0] * before + trace.logprobs.tolist(),
    }


async def recorded(it: Served, names: list[str]) -> list[list[dict[str, Any]]]:
    async with AsyncClient(it.url, TOKEN) as client:
        results = [(await client.task(name)).results[0] for name in names]
    return [[sample(trace) for trace in SessionItem.from_result(result).trajectory.traces] for result in results]


def test_a_step_from_its_own_evaluation(tmp_path: Path) -> None:
    """The samples are what was recorded, branch for branch; the weights move. A session with nothing to train is a
    failed rollout."""
    with served(tmp_path) as it:
        found = found_by("loop_verifiers.py", "train", asked(it, tmp_path, "plain-0", "split-0", "silent"), tmp_path)
        assert sorted(found["ok"]) == [False] * 4 + [True] * 8, found["errors"]
        assert all("nothing_to_train" in message for message in found["errors"])
        sessions = [one for one in found["sessions"] if one["polar"] is not None]
        names = [one["polar"]["traces"][0]["task_id"] for one in sessions]
        traces = asyncio.run(recorded(it, names))
    assert sorted(len(one) for one in traces) == [1] * 4 + [3] * 4
    for one, expected in zip(sessions, traces, strict=True):
        advantages = [row.pop("advantages") for row in one["samples"]]
        assert one["samples"] == expected
        assert one["reward"] == one["polar"]["reward"]
        assert one["output"] == sum(row["mask"].count(True) for row in expected)
        assert one["total"] == sum(len(row["ids"]) for row in expected)
        given = {
            value
            for row, values in zip(expected, advantages, strict=True)
            for value, trains in zip(values, row["mask"], strict=True)
            if trains
        }
        assert len(given) == 1  # all of a session's tokens have one advantage
    assert ["user", "assistant", "user", "assistant"] in found["said"]
    assert max(row["mask"].count(True) for one in sessions for row in one["samples"]) <= 2 * 5  # its max_tokens
    assert found["differ"] < 1e-4  # the engine has this model's weights
    assert found["moved"] > 1e-4


def test_splitting_a_session_changes_no_gradient(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        found = found_by("loop_verifiers.py", "splitting", asked(it, tmp_path, "plain-0"), tmp_path)
    assert found["rows"] == [4, 5]
    assert found["largest"] > 1e-3
    assert found["differ"] < 1e-6
