"""What the bridge to TRL does without TRL: which sessions stand where, and as what. tests/trainers has its loops."""

import asyncio
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polar.bridges.bridge import BlockingBridge
from polar.bridges.rollouts import SessionGroup
from polar.bridges.trl.rollout_func import RolloutFunc, get_task_id, recorded_reward
from polar.client.calls import ClientError
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.export.trl import make_filler_row
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import make_session_item
from polar.testing.token_paths import make_path

PAD = 99


def session(name: str, traces: int = 1, *, scale: float | None = 1.0) -> SessionItem:
    """Each trace is a call of its own, since none goes on from another."""
    paths = [make_path(index, [10 + index], [20 + index, 21], session_id=name, scale=scale) for index in range(traces)]
    return make_session_item(SessionPaths(name, paths, 0.5), task_id="t")


class Service:
    """In place of the rollouts of a bridge: the groups that it has, and what was asked for."""

    def __init__(self, **groups: list[SessionItem]) -> None:
        self._groups = groups
        self.asked: list[tuple[str, str, int, float | None]] = []

    async def run_group(self, task: str, key: str, *, samples: int, sampling: SamplingOverrides) -> SessionGroup:
        self.asked.append((task, key, samples, sampling.temperature))
        items = self._groups[task]
        return SessionGroup(task, task, samples, items, [], Counter(timeout=samples - len(items)))


def trainer(*, training: bool = True, process: int = 0, rows: int | None = None) -> Any:
    """What the bridge looks at. With `rows` it is one that takes several a session."""
    made = SimpleNamespace(
        model=SimpleNamespace(training=training),
        num_generations=2,
        num_generations_eval=1,
        temperature=1.0,
        accelerator=SimpleNamespace(process_index=process),
        state=SimpleNamespace(global_step=3),
        processing_class=SimpleNamespace(pad_token_id=PAD),
    )
    if rows is not None:
        made.round_up_rows = lambda count: max(count, rows)
    return made


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[RolloutFunc]:
    file = tmp_path / "tasks.jsonl"
    made = [
        {"task_id": name, "instruction": "Go.", "agent": {"custom_shell": {"command": "true"}}} for name in ("a", "b")
    ]
    file.write_text("\n".join(json.dumps(one) for one in made))
    made_of = RolloutFunc({"name": "run-1", "tasks": [str(file)]})
    yield made_of
    made_of.bridge.close()


def over(rollouts: RolloutFunc, **groups: list[SessionItem]) -> Service:
    service = Service(**groups)
    rollouts.bridge.rollouts.run_group = service.run_group  # type: ignore[method-assign,assignment]
    return service


def test_tasks_are_the_data(rollouts: RolloutFunc) -> None:
    assert rollouts.build_dataset_rows() == [{"prompt": "a"}, {"prompt": "b"}]
    assert get_task_id("a") == get_task_id([{"role": "user", "content": "a"}]) == "a"


def test_a_group_is_asked_for_once(rollouts: RolloutFunc) -> None:
    """Its sessions stand in the order of the prompts; a second call at the same step is of other sessions."""
    service = over(rollouts, a=[session("a0"), session("a1")], b=[session("b0"), session("b1")])
    made = rollouts(["a", "a", "b", "b"], trainer())
    assert made["session_id"] == ["a0", "a1", "b0", "b1"]
    assert made["reward"] == [0.5] * 4
    assert service.asked == [("a", "train-3.1.0", 2, 1.0), ("b", "train-3.1.1", 2, 1.0)]
    rollouts(["a", "a"], trainer())
    rollouts(["b"], trainer(training=False))
    assert service.asked[2:] == [("a", "train-3.2.0", 2, 1.0), ("b", "eval-3.1.0", 1, 1.0)]


def test_processes_share_a_group(rollouts: RolloutFunc) -> None:
    """Three prompts each: the second process begins in the middle of the second group."""
    service = over(rollouts, a=[session("a0"), session("a1")], b=[session("b0"), session("b1")])
    made = rollouts(["b", "a", "a"], trainer(process=1))
    assert made["session_id"] == ["b1", "a0", "a1"]
    assert [key for _, key, *_ in service.asked] == ["train-3.1.1", "train-3.1.2"]


def test_further_traces_follow_all_sessions(rollouts: RolloutFunc) -> None:
    """Each says whose it is, and what is missing for even batches trains nothing."""
    over(rollouts, a=[session("a0", 3), session("a1", 2)])
    made = rollouts(["a", "a"], trainer(rows=8))
    assert made["session_id"][:5] == ["a0", "a1", "a0", "a0", "a1"]
    assert made["owner"][:5] == [0, 1, 0, 0, 1]
    assert made["prompt_ids"][:5] == [[10], [10], [11], [12], [11]]
    assert made["env_mask"] == [[1, 1]] * 5 + [[0]] * 3
    assert len(made["owner"]) == len(made["completion_ids"]) == 8


