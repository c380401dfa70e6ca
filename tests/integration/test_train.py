"""Training over the real service, gateway, agents and engine; only the model is tiny."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from polar.client.async_client import AsyncClient
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.server import EmbeddedServer
from polar.service import Service
from polar.train import groups
from polar.train.checkpoint import JournalEntry
from polar.train.learner import Learner
from polar.train.metrics import StepMetrics
from polar.train.packing import pack_trees
from polar.train.rollouts import TaskOrder
from polar.train.run import read_tasks, train_with_client
from polar.train.settings import TrainSettings
from polar.train.trainer import NullObserver
from polar.weight_sync.files import remove_staged_weights
from polar.weight_sync.publisher import ModelWeightPublisher
from polar.weight_sync.updater import SyncReport
from tests.conditions import wait_until
from tests.integration.stack import settings as service_settings
from tests.integration.training import mark_of, write_tasks
from tests.unit.train import tiny

STEPS, GROUP_SIZE = 6, 4


class Remembering(ModelWeightPublisher):
    """Keeps the weights of every version, to ask them later what they would have said. The last turns of each group
    are sampled after as many updates as there were groups before it, and its first turn before the last of these."""

    kept: dict[int, dict[str, torch.Tensor]]
    order: TaskOrder
    marks: Path

    async def publish(self, version: int) -> SyncReport:
        self.remember(version)
        if version < STEPS:
            mark = mark_of(self.marks, *self.order.get_epoch_and_task(version))
            await wait_until(lambda: len(list(self.marks.glob(f"{mark.name}.*"))) >= GROUP_SIZE)
        updated = await super().publish(version)
        self.let_end(version)
        return updated

    def let_end(self, group: int) -> None:
        mark_of(self.marks, *self.order.get_epoch_and_task(group)).touch()

    def remember(self, version: int) -> None:
        self.kept[version] = {name: tensor.clone() for name, tensor in self._model.model.state_dict().items()}


def training_settings(folder: Path, **changes: Any) -> TrainSettings:
    tables: dict[str, Any] = {
        "folder": folder,
        "output": "out",
        "tasks": {"train": ["train.jsonl"], "held_out": ["held_out.jsonl"]},
        "model": {"device": "cpu", "threads": 1},
        "optimizer": {"lr": 0.003},
    }
    return TrainSettings.model_validate(tables | changes)


async def test_updates_in_the_middle_of_sessions(tmp_path: Path) -> None:
    """Weights change under sessions that run. Whatever was sampled is labelled with the weights that sampled it: asked
    again, they give each token the log-probability that was recorded. And of tokens of the newest weights, trainer and
    engine say the same."""
    folder = tiny.folder(tmp_path / "model")
    marks = tmp_path / "marks"
    marks.mkdir()
    write_tasks(tmp_path, turns=3, tokens=24, marks=marks)
    wanted = training_settings(
        tmp_path,
        steps=STEPS,
        rollout={"group_size": GROUP_SIZE, "groups_per_step": 1, "max_lag": 3},
        grpo={"filter": False},
    )
    options = EmbeddedOptions(device="cpu", threads=1, memory_gib=0.02)
    async with EmbeddedServer(folder, options) as engine:
        settings = service_settings([engine.url], engine={"kind": "embedded", "model": str(folder)})
        async with (
            Service(settings, tmp_path / "data", node=True) as service,
            AsyncClient(service.control_url) as client,
        ):
            learner = Learner(folder, wanted)
            weights = Remembering(client, settings.engine, learner, wanted.output_folder)
            tasks = read_tasks(wanted)
            weights.kept, weights.marks = {}, marks
            weights.order = TaskOrder([task.task_id for task in tasks.train], wanted.seed)
            weights.remember(0)
            weights.let_end(0)
            history = await train_with_client(client, wanted, learner, weights, tasks, NullObserver(), asyncio.Event())
            await weights.close()
            remove_staged_weights(wanted.output_folder)
            entries = read(wanted.output_folder / "journal.jsonl", JournalEntry)
            found = [group async for group in trained_groups(client)]
    check_labels(learner, weights.kept, found)
    check_metrics(history)
    trained = [name for entry in entries for name in entry.sessions]
    assert len(trained) == len(set(trained)) == STEPS * GROUP_SIZE


def read(path: Path, kind: type[msgspec.Struct]) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]


async def trained_groups(client: AsyncClient) -> Any:
    async for result in client.results(0, unit="group", raw=True, follow=False):
        if "/held-out/" not in result.task_id:
            yield groups.build_group_from_tree(result.data, await client.trajectory(result.task_id), 0)


def check_labels(learner: Learner, kept: dict[int, Any], found: list[groups.RolloutGroup]) -> None:
    parts = [part for group in found for part in group.trees]
    versions = np.concatenate([part.columns.version for part in parts])
    behaviour = np.concatenate([part.columns.behavior_logprobs for part in parts])
    assert np.unique(versions).tolist() == list(range(STEPS))
    spanning = sum(
        len(np.unique(part.columns.version[part.columns.session == number])) > 1
        for part in parts
        for number in np.unique(part.columns.session)
    )
    assert spanning == (STEPS - 1) * GROUP_SIZE  # all but those of the first group
    own = np.full(len(versions), np.nan)
    other = np.full(len(versions), np.nan)
    for version in np.unique(versions).tolist():
        for into, chosen in ((own, versions == version), (other, versions == version + 1)):
            learner.model.load_state_dict(kept[version])
            scored = learner.compute_logprobs(pack_trees([part.tree for part in parts])).numpy()
            into[chosen] = scored[chosen]
    assert float(np.abs(own - behaviour).max()) < 1e-3
    assert float(np.nanmax(np.abs(other - behaviour))) > 1e-2  # the weights before would not have passed


def check_metrics(history: list[StepMetrics]) -> None:
    on_policy = [told.ratio_on_policy for told in history if told.ratio_on_policy is not None]
    assert on_policy
    assert all(ratio == pytest.approx(1, abs=0.01) for ratio in on_policy)
    assert max(told.lag_max or 0 for told in history) <= 3
    assert any(told.lag_max for told in history)
    assert all(told.probe_largest is None or told.probe_largest < 1e-3 for told in history)
    assert [told.step for told in history] == list(range(7))
    assert history[0].held_out is not None
    assert history[-1].held_out is not None
