"""The loop, over a service in this process: what is trained on, how old it is, and what a crash changes (nothing)."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from polar.errors import ConfigError
from polar.records.task import TaskRequest
from polar.records.trajectory import SessionPaths
from polar.train.checkpoint import CheckpointStore, JournalEntry, Progress
from polar.train.learner import Learner
from polar.train.metrics import StepMetrics
from polar.train.run import TrainingTasks, train_with_client
from polar.train.settings import TrainSettings
from polar.train.trainer import NullObserver
from polar.weight_sync.updater import SyncReport
from tests.unit.train import tiny
from tests.unit.train.fake_service import VOCABULARY, FakeEngines, FakeService

TRAIN = [TaskRequest(task_id=f"t{number}", instruction="x") for number in range(5)]
HELD_OUT = [TaskRequest(task_id="h", instruction="x")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY)


def settings(output: Path, **changes: Any) -> TrainSettings:
    tables: dict[str, Any] = {
        "output": str(output),
        "steps": 5,
        "tasks": {"train": ["unused"]},
        "model": {"device": "cpu"},
        "rollout": {"group_size": 4, "groups_per_step": 2, "max_lag": 0},
        "optimizer": {"lr": 0.01, "minibatches": 2, "warmup": 3},
        "evaluation": {"samples": 2, "every": 2},
    }
    for name, value in changes.items():
        tables[name] = tables[name] | value if isinstance(value, dict) and name in tables else value
    return TrainSettings.model_validate(tables)


class Crash(Exception):
    """Of the trainer's process."""