def test_a_trainer_that_takes_one_row_a_session(rollouts: RolloutFunc) -> None:
    over(rollouts, a=[session("a0"), session("a1", 2)])
    with pytest.raises(ConfigError, match=r"several traces.*grpo_trainer"):
        rollouts(["a", "a"], trainer())


def test_a_session_that_cannot_be_trained_on(rollouts: RolloutFunc) -> None:
    over(rollouts, a=[session("a0")], b=[])
    made = rollouts(["a", "a"], trainer())
    assert made["reward"] == [0.5, None]
    assert (made["prompt_ids"][1], made["env_mask"][1]) == ([PAD], [0])
    made = rollouts(["b", "b"], trainer())
    assert made["reward"] == [None, None]


@pytest.mark.parametrize("scale", [0.7, None])
def test_log_probabilities_of_another_temperature(rollouts: RolloutFunc, scale: float | None) -> None:
    over(rollouts, a=[session("a0"), session("a1", scale=scale)])
    with pytest.raises(ConfigError, match="temperature 1, and the log-probabilities of a1"):
        rollouts(["a", "a"], trainer())


def test_rewards() -> None:
    assert recorded_reward(["x", "y"], [1.0, None], more=1) == [1.0, None]
    assert make_filler_row({"weight": 1.0}, PAD, "timeout")["reason"] == "timeout"


def test_a_bridge_is_closed_with_its_rollouts(rollouts: RolloutFunc) -> None:
    """By whoever lets go of them, or by the end of the process."""
    own = RolloutFunc(rollouts.bridge.rollouts.settings)
    bridge = own.bridge
    bridge.run(asyncio.sleep(0))
    del own
    gc.collect()
    with pytest.raises(ClientError, match="closed"):
        bridge.run(asyncio.sleep(0))


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module over TRL's classes, with nothing in their places."""
    for module, *names in (
        ("accelerate", "PartialState"),
        ("datasets", "Dataset"),
        ("transformers", "TrainerCallback"),
        ("trl", "GRPOConfig", "GRPOTrainer"),
    ):
        made = ModuleType(module)
        made.__dict__.update({name: type(name, (), {}) for name in names})
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.delitem(sys.modules, "polar.bridges.trl.trainers", raising=False)
    yield import_module("polar.bridges.trl.trainers")
    sys.modules.pop("polar.bridges.trl.trainers")


class Transfer:
    def __init__(self, version: int) -> None:
        self.version = version


async def test_a_worker_that_begins_with_other_weights_asks_for_other_groups(trainers: Any) -> None:
    """One that begins with the same has trained on none of them."""
    service = Service(a=[session("a0"), session("a1")])
    args = SimpleNamespace(queue_maxsize=1, num_generations=2, temperature=1.0)
    for version in (0, 0, 3):
        worker = trainers.RolloutWorker(SimpleNamespace(rollouts=service), Transfer(version), args)
        worker.tasks = ["a"]
        worker._main = lambda: None
        worker._thread = SimpleNamespace(start=lambda: None)
        worker.start()
        worker._transfer.version += 1  # a step of it
        await worker._run_group(0)
        await worker._run_group(1)
    assert [key for _, key, *_ in service.asked] == ["async-0.0", "async-0.1"] * 2 + ["async-3.0", "async-3.1"]


def test_a_workers_advantages_are_those_of_trls_own(trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the deviation of a whole, and for every trace of a session."""
    monkeypatch.setattr(trainers, "to_sample", lambda row, **fields: (row["session_id"], fields["advantage"]))
    args = SimpleNamespace(queue_maxsize=8, num_generations=2, temperature=1.0)
    worker = trainers.RolloutWorker(SimpleNamespace(), Transfer(0), args)
    items = [session("a0", 2), session("a1")]
    items[1].session.reward = 1.5
    worker._put_group(0, SessionGroup("a", "a", 2, items, []))
    found = [worker.rollout_buffer.get_nowait() for _ in range(3)]
    assert [name for name, _ in found] == ["a0", "a0", "a1"]
    assert [advantage for _, advantage in found] == pytest.approx([-1.0, -1.0, 1.0])


def test_the_asynchronous_bridge_is_closed_after_training(trainers: Any, rollouts: RolloutFunc, tmp_path: Path) -> None:
    bridge = BlockingBridge(rollouts.bridge.rollouts.settings)
    trainers.WeightTransfer(bridge, None, tmp_path).destroy()
    with pytest.raises(ClientError, match="closed"):
        bridge.run(asyncio.sleep(0))
