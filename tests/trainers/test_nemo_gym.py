"""NeMo Gym 0.4.0's own servers and rollout collection drive the example's environment, in a newer Python; a step is
made of what they write, by NeMo RL's contract, which no package has. And Harbor 0.25.0 reads what is its own."""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polar.bridges.nemo_gym import split_traces
from polar.bridges.nemo_rl import SessionAdvantageEstimator, build_batch
from polar.client.async_client import AsyncClient
from polar.export.atif import AtifExporter
from polar.export.base import SessionItem
from polar.records.trajectory import Trace
from polar.tasks.reader import read
from polar.testing.conversations import ConversationBuilder, export_items, make_text_parts
from tests.bridging import TOKEN, Served, served, task
from tests.trainers.running import NEWER, ROOT, found_by
from tests.unit.bridges import nemo_contract as nemo_rl

pytestmark = pytest.mark.trainers

EXAMPLE = ROOT / "examples" / "trainers" / "nemo"


def asked(it: Served, folder: Path) -> dict[str, Any]:
    """The example with settings and rows of its own; one of its tasks ends without anything to train."""
    gym = folder / "gym"
    shutil.copytree(EXAMPLE, gym)
    (gym / "responses_api_agents" / "polar_agent" / ".venv").symlink_to(NEWER.parent / "venv")
    silent = task("silent", "plain") | {"agent": {"custom_shell": {"command": f"{sys.executable} -c ''"}}}
    (folder / "more.jsonl").write_text(json.dumps(silent))
    rows = [{"task_id": name, "responses_create_params": {"input": []}} for name in ("plain-0", "split-0", "silent")]
    (gym / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings = it.settings(name="gym", tasks=[str(it.tasks), str(folder / "more.jsonl")])
    (gym / "polar.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items()))
    return {
        "folder": str(gym),
        "rows": str(gym / "rows.jsonl"),
        "repeats": 4,
        "engine": it.engine,
        "one": "plain-1",
    }


async def recorded(it: Served, names: list[str]) -> list[list[Trace]]:
    async with AsyncClient(it.url, TOKEN) as client:
        return [SessionItem.from_result((await client.task(name)).results[0]).trajectory.traces for name in names]


def tokens(row: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Of a verify response, as NeMo RL reads it."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for one in row["response"]["output"]:
        prompt, sampled = one["prompt_token_ids"], one["generation_token_ids"]
        assert prompt[: len(ids)] == ids
        new = len(prompt) - len(ids)
        ids, mask = prompt + sampled, mask + [0] * new + [1] * len(sampled)
        logprobs += [0.0] * new + one["generation_log_probs"]
    return ids, mask, logprobs


def expected(trace: Trace) -> tuple[list[int], list[int], list[float]]:
    assert trace.logprobs is not None
    before = [0] * len(trace.prompt_ids)
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    return ids, before + trace.loss_mask.tolist(), before + trace.logprobs.tolist()


def test_its_collection_drives_the_environment(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        found = found_by("loop_nemo_gym.py", "collect", asked(it, tmp_path), tmp_path, python=NEWER)
        runs = found["rollouts"]
        traces = asyncio.run(recorded(it, [run["polar"]["task_id"] for run in runs]))
    assert sorted(run["polar"]["task"] for run in runs) == ["plain-0"] * 4 + ["split-0"] * 4
    assert [one["_ng_failure_class"] for one in found["failures"]] == ["nothing_to_train"] * 4
    for run, session in zip(runs, traces, strict=True):
        assert [tokens(row) for row in split_traces(run)] == [expected(trace) for trace in session]
        assert run["reward"] == session[0].reward
        assert all(len(one["generation_token_ids"]) <= 5 for one in run["response"]["output"])
    (metrics,) = found["metrics"]
    assert metrics["key_metrics"]["mean/polar_traces"] == 2  # of sessions with one, and with three
    assert len(found["response"]["output"]) == 2

    model = AutoModelForCausalLM.from_pretrained(it.model, dtype="float32")
    fields = build_batch(runs, rows=24)
    assert (fields["polar_session"] >= 0).sum() == 4 + 12
    if len(set(fields["total_reward"][:16].tolist())) == 1:
        fields["total_reward"][0] += 1.0  # random weights may have earned nothing
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    advantages = nemo_rl.advantages(SessionAdvantageEstimator(nemo_rl.GRPOAdvantageEstimator()), fields)
    nemo_rl.loss(model, fields, advantages, token_level=True).backward()
    optimizer.step()
    assert not torch.equal(before, model.lm_head.weight)


def test_harbor_reads_what_is_its_own(tmp_path: Path) -> None:
    talk = ConversationBuilder()
    talk.add_call(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}], make_text_parts("Hello.")
    )
    export = tmp_path / "export.jsonl"
    export.write_bytes(export_items(AtifExporter(), [talk.build_item()]))
    folders = sorted((ROOT / "examples" / "harbor").iterdir())
    question = {"export": str(export), "tasks": [str(folder) for folder in folders]}
    found = found_by("loop_nemo_gym.py", "harbor", question, tmp_path, python=NEWER)
    assert found["steps"] == [["system", "user", "agent"]]
    assert found["sampled"] == [[0, 1, 2]]
    ours = [one.instruction for one in read(folders)]
    assert [text.strip() for text in found["instructions"]] == [text.strip() for text in ours]
