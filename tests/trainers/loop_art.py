"""ART's own local backend over Polar's rollouts, on the CPU (tests/trainers/test_art.py).

    python loop_art.py WHAT ASKED FOUND          both are files of JSON

Types, backend, tokenizing, packing, files and loss are ART's. What stands in for the rest: `Service`, a model of
transformers with a plain optimizer, for the one that needs unsloth and vLLM.
"""

import for_art  # noqa: F401  # isort: skip

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from art import TrainableModel
from art.local.backend import LocalBackend
from art.loss import loss_fn
from art.preprocessing.pack import packed_tensors_from_dir
from art.types import TrainConfig
from splitting import split
from transformers import AutoModelForCausalLM

from polar.bridges.art import Art, to_trajectory_group


class Service:
    """ART's ModelService, of one process: one step of all sequences."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.given: list[dict[str, Any]] = []
        self.gradients: list[Any] = []

    async def train(self, tensors: Any, config: Any, dev_config: Any, verbose: bool) -> AsyncIterator[dict[str, float]]:
        packed: Any = packed_tensors_from_dir(**tensors)
        named = ("tokens", "input_pos", "group_ids", "assistant_mask", "logprobs", "advantages", "weights")
        self.given.append({name: packed[name].tolist() for name in named})
        self.optimizer.zero_grad()
        longest = int((packed["group_ids"] != -1).sum(1).max())
        short = {name: packed[name][:, :longest] for name in [*named, "parent_ids"]}
        ids = short["tokens"].clamp(min=0)
        logits = self.model(input_ids=ids, attention_mask=(short["group_ids"] != -1).long()).logits
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids.roll(-1, 1)[:, :, None])[:, :, 0]
        loss = loss_fn(short, logprobs, None, None, dev_config)  # type: ignore[arg-type]
        loss.policy_loss.backward()
        self.gradients.append(torch.cat([one.grad.flatten() for one in self.model.parameters()]).clone())
        self.optimizer.step()
        yield {"loss": loss.policy_loss.item()}


class Backend(LocalBackend):
    def __init__(self, folder: str, service: Service) -> None:
        super().__init__(in_process=True, path=folder)
        self.service = service

    async def _get_service(self, model: Any) -> Any:
        return self.service


async def trained(asked: dict[str, Any], groups: list[Any]) -> Service:
    service = Service(asked["model"])
    backend = Backend(asked["folder"], service)
    model = TrainableModel(name="polar", project="test", base_model=asked["model"])
    model._internal_config = {"init_args": {"max_seq_length": 2048}}
    async for _ in backend._train_model(model, groups, TrainConfig(learning_rate=0.5), {}):
        pass
    return service


async def train(asked: dict[str, Any]) -> dict[str, Any]:
    """A step of ART's; rewards are set, so that there is something to learn."""
    async with Art(asked["settings"]) as polar:
        engine = SimpleNamespace(inference_base_url=asked["engine"] + "/v1", get_step=lambda: asyncio.sleep(0, 3))
        await polar.attach(engine)
        groups = await polar.run_groups(asked["tasks"], 3)
        versions = [replica["version"] for replica in (await polar.rollouts.client.policy())["replicas"]]
    rewards = [[one.reward for one in group] for group in groups]
    for group in groups:
        for place, one in enumerate(group):
            one.reward = float(place % 2)
    service = await trained(asked, groups)
    before = torch.cat([one.detach().flatten() for one in Service(asked["model"]).model.parameters()])
    after = torch.cat([one.detach().flatten() for one in service.model.parameters()])
    return {
        "given": service.given,
        "moved": (after - before).abs().max().item(),
        "versions": versions,
        "rewards": rewards,
        "tasks": [group.metadata["task_id"] for group in groups],
    }


async def splitting(asked: dict[str, Any]) -> dict[str, float]:
    """How far gradients are apart, relative to their size, when each call of some sessions is a history of its own."""
    async with Art(asked["settings"]) as polar:
        groups = await polar.rollouts.run_groups(["plain-0", "plain-1"], "splitting")
    gradients = []
    for change in (lambda item: item, split):  # of every other session
        made = []
        for group in groups:
            for place, item in enumerate(group.items):
                item.session.reward = float(place % 2)
            group.items = [change(item) if place % 2 else item for place, item in enumerate(group.items)]
            made.append(to_trajectory_group(group))
        gradients += (await trained(asked, made)).gradients
    whole, parts = gradients
    return {"gradient": whole.norm().item(), "apart": ((whole - parts).norm() / whole.norm()).item()}


def main() -> None:
    what, question, answer = sys.argv[1:]
    found = asyncio.run(globals()[what](json.loads(Path(question).read_text())))
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
