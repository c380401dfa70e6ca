"""The contract of bridges, kept by Polar's own, as far as they run without their trainers: tests/trainers has those."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from polar.bridges import skyrl, tinker
from polar.bridges.bridge import BlockingBridge, Bridge
from polar.bridges.nemo_gym import SessionRunner, split_traces
from polar.bridges.nemo_rl import GROUP_FIELD, SESSION_FIELD, NemoRl
from polar.bridges.settings import load_settings
from polar.bridges.skyrl import Generator
from polar.bridges.slime import SlimeBridge
from polar.bridges.tinker import Tinker
from polar.bridges.trl import RolloutFunc
from polar.plugins import load
from polar.testing import BridgeContract
from polar.testing.bridges import TrainerGroup, TrainerTrace, group_sessions
from polar.testing.exporters import ExportedTrace
from tests.unit.bridges import slime_contract
from tests.unit.export import reading


class TestVerifiers(BridgeContract):
    plugin = load("bridges", "verifiers")


class TestArt(BridgeContract):
    """Its own types are in tests/trainers/test_art.py."""

    plugin = load("bridges", "art")


class _OverBlockingBridge(BridgeContract):
    """What such a bridge hands over is made in the trainer's own process: see tests/trainers."""

    def open_bridge(self, settings: Mapping[str, Any]) -> Bridge:
        made: Bridge = self.plugin(BlockingBridge(settings))
        return made


class TestVerl(_OverBlockingBridge):
    plugin = load("bridges", "verl")


class TestOpenRlhf(_OverBlockingBridge):
    plugin = load("bridges", "openrlhf")


class TestAreal(BridgeContract):
    plugin = load("bridges", "areal")

    def open_bridge(self, settings: Mapping[str, Any]) -> Bridge:
        made: Bridge = self.plugin(BlockingBridge(settings), SimpleNamespace())
        return made


class TestTinker(BridgeContract):
    plugin = load("bridges", "tinker")
    keeps_versions = False

    @pytest.fixture(autouse=True)
    def no_datums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows as they are: Tinker's own type is not here."""
        monkeypatch.setattr(tinker, "to_datum", lambda row, _: row)

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        assert isinstance(bridge, Tinker)
        batch = await asyncio.to_thread(bridge.batch, tasks, 1)
        rows = (
            (row["polar"]["task_id"].rpartition("/")[2], row["polar"]["session_id"], TrainerTrace(trace))
            for row in batch.datums
            for trace in reading.tinker(row)
        )
        return group_sessions(rows, tasks)


class TestSlime(BridgeContract):
    """With slime's `Sample` as its sources have it."""

    plugin = load("bridges", "slime")

    @pytest.fixture(autouse=True)
    def trainer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slime_contract.install(monkeypatch)

    def open_bridge(self, settings: Mapping[str, Any]) -> Bridge:
        return SlimeBridge(slime_contract.arguments(polar=settings))

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        assert isinstance(bridge, SlimeBridge)
        bridge.args.rollout_batch_size = len(tasks)
        source = slime_contract.Source(list(tasks), self.samples)
        groups, _ = await asyncio.to_thread(bridge.bridge.run, bridge.collect_rollout(0, source))
        rows = (
            (sample.prompt, sample.metadata["session_id"], _read_sample(sample))
            for group in groups
            for session in group
            for sample in session
            if not sample.remove_sample  # what stands in for sessions that can't be trained on
        )
        return group_sessions(rows, tasks)


def _read_sample(sample: Any) -> TrainerTrace:
    prompt = len(sample.tokens) - sample.response_length
    logprobs = [0.0] * prompt + sample.rollout_log_probs
    versions = zip(sample.metadata["policy_versions"], sample.loss_mask, strict=True)
    trace = ExportedTrace.make(sample.tokens, [0] * prompt + sample.loss_mask, logprobs, sample.metadata["reward"])
    return TrainerTrace(trace, tuple(version for version, trains in versions if trains))


