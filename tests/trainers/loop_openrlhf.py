"""OpenRLHF's own training loop over Polar's rollouts, on the CPU (tests/trainers/test_openrlhf.py).

    python loop_openrlhf.py WHAT ASKED FOUND          both are files of JSON

Trainer, sample generator, experience maker, replay buffer, actor and loss are OpenRLHF's, and so is what a rollout
actor does with an agent's file. What stands in for the rest: `Strategy`, for DeepSpeed's; `Group`, for a group of
actors on GPUs, with one in this process; and `Rollout`, for a rollout actor without the vLLM in it. Polar's sessions
are sampled at an engine of their own, which gets the weights through a file.
"""

import without_gpu  # noqa: F401  # isort: skip

import json
import os
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import msgspec
import ray
import torch
from openrlhf.models import Actor
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, _load_agent_executor
from safetensors.torch import save_file
from splitting import split
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM

from polar.bridges.openrlhf.trainer import make_polar_trainer
from polar.bridges.rollouts import RolloutClient

AGENT = """
import without_gpu
from loop_openrlhf import change
from polar.bridges.openrlhf import make_agent_executor

AgentExecutor = change(make_agent_executor(serves_engine=False))
"""


def tree(values: dict[str, Any]) -> Any:
    """OpenRLHF's arguments: names with dots."""
    root = SimpleNamespace()
    for name, value in values.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if not hasattr(place, part):
                setattr(place, part, SimpleNamespace())
            place = getattr(place, part)
        setattr(place, last, value)
    return root


def arguments(asked: dict[str, Any]) -> Any:
    return tree(
        {
            "actor.aux_loss_coef": 0.0,
            "actor.dual_clip": None,
            "actor.entropy_coef": None,
            "actor.eps_clip_low_high": (0.2, 0.2),
            "actor.loss_agg_mode": "token-mean",
            "actor.policy_loss_type": "ppo",
            "algo.advantage.estimator": asked.get("estimator", "group_norm"),
            "algo.advantage.gamma": 1.0,
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "clip",
            "algo.advantage.is_correction_gating": "ratio",
            "algo.advantage.is_correction_threshold": (0.5, 5.0),
            "algo.advantage.no_std_norm": False,
            "algo.dynamic_filtering_enable": False,
            "algo.kl.init_coef": 0.0,
            "algo.kl.target": None,
            "algo.kl.use_loss": False,
            "ckpt.best_metric_key": "none",
            "ckpt.load_enable": False,
            "ckpt.path": asked["folder"],
            "ckpt.save_steps": -1,
            "critic.freezing_steps": -1,
            "data.apply_chat_template": False,
            "data.dataloader_num_workers": 0,
            "data.disable_fast_tokenizer": False,
            "data.input_key": "prompt",
            "data.input_template": None,
            "data.label_key": "task_id",
            "data.max_samples": 100,
            "data.prompt_dataset": asked["rows"],
            "data.prompt_probs": None,
            "data.prompt_split": "train",
            "ds.enable_sleep": False,
            "ds.packing_samples": False,
            "ds.ring_attn_size": 1,
            "ds.tensor_parallel_size": 1,
            "eval.dataset": asked["rows"],
            "eval.n_samples_per_prompt": 1,
            "eval.split": "train",
            "eval.steps": asked.get("eval_steps", -1),
            "eval.temperature": 1.0,
            "logger.logging_steps": 1,
            "logger.tensorboard_dir": None,
            "logger.wandb.key": None,
            "reward.clip_range": None,
            "rollout.batch_size": 2,
            "rollout.micro_batch_size": 2,
            "rollout.n_samples_per_prompt": 4,
            "train.async_enable": False,
            "train.batch_size": asked["train_batch_size"],
            "train.colocate_actor_ref": False,
            "train.colocate_all": False,
            "train.colocate_critic_reward": False,
            "train.dynamic_batch_enable": False,
            "train.max_epochs": 1,
            "train.num_episodes": 1,
            "train.seed": 0,
            "use_ms": False,
            "vllm.enable_sleep": False,
        }
    )


