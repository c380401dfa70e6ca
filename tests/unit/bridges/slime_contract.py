"""slime as its users' code knows it: a `Sample`'s fields, what a rollout function returns, and the arithmetic behind.

slime has no package. Names, shapes and the reduction are those of its sources of mid-2026: a sample's tokens are
divided by the mask sum of its whole rollout (`rollout_id`), and the sum of that by the number of rollouts.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass
class Sample:
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Sample":
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**known | {"status": cls.Status(fields["status"])})

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status.value}

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward  # type: ignore[index]


class OldSample(Sample):
    """Of a trainer that knows no rollouts."""


OldSample.__dataclass_fields__ = {name: f for name, f in Sample.__dataclass_fields__.items() if name != "rollout_id"}


@dataclass
class RolloutFnTrainOutput:
    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def read_file(path: str) -> Iterator[Any]:
    return (json.loads(line) for line in Path(path).read_text().splitlines())


class Source:
    """A data source: prompts in turn, each as a group."""

    def __init__(self, tasks: list[str], samples: int) -> None:
        self.tasks, self.samples, self.taken, self.metadata = tasks, samples, 0, {}  # type: ignore[var-annotated]

    def get_samples(self, number: int) -> list[list[Sample]]:
        groups = []
        for _ in range(number):
            task, first = self.tasks[self.taken % len(self.tasks)], self.taken * self.samples
            groups.append([Sample(self.taken, first + place, prompt=task) for place in range(self.samples)])
            self.taken += 1
        return groups

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
            "custom_reward_post_process_path": "polar.bridges.slime.normalize_rewards",
            "calculate_per_token_loss": False,
            "reward_key": None,
            "rollout_batch_size": 2,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": 4,
            "sglang_router_ip": None,
            "eval_datasets": [],
            **changes,
        }
    )


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    for name in ("slime", "slime.rollout", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("slime.rollout.base_types", "slime.utils.types", "slime.utils.data"):
        monkeypatch.setitem(sys.modules, name, here)


def reduced(samples: list[Any], rewards: list[float], model: Any) -> torch.Tensor:
    """The policy's loss at the policy that sampled: its gradient is that of the log-probabilities."""
    totals: defaultdict[Any, int] = defaultdict(int)
    for sample in samples:
        totals[sample.rollout_id] += sum(sample.loss_mask)
    loss = torch.zeros(())
    for sample, advantage in zip(samples, rewards, strict=True):
        ids = torch.tensor(sample.tokens)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask)
        loss = loss - (logprobs[-sample.response_length :] * mask).sum() * advantage / max(totals[sample.rollout_id], 1)
    return loss / len(totals)