class TestSkyRl(BridgeContract):
    plugin = load("bridges", "skyrl")
    keeps_versions = False

    @pytest.fixture(autouse=True)
    def no_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lines as they are: SkyRL's own type is not here."""
        monkeypatch.setattr(skyrl, "to_generator_output", lambda lines: {"lines": lines, "rollout_metrics": {}})

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        assert isinstance(bridge, Generator)
        asked = {
            "batch_metadata": SimpleNamespace(training_phase="train", global_step=1),
            "sampling_params": None,
            "trajectory_ids": [SimpleNamespace(instance_id=task) for task in tasks for _ in range(self.samples)],
            "env_extras": [{"task_id": task} for task in tasks for _ in range(self.samples)],
        }
        rows = (
            (one["instance_id"], str(one["repetition_id"]), TrainerTrace(trace))
            for line in (await bridge.generate(asked))["lines"]
            for one, trace in zip(line["trajectory_ids"], reading.skyrl(line), strict=True)
        )
        return group_sessions(rows, tasks)


class TestTrl(BridgeContract):
    plugin = load("bridges", "trl")
    keeps_versions = False

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        assert isinstance(bridge, RolloutFunc)
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True),
            num_generations=self.samples,
            temperature=1.0,
            accelerator=SimpleNamespace(process_index=0),
            state=SimpleNamespace(global_step=1),
            processing_class=SimpleNamespace(pad_token_id=0),
            round_up_rows=lambda count: count,
        )
        prompts = [task for task in tasks for _ in range(self.samples)]
        columns = await asyncio.to_thread(bridge, prompts, trainer)
        columns.pop("owner")
        made = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = (
            (row["task_id"].rpartition("/")[2], row["session_id"], TrainerTrace(trace))
            for row in made
            if row["session_id"] is not None
            for trace in reading.trl(row)
        )
        return group_sessions(rows, tasks)


class TestNemoRl(BridgeContract):
    plugin = load("bridges", "nemo-rl")
    keeps_versions = False

    def open_bridge(self, settings: Mapping[str, Any]) -> Bridge:
        return NemoRl(BlockingBridge(settings), rows=32)

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        assert isinstance(bridge, NemoRl)
        rows = [{"task_id": task} for task in tasks for _ in range(self.samples)]
        batch = bridge.build_batch(await asyncio.to_thread(bridge.run_groups, rows, {}))
        numbers = zip(batch[GROUP_FIELD].tolist(), batch[SESSION_FIELD].tolist(), strict=True)
        rewards = batch["total_reward"].tolist()
        traces = map(_read_message_log, batch["message_log"], rewards)
        return group_sessions(
            (
                (tasks[group], str(session), trace)
                for (group, session), trace in zip(numbers, traces, strict=True)
                if group >= 0
            ),
            tasks,
        )


def _read_message_log(log: Sequence[Mapping[str, Any]], reward: float) -> TrainerTrace:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for message in log:
        ids = message["token_ids"].tolist()
        trains = message["role"] == "assistant"
        tokens += ids
        mask += [int(trains)] * len(ids)
        logprobs += message["generation_logprobs"].tolist() if trains else [0.0] * len(ids)
    return TrainerTrace(ExportedTrace.make(tokens, mask, logprobs, reward))


class TestNemoGym(BridgeContract):
    """The Gym has a run for each session: a group is as many rows."""

    plugin = load("bridges", "nemo-gym")
    keeps_versions = False

    def open_bridge(self, settings: Mapping[str, Any]) -> Bridge:
        return SessionRunner(load_settings(settings), resume=True)

    async def take_groups(self, bridge: Bridge, tasks: Sequence[str]) -> list[TrainerGroup]:
        assert isinstance(bridge, SessionRunner)
        return [
            [list(_read_run(await bridge.run(_row(task, index)))) for index in range(self.samples)] for task in tasks
        ]


def _row(task: str, index: int) -> dict[str, Any]:
    return {"task_id": task, "_ng_task_index": 0, "_ng_rollout_index": index, "responses_create_params": {}}


def _read_run(run: Mapping[str, Any]) -> Iterator[TrainerTrace]:
    if "_ng_failure_class" not in run:
        for row in split_traces(run):
            for trace in reading.nemo_gym(row):
                yield TrainerTrace(trace)
