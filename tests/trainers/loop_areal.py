"""AReaL's own executor, advantages and loss over Polar's rollouts, on the CPU (tests/trainers/test_areal.py).

    python loop_areal.py WHAT ASKED FOUND          both are files of JSON

Engine, workflow executor, data path, PPO actor and loss are AReaL's. What stands in for the rest: `Local`, a model of
transformers with a plain optimizer, for its FSDP engine; and the few lines of its trainer that go from step to step.
"""

import for_areal  # noqa: F401  # isort: skip

import json
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, PPOActorConfig
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.trainer.ppo.actor import PPOActor
from areal.utils.data import concat_padded_tensors, pack_tensor_dict
from safetensors.torch import save_file
from splitting import split
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM

from polar.bridges.advantages import compute_session_advantages
from polar.bridges.areal import PolarWorkflow, follow
from polar.bridges.bridge import BlockingBridge
from polar.export.areal import ArealExporter, to_tensors


class Local:
    """AReaL's TrainEngine, of one process."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.version = 0
        self.given: list[dict[str, Any]] = []
        self.gradients: list[Any] = []

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def get_version(self) -> int:
        return self.version

    def forward(self, input_: dict[str, Any], aggregate_fn: Any) -> Any:
        with torch.no_grad():
            rows = self._logprobs(input_["input_ids"], input_["attention_mask"])[0]
            longest = input_["input_ids"].shape[1]
            return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])

    def train_batch(self, mb: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        packed = pack_tensor_dict(mb)
        self.given.append({name: value.tolist() for name, value in packed.items() if isinstance(value, torch.Tensor)})
        rows, entropies = self._logprobs(mb["input_ids"], mb["attention_mask"])
        assert loss_weight_fn(packed) > 0
        self.optimizer.zero_grad()
        loss_fn(torch.cat(rows), torch.cat(entropies), packed).backward()
        self.gradients.append(torch.cat([one.grad.flatten() for one in self.model.parameters()]).clone())
        self.optimizer.step()
        return {}

    def _logprobs(self, ids: Any, mask: Any) -> tuple[list[Any], list[Any]]:
        """Of the token behind each, row by row without padding, as AReaL aligns them."""
        rows, entropies = [], []
        for row, real in zip(ids, mask.bool(), strict=True):
            tokens = row[real].long()
            distribution = torch.log_softmax(self.model(input_ids=tokens[None]).logits[0], -1)
            rows.append(distribution.gather(-1, tokens.roll(-1)[:, None])[:, 0])
            entropies.append(-(distribution.exp() * distribution).sum(-1))
        return rows, entropies


def actor_of(engine: Local) -> tuple[Any, PPOActor]:
    config = PPOActorConfig(
        experiment_name="polar",
        trial_name="test",
        path="",
        backend="fsdp:d1",
        reward_norm=None,
        adv_norm=None,
        kl_ctl=0.0,
        reward_scaling=1.0,
        reward_bias=0.0,
        ppo_n_minibatches=1,
        use_decoupled_loss=True,
        recompute_logprob=True,
    )
    return config, PPOActor(config, engine)  # type: ignore[arg-type]


def step(actor: PPOActor, batch: list[dict[str, Any]]) -> None:
    """As PPOTrainer.train has it."""
    for one, logprobs in zip(batch, actor.compute_logp(batch) or [], strict=True):
        one["prox_logp"] = logprobs
    actor.ppo_update(actor.compute_advantages(batch))


def train(asked: dict[str, Any]) -> dict[str, Any]:
    engine = Local(asked["model"])
    before = torch.cat([one.detach().flatten() for one in engine.model.parameters()]).clone()
    config, actor = actor_of(engine)
    rollout = RemotevLLMEngine(
        InferenceEngineConfig(
            experiment_name="polar",
            trial_name="test",
            backend="vllm:d1",
            consumer_batch_size=2,
            max_concurrent_rollouts=2,
            max_head_offpolicyness=0,
            check_trajectory_format=True,
        )
    )
    rollout.initialize(addr=asked["engine"].removeprefix("http://"), train_data_parallel_size=1)
    gconfig = GenerationHyperparameters(n_samples=1)
    trainer = SimpleNamespace(config=SimpleNamespace(gconfig=gconfig, actor=config), rollout=rollout)
    rows = [{"task_id": task} for task in asked["tasks"]]
    data = StatefulDataLoader(rows, batch_size=2, collate_fn=list)
    versions = []
    with follow(trainer, asked["settings"]):
        try:
            for version in range(2):
                batch = rollout.prepare_batch(
                    data,
                    workflow="polar.bridges.areal.PolarWorkflow",
                    workflow_kwargs={"source": asked["settings"], "gconfig": gconfig},
                    group_size=1,
                )
                real = [one["versions"][one["attention_mask"].bool()] for one in batch]
                versions.append(sorted({int(version) for one in real for version in one} - {-1}))
                step(actor, batch)
                rollout.pause()
                load(engine, asked, version + 1)
                engine.version = version + 1
                rollout.set_version(version + 1)
                rollout.resume()
        finally:
            rollout.destroy()
    after = torch.cat([one.detach().flatten() for one in engine.model.parameters()])
    return {"given": engine.given, "versions": versions, "moved": (after - before).abs().max().item()}


def load(engine: Local, asked: dict[str, Any], version: int) -> None:
    """For AReaL's own update of its servers."""
    file = Path(asked["folder"], f"{version}.safetensors")
    save_file({name: tensor.clone() for name, tensor in engine.model.state_dict().items()}, file)
    body = json.dumps({"path": str(file), "version": version}).encode()
    request = urllib.request.Request(asked["engine"] + "/update_weights", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def splitting(asked: dict[str, Any]) -> dict[str, float]:
    """How far gradients are apart, relative to their size, when each call of some sessions is a row of its own."""
    with BlockingBridge(asked["settings"]) as bridge:
        groups = bridge.run_groups(["plain-0", "plain-1"], "splitting")
    gradients = []
    for change in (lambda item: item, split):  # of every other session
        batch = []
        for group in groups:
            credits = compute_session_advantages([float(place % 2) for place in range(len(group.items))])
            items = [change(item) if place % 2 else item for place, item in enumerate(group.items)]
            rows = [
                to_tensors(row, credit)
                for item, credit in zip(items, credits, strict=True)
                for row in ArealExporter().build_lines(item)
            ]
            batch.append(concat_padded_tensors(rows))
        engine = Local(asked["model"])
        step(actor_of(engine)[1], batch)
        gradients += engine.gradients
    whole, parts = gradients
    return {"gradient": whole.norm().item(), "apart": ((whole - parts).norm() / whole.norm()).item()}


def main() -> None:
    what, question, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(globals()[what](json.loads(Path(question).read_text()))))


if __name__ == "__main__":
    assert PolarWorkflow  # AReaL finds it by its name
    main()
