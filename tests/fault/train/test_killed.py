"""kill -9 of the trainer, the rollout service and the engine, at any moment: training goes on, and no session is
trained on twice."""

import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polar.train.checkpoint import JournalEntry
from polar.train.metrics import StepMetrics
from tests.fault.train.processes import Training
from tests.integration.training import write_tasks
from tests.unit.train import tiny

pytestmark = pytest.mark.faults

STEPS = 12
CONFIG = f"""
name = "killed"
output = "out"
steps = {STEPS}
tasks = {{ train = ["train.jsonl"], held_out = ["held_out.jsonl"] }}
model = {{ folder = "model", threads = 1, device = "cpu" }}
rollout = {{ group_size = 4, groups_per_step = 2, max_lag = 1 }}
optimizer = {{ lr = 0.003 }}
grpo = {{ filter = false }}
evaluation = {{ every = 4 }}
checkpoint = {{ every = 2 }}
polar.engine.options = {{ threads = 1, device = "cpu", memory_gib = 0.02 }}
polar.server = {{ lease_seconds = 3, beat_seconds = 1 }}
"""


def read(path: Path, kind: type[msgspec.Struct]) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]


def check(output: Path) -> None:
    entries = read(output / "journal.jsonl", JournalEntry)
    assert [entry.step for entry in entries] == list(range(1, STEPS + 1))
    trained = Counter(name for entry in entries for name in entry.sessions)
    assert trained
    assert max(trained.values()) == 1
    told = read(output / "metrics.jsonl", StepMetrics)
    steps = [one.step for one in told]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert told[-1].held_out is not None
    versions = [one.version for one in told]
    assert versions == sorted(versions)
    assert max(one.lag_max or 0 for one in told) <= 1
    for one in told:
        assert one.ratio_on_policy is None or one.ratio_on_policy == pytest.approx(1, abs=0.01)
    assert (output / "reward.png").exists()


@pytest.mark.parametrize("who", ["trainer", "server", "engine", "anybody"])
async def test_killed(tmp_path: Path, who: str) -> None:
    tiny.folder(tmp_path / "model")
    write_tasks(tmp_path)
    config = tmp_path / "train.toml"
    config.write_text(CONFIG)
    moments = random.Random(who)
    kills, log = 0, tmp_path / "log"
    async with AsyncExitStack() as stack:  # what a killed one leaves may still be ending when the next one starts
        for _ in range(12):
            training = await stack.enter_async_context(Training(config, log))
            status = None
            while status is None:
                # Later and later: at first nothing may have been done, and in the end there is time for all of it.
                status = await training.ended(moments.uniform(0.5, 6) * (1 + kills))
                chosen = moments.choice(["trainer", "server", "engine"]) if who == "anybody" else who
                if chosen == "engine" and not (tmp_path / "out" / "metrics.jsonl").exists():
                    continue  # what can't start even once is an error, and said so
                if status is None and kills < 5 and training.kill(chosen):
                    kills += 1
            if status == 0:
                break
            assert status == -9, log.read_text()[-3000:]
    assert kills >= 2
    check(tmp_path / "out")
