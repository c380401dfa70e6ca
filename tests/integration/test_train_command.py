"""`polar train` as people start it: with a service and an engine of its own, which end with it."""

import asyncio
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from polar.train.metrics import StepMetrics
from polar.weight_sync.files import choose_staging_folder
from tests.fault.train.processes import Training
from tests.integration.training import write_tasks
from tests.unit.train import tiny

CONFIG = """
output = "out"
steps = 2
tasks = { train = ["train.jsonl"], held_out = ["held_out.jsonl"] }
model = { folder = "model", threads = 1, device = "cpu" }
rollout = { group_size = 2, groups_per_step = 2, max_lag = 0 }
grpo = { filter = false }
polar.engine.options = { threads = 1, device = "cpu", memory_gib = 0.02 }
"""


@pytest.mark.slow
async def test_from_settings_to_a_model(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "model")
    write_tasks(tmp_path)
    (tmp_path / "train.toml").write_text(CONFIG)
    log = tmp_path / "log"
    async with Training(tmp_path / "train.toml", log) as training:
        assert await training.ended(600) == 0, log.read_text()
    told = json.loads(log.read_text().splitlines()[-1])
    assert told["steps"] == 2
    assert told["held_out_before"] is not None
    history = [
        msgspec.json.decode(line, type=StepMetrics)
        for line in (tmp_path / "out" / "metrics.jsonl").read_bytes().splitlines()
    ]
    assert [one.version for one in history] == [0, 1, 2]
    assert [one.lag_max for one in history] == [None, 0, 0]
    assert all(one.ratio_mean == pytest.approx(1, abs=0.01) for one in history[1:])
    assert (told["picture"], told["model"]) == (str(tmp_path / "out" / "reward.png"), str(tmp_path / "out" / "model"))
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.slow
async def test_an_interrupted_run_keeps_its_weights_in_its_own_folder(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "model")
    write_tasks(tmp_path)
    (tmp_path / "train.toml").write_text(CONFIG.replace("steps = 2", "steps = 1000"))
    output, log = tmp_path / "out", tmp_path / "log"
    in_memory = choose_staging_folder(output, 1)
    async with Training(tmp_path / "train.toml", log) as training:
        for _ in range(1000):
            if (output / "engine.json").exists():
                break
            await asyncio.sleep(0.3)
        pid = training.pid("trainer")
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        assert await training.ended(600) == 130, log.read_text()
    state = json.loads((output / "engine.json").read_bytes())
    kept = output / "weights" / str(state["version"]) / "model.safetensors"
    assert state["path"] == str(kept)
    assert kept.exists()
    assert not in_memory.exists()


async def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "model")
    write_tasks(tmp_path)
    (tmp_path / "train.toml").write_text(CONFIG.replace("memory_gib", "memory_tib"))
    async with Training(tmp_path / "train.toml", tmp_path / "log") as training:
        assert await training.ended(600) == 1
    assert "The rollout service did not start" in (tmp_path / "log").read_text()
    assert "memory_tib" in (tmp_path / "log").read_text()