class Strategy:
    """OpenRLHF's DeepspeedStrategy, of one process: it steps when so many micro-batches have come."""

    ring_attn_group = None

    def __init__(self, args: Any, steps: bool) -> None:
        self.args = args
        self.accumulated_gradient = args.train.batch_size // MICRO
        self.gradients: list[Any] = []
        self._steps = steps
        self._backward = 0

    def is_rank_0(self) -> bool:
        return True

    def print(self, *_: Any) -> None: ...

    def setup_dataloader(
        self, data: Any, batch_size: int, pin: bool, shuffle: bool, collate_fn: Any = None, **_: Any
    ) -> Any:
        return StatefulDataLoader(data, batch_size=batch_size, collate_fn=collate_fn)

    def backward(self, loss: Any, model: Any, optimizer: Any) -> None:
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str) -> None:
        self._backward += 1
        if self._backward % self.accumulated_gradient:
            return
        self.gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]).clone())
        if self._steps:
            optimizer.step()
        optimizer.zero_grad()

    def get_grad_norm(self, model: Any) -> float:
        return 0.0

    def all_reduce(self, values: Any, **_: Any) -> Any:
        return values


MICRO = 2


def actor_of(folder: str) -> Any:
    """OpenRLHF loads bf16 and fp16 only."""
    actor = Actor(AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager"))
    actor.packing_samples = actor.is_vlm = False
    return actor


class Recording(ActorPPOTrainer):
    def training_step(self, experience: Any, *rest: Any) -> Any:
        fields = ("sequences", "attention_mask", "action_mask", "rollout_log_probs", "advantages")
        self.found.append({name: getattr(experience, name).tolist() for name in fields})
        return super().training_step(experience, *rest)


class Group:
    """OpenRLHF's RayActorGroup, with one actor in this process."""

    duplicate_actors = 1

    def __init__(self, asked: dict[str, Any], strategy: Strategy) -> None:
        self.asked = asked
        self.actor = actor_of(asked["model"])
        optimizer = torch.optim.AdamW(self.actor.parameters(), lr=1e-3)
        scheduler = SimpleNamespace(get_last_lr=lambda: [1e-3])
        self.trainer = Recording(
            strategy,
            self.actor,
            None,
            optimizer,
            scheduler,
            micro_train_batch_size=MICRO,
            dataloader_pin_memory=False,
        )
        self.trainer.found = []
        self.version = 0

    def async_run_method_batch(self, method_name: str, **lists: Any) -> list[Any]:
        calls = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        return [ray.put([getattr(self, method_name)(**call) for call in calls])]

    def async_run_method(self, method_name: str, **named: Any) -> list[Any]:
        return [ray.put(getattr(self, method_name)(**named))]

    @torch.no_grad()
    def forward(self, sequences: Any, action_mask: Any, attention_mask: Any, **_: Any) -> Any:
        self.actor.eval()
        return self.actor(sequences, action_mask, attention_mask)

    def append(self, experience: Any) -> None:
        self.trainer.replay_buffer.append(experience)

    def fit(self, kl_ctl: float) -> Any:
        told = self.trainer.ppo_train(kl_ctl)
        self.trainer.replay_buffer.clear()
        return told

    def broadcast_to_vllm(self) -> None:
        self.version += 1
        file = Path(self.asked["folder"], f"{self.version}.safetensors")
        save_file({name: tensor.clone() for name, tensor in self.actor.model.state_dict().items()}, file)
        body = json.dumps({"path": str(file), "version": self.version}).encode()
        to = urllib.request.Request(
            self.asked["engine"] + "/update_weights", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(to) as answer:
            assert answer.status == 200


class Rollout(RolloutRayActor.__ray_metadata__.modified_class):
    async def __init__(self, agent: str) -> None:
        self.executor = _load_agent_executor(agent)

    def get_num_unfinished_requests(self) -> int:
        return 0


def change(executor: type[Any]) -> type[Any]:
    """Where it is asked for: sessions that are there already, split or not, with rewards that there is something to
    learn from."""
    how = os.environ.get("CHANGE")
    if how is None:
        return executor

    ran = RolloutClient.run_group

    async def group(self: RolloutClient, task: str, key: str, **more: Any) -> Any:
        found = await ran(self, task, "given", samples=more["samples"])
        items = [rewarded(one, 1.0 / (1 + index)) for index, one in enumerate(found.items)]
        if how == "split":
            items = [split(one) if index % 2 == 0 else one for index, one in enumerate(items)]
        return msgspec.structs.replace(found, items=items)

    RolloutClient.run_group = group  # type: ignore[method-assign]
    return executor


def rewarded(item: Any, reward: float) -> Any:
    traces = [msgspec.structs.replace(trace, reward=reward) for trace in item.trajectory.traces]
    return msgspec.structs.replace(
        item,
        session=msgspec.structs.replace(item.session, reward=reward),
        trajectory=msgspec.structs.replace(item.trajectory, traces=traces),
    )


def loaded(rows: str, *_: Any, **__: Any) -> Any:
    return datasets.Dataset.from_list([json.loads(line) for line in Path(rows).read_text().splitlines()])


def rollout_of(asked: dict[str, Any], change: str | None = None) -> Any:
    agent = Path(asked["folder"], "agent.py")
    agent.write_text(AGENT)
    environment = {"POLAR_BRIDGE": asked["settings"], **({} if change is None else {"CHANGE": change})}
    return ray.remote(Rollout).options(num_cpus=0, runtime_env={"env_vars": environment}).remote(str(agent))


def trained(asked: dict[str, Any], rollout: Any, *, steps: bool = True) -> Any:
    torch.manual_seed(0)
    args = arguments(asked)
    strategy = Strategy(args, steps)
    group = Group(asked, strategy)
    own = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
    parts = (group, None, None, None, [rollout])
    trainer = make_polar_trainer(own, asked["settings"], serves_engines=False)(
        asked["model"], strategy, *parts, max_len=512, temperature=1.0, top_p=1.0
    )
    if not steps:
        trainer.broadcast_to_vllm = lambda: None
    trainer.fit()
    return group, strategy


def train(asked: dict[str, Any]) -> dict[str, Any]:
    group, strategy = trained(asked, rollout_of(asked))
    before = actor_of(asked["model"]).parameters()
    after = group.actor.parameters()
    return {
        "batches": group.trainer.found,
        "optimizer_steps": len(strategy.gradients),
        "moved": max((one - other).abs().max().item() for one, other in zip(before, after, strict=True)),
    }


def splitting(asked: dict[str, Any]) -> dict[str, Any]:
    """How far the gradients of whole and of split sessions are apart, relative to their size."""
    rollouts = [rollout_of(asked, change) for change in ("whole", "split")]
    found = {}
    for estimator in ("group_norm", "rloo", "reinforce_baseline"):
        (whole,), (parts,) = (
            trained(asked | {"estimator": estimator}, rollout, steps=False)[1].gradients for rollout in rollouts
        )
        assert whole.norm() > 0
        found[estimator] = float((whole - parts).norm() / whole.norm())
    return found


def main() -> None:
    what, asked, found = sys.argv[1:]
    samples_generator.SamplingParams = SimpleNamespace  # vLLM's, which has these fields
    ppo_trainer.blending_datasets = loaded
    os.environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    torch.distributed.init_process_group("gloo", init_method=f"file://{found}.store", rank=0, world_size=1)
    told = globals()[what](json.loads(Path(asked).read_text()))
    Path(found).write_text(json.dumps(told))
    torch.distributed.destroy_process_group()
    ray.shutdown()


if __name__ == "__main__":
    import loop_openrlhf  # by its name, by which Ray's workers know it

    loop_openrlhf.main()