class Crashing(NullObserver):
    """Counts what happens, and ends the process at one of these moments."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.moments = 0
        self.told: list[StepMetrics] = []

    def moment(self) -> None:
        self.moments += 1
        if self.moments == self.at:
            raise Crash

    def on_learn(self, step: int, sessions: int) -> None:
        self.moment()

    def on_evaluate(self, step: int) -> None:
        self.moment()

    def on_step(self, metrics: StepMetrics) -> None:
        self.told.append(metrics)
        self.moment()


class CrashingEngines(FakeEngines):
    """May crash in the middle of an update: when the weights are there, and nobody was told; and right after it."""

    def __init__(self, service: FakeService, learner: Learner, watcher: Crashing) -> None:
        super().__init__(service, learner)
        self._watcher = watcher

    async def publish(self, version: int) -> SyncReport:
        self._watcher.moment()
        if self._watcher.at == self._watcher.moments + 1:
            self.load(version)
        self._watcher.moment()
        done = await super().publish(version)
        self._watcher.moment()
        return done


async def run(service: FakeService, folder: Path, wanted: TrainSettings, watcher: Crashing | None = None) -> Learner:
    watcher = watcher or Crashing()
    learner = Learner(folder, wanted)
    engines = CrashingEngines(service, learner, watcher)
    await train_with_client(service, wanted, learner, engines, TrainingTasks(TRAIN, HELD_OUT), watcher, asyncio.Event())  # type: ignore[arg-type]
    return learner


def service_of(folder: Path) -> FakeService:
    return FakeService(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def journal(output: Path) -> list[JournalEntry]:
    return [
        msgspec.json.decode(line, type=JournalEntry) for line in (output / "journal.jsonl").read_bytes().splitlines()
    ]


def metrics(output: Path) -> list[StepMetrics]:
    return [
        msgspec.json.decode(line, type=StepMetrics) for line in (output / "metrics.jsonl").read_bytes().splitlines()
    ]


def check_once(service: FakeService, output: Path, steps: int) -> None:
    """Each session was trained on once at most, and none that was held out; nothing that was sampled got lost."""
    entries = journal(output)
    assert [entry.step for entry in entries] == list(range(1, steps + 1))
    counted = Counter(name for entry in entries for name in entry.sessions)
    assert max(counted.values()) == 1
    assert not [name for name in counted if "/held-out/" in name]
    progress = msgspec.json.decode(
        (sorted((output / "checkpoints").iterdir())[-1] / "progress.json").read_bytes(), type=Progress
    )
    assert len(progress.settled) == 2 * steps


def same_weights(one: Learner, other: Learner) -> bool:
    return all(
        torch.equal(one.get_trained_weights()[name], other.get_trained_weights()[name])
        for name in one.get_trained_weights()
    )


async def test_it_learns(tmp_path: Path, folder: Path) -> None:
    """More small numbers are rewarded, and it says more of them."""
    service = service_of(folder)
    wanted = settings(tmp_path, steps=15, rollout={"group_size": 8, "groups_per_step": 2, "max_lag": 1})
    await run(service, folder, wanted)
    told = metrics(tmp_path)
    assert [one.step for one in told] == list(range(16))
    assert {one.seconds["prepare"] for one in told if one.updates} == {0.25}  # of the weights' way, step by step
    rewards = [one.reward for one in told if one.reward is not None]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    check_once(service, tmp_path, 15)


async def test_what_is_sampled_ahead_is_within_the_bound(tmp_path: Path, folder: Path) -> None:
    for most in (0, 1, 2):
        output = tmp_path / str(most)
        service = service_of(folder)
        await run(service, folder, settings(output, steps=6, rollout={"max_lag": most}))
        told = metrics(output)
        assert max(one.lag_max or 0 for one in told) == most
        assert not any(one.sessions_excluded for one in told)
        for one in told:  # tokens of the newest weights: engine and trainer say the same of them
            assert one.ratio_on_policy is None or one.ratio_on_policy == pytest.approx(1, abs=1e-4)
        assert (most == 0) == all(one.ratio_max == pytest.approx(1, abs=1e-3) for one in told if one.ratio_max)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_crash_changes_nothing(tmp_path: Path, folder: Path, every: int) -> None:
    """Wherever it comes: the weights in the end are the same, to the last bit."""
    options = {"checkpoint": {"every": every}, "steps": 4}
    counting = Crashing()
    whole = await run(service_of(folder), folder, settings(tmp_path / "whole", **options), counting)
    moments = range(1, counting.moments)
    assert len(moments) > 20
    for at in random.Random(every).sample(moments, 5):
        output = tmp_path / str(at)
        service = service_of(folder)
        with pytest.raises(Crash):
            await run(service, folder, settings(output, **options), Crashing(at))
        again = await run(service, folder, settings(output, **options))
        assert same_weights(whole, again), f"the crash at moment {at} changed the weights"
        check_once(service, output, 4)


async def test_many_crashes(tmp_path: Path, folder: Path) -> None:
    """One after the other, with sampling ahead."""
    service, moments = service_of(folder), random.Random(1)
    wanted = settings(tmp_path, steps=6, rollout={"max_lag": 1})
    for _ in range(8):
        try:
            await run(service, folder, wanted, Crashing(moments.randint(1, 12)))
            break
        except Crash:
            pass
    await run(service, folder, wanted)
    check_once(service, tmp_path, 6)
    told = [one.step for one in metrics(tmp_path)]
    assert told == sorted(set(told))
    assert told[-1] == 6


async def test_groups_without_a_signal(tmp_path: Path, folder: Path) -> None:
    """No update is made of them, and the weights keep their version."""
    service = service_of(folder)
    service.reward_of = lambda ids: 1.0
    learner = await run(service, folder, settings(tmp_path, steps=2))
    assert [one.groups_filtered for one in metrics(tmp_path)] == [{}, {"no_signal": 2}, {"no_signal": 2}]
    assert service.label == 0
    assert same_weights(learner, Learner(folder, settings(tmp_path)))


async def test_others_are_taken_in_their_place(tmp_path: Path, folder: Path) -> None:
    service = service_of(folder)
    seen: list[int] = []

    def every_third_group(ids: list[int]) -> float:
        seen.append(1)
        return float(ids[0]) if (len(seen) - 1) // 4 % 3 == 0 else 0.0

    service.reward_of = every_third_group
    wanted = settings(tmp_path, steps=3, grpo={"refill": 8}, evaluation={"every": None}, rollout={"max_lag": 0})
    await run(service, folder, wanted)
    told = metrics(tmp_path)[1:]
    assert [one.groups for one in told] == [2, 2, 2]
    assert all(one.groups_filtered for one in told[1:])
    assert max(one.lag_max or 0 for one in told) == 0


@pytest.mark.parametrize("builder", ["prefix_tree", "prefix_merging"])
async def test_suspicious_sessions_are_counted(tmp_path: Path, folder: Path, builder: str) -> None:
    service = service_of(folder)
    session = service._session

    def first_of_each_group(task: TaskRequest, sample: int) -> SessionPaths:
        return msgspec.structs.replace(session(task, sample), suspicious=sample == 0)

    service._session = first_of_each_group  # type: ignore[method-assign]
    wanted = settings(tmp_path, steps=1, evaluation={"every": None}, rollout={"builder": builder})
    await run(service, folder, wanted)
    told = metrics(tmp_path)[-1]
    assert told.sessions_suspicious == wanted.rollout.groups_per_step
    assert told.flatten()["sessions_suspicious"] == told.sessions_suspicious


async def test_an_engine_that_lost_its_weights_gets_them_again(tmp_path: Path, folder: Path) -> None:
    """It is started anew with the model that it began with, says so, and what it samples is not trained on."""
    service = service_of(folder)
    submit, lost = service.submit, []

    async def submit_and_lose(tasks: Iterable[TaskRequest]) -> None:
        if service.label == 3 and not lost:
            lost.append(service.version)
            service.model.load_state_dict(service.base.state_dict())
            service.version = 0
        await submit(tasks)

    service.submit = submit_and_lose  # type: ignore[method-assign]
    await run(service, folder, settings(tmp_path, steps=6, evaluation={"every": None}))
    assert lost == [3]
    told = metrics(tmp_path)
    assert sum(one.sessions_excluded.get("stale", 0) for one in told) > 0
    assert max(one.lag_max or 0 for one in told) == 0
    assert told[-1].sessions > 0
    assert service.version == service.label > 3


async def test_engines_get_their_weights_again_before_held_out_tasks_are_sampled(tmp_path: Path, folder: Path) -> None:
    """The service was started again, and the engine with it, when nobody waited for groups."""
    service = service_of(folder)
    submit, disturbed = service.submit, asyncio.Event()
    sampled: list[bool] = []

    class Disturbing(Crashing):
        def on_evaluate(self, step: int) -> None:
            if step == 2:
                service.model.load_state_dict(service.base.state_dict())
                service.version = service.label = 0
                disturbed.set()

    async def submit_and_look(tasks: Iterable[TaskRequest]) -> None:
        tasks = list(tasks)
        if any("/held-out/2/" in task.task_id for task in tasks):
            sampled.append(await engines.has_trainer_weights(service.version))
        await submit(tasks)

    service.submit = submit_and_look  # type: ignore[method-assign]
    wanted, watcher = settings(tmp_path, steps=3), Disturbing()
    learner = Learner(folder, wanted)
    engines = CrashingEngines(service, learner, watcher)
    await train_with_client(service, wanted, learner, engines, TrainingTasks(TRAIN, HELD_OUT), watcher, disturbed)  # type: ignore[arg-type]
    assert sampled == [True]
    assert service.version == service.label > 0


async def test_another_model_is_another_run(tmp_path: Path, folder: Path) -> None:
    await run(service_of(folder), folder, settings(tmp_path, steps=1))
    learner = Learner(folder, settings(tmp_path, model={"trainable_layers": 1}))
    with pytest.raises(ConfigError, match="output folder"):
        CheckpointStore(tmp_path, 1).load(learner)
