"""SkyRL's own training loop over Polar's rollouts, on the CPU (tests/trainers/test_skyrl.py).

    python loop_skyrl.py WHAT ASKED FOUND          both are files of JSON

The trainer, its configuration, data, advantages, worker and loss are SkyRL's. What stands in for the rest: `Local`, for
the dispatch that SkyRL has over Ray and GPUs, with one worker in this process; and `Client`, for SkyRL's client of its
vLLM servers, which has the engine's address. Weights go to that engine through a file.
"""

import without_gpu  # noqa: F401  # isort: skip

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import torch
from safetensors.torch import save_file
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.workers import worker as workers
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.callbacks import TrainingCallback
from splitting import split
from transformers import AutoTokenizer

from polar.bridges.rollouts import SessionGroup
from polar.bridges.skyrl import Generator, make_polar_trainer


class Plain:
    """SkyRL's DistributedStrategy, of one process."""

    def backward(self, loss: Any, model: Any, optimizer: Any) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str) -> Any:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def all_reduce(self, values: Any, **_: Any) -> Any:
        return dict(values)


class Worker(workers.PolicyWorkerBase):
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.model = HFModelWrapper(cfg.policy.model.path, bf16=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = SimpleNamespace(get_last_lr=lambda: [1e-3])
        self.strategy = Plain()
        self.mesh_rank = MeshRank(0, 0, 0, 0, world_size=1, dp_size=1, pp_size=1)
        self.device_mesh = SimpleNamespace(get_group=lambda _: None)
        self.policy_loss_fn = workers.PolicyLossRegistry.get(cfg.algorithm.policy_loss_type)


class Local:
    """SkyRL's WorkerDispatch, without Ray."""

    def __init__(self, cfg: Any, engine: str, steps: bool) -> None:
        self.worker = Worker(cfg.trainer)
        self.engine = engine
        self.steps = steps
        self.gradients: list[Any] = []
        self.saved = 0

    def get_lcm_dp_size(self) -> int:
        return 1

    def dp_size(self, model: str) -> int:
        return 1

    def empty_cache(self, model: str | None = None) -> None: ...

    def init_weight_sync_state(self, client: Any) -> None: ...

    def stage_data(self, model: str, data: Any, boundaries: Any) -> list[Any]:
        return [data[start:stop] for start, stop in boundaries]

    def forward(self, model: str, data: Any) -> Any:
        return self.worker.forward(data)

    forward_from_staged = forward

    def forward_backward_from_staged(self, model: str, data: Any) -> Any:
        return self.worker.forward_backward(data)

    def optim_step(self, model: str) -> Any:
        parameters = self.worker.model.parameters()
        self.gradients.append(torch.cat([one.grad.flatten() for one in parameters]).clone())
        return self.worker.optim_step() if self.steps else None

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        self.saved += 1
        if not self.steps or self.saved == 1:
            return  # the engine has them
        file = Path(self.worker.cfg.export_path, f"{self.saved}.safetensors")
        weights = {name: tensor.clone() for name, tensor in self.worker.model.model.state_dict().items()}
        save_file(weights, file)
        body = {"path": str(file), "version": self.saved - 1}
        async with aiohttp.ClientSession() as http, http.post(self.engine + "/update_weights", json=body) as answer:
            assert answer.status == 200, await answer.text()


class Inputs(TrainingCallback):
    """What the loss is given, step by step."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        batch = callback_input.batch
        fields = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs", "advantages")
        self.found.append({name: batch[name].tolist() for name in fields})


def configured(asked: dict[str, Any], **more: Any) -> Any:
    cfg = SkyRLTrainConfig.from_cli_overrides(
        {
            "data.train_data": json.dumps([asked["rows"]]),
            "data.val_data": json.dumps([asked["rows"]]),
            "data.dataloader.num_workers": 0,
            "data.dataloader.persistent_workers": "false",
            "generator.step_wise_trajectories": "true",
            "generator.n_samples_per_prompt": 4,
            "generator.eval_n_samples_per_prompt": 1,
            "generator.inference_engine.enable_ray_prometheus_stats": "false",
            "generator.inference_engine.model_dtype": "float32",
            "trainer.algorithm.use_kl_loss": "false",
            "trainer.bf16": "false",
            "trainer.flash_attn": "false",
            "trainer.remove_microbatch_padding": "false",
            "trainer.ckpt_interval": -1,
            "trainer.export_path": asked["folder"],
            "trainer.enable_ray_gpu_monitor": "false",
            "trainer.resume_mode": "none",
            "trainer.logger": "console",
            "trainer.micro_train_batch_size_per_gpu": 2,
            "trainer.placement.colocate_all": "false",
            "trainer.placement.policy_num_gpus_per_node": 1,
            "trainer.policy.model.path": asked["model"],
            "trainer.print_example_interval": -1,
            **more,
        }
    )
    validate_cfg(cfg)
    return cfg


def trained(asked: dict[str, Any], cfg: Any, generator: Any, kind: type[Any], *, steps: bool) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    tokenizer.pad_token_id = tokenizer.pad_token_id or 0
    data = PromptDataset(asked["rows"], tokenizer, 512, num_workers=1)
    trainer = kind(
        cfg=cfg,
        tracker=SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None),
        tokenizer=tokenizer,
        train_dataset=data,
        eval_dataset=data,
        inference_engine_client=SimpleNamespace(server_urls=[asked["engine"]], model_name="model"),
        generator=generator,
        callbacks=[Inputs()],
    )
    trainer.dispatch = Local(cfg, asked["engine"], steps)
    asyncio.run(trainer.train())
    return trainer


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Two steps, with weights that go to the engine, and an evaluation after each."""
    sizes = {"trainer.train_batch_size": 2, "trainer.policy_mini_batch_size": 1, "trainer.eval_interval": 1}
    cfg = configured(asked, **sizes)
    logged: list[dict[str, Any]] = []

    class Logging(make_polar_trainer(RayPPOTrainer)):  # type: ignore[misc]
        def _fire(self, event_name: str, **fields: Any) -> None:
            if event_name == "on_log":
                logged.append(fields["logs"])
            super()._fire(event_name, **fields)

    trainer = trained(asked, cfg, Generator(asked["settings"]), Logging, steps=True)
    before = HFModelWrapper(asked["model"], bf16=False).parameters()
    after = trainer.dispatch.worker.model.parameters()
    return {
        "steps": trainer._callback_handler.callbacks[0].found,
        "moved": max((one - other).abs().max().item() for one, other in zip(before, after, strict=True)),
        "logs": [{name: value for name, value in one.items() if isinstance(value, int | float)} for one in logged],
    }


class Given(Generator):
    """Sessions that are there already, with rewards of our own, so that there is something to learn."""

    def __init__(self, source: Any, change: Any) -> None:
        super().__init__(source)
        ran = self.rollouts.run_group

        async def group(task: str, key: str, **more: Any) -> SessionGroup:
            found = await ran(task, "given", samples=more["samples"])
            return msgspec.structs.replace(
                found, items=[change(rewarded(item, 1.0 / (1 + index))) for index, item in enumerate(found.items)]
            )

        self.rollouts.run_group = group  # type: ignore[method-assign]


def rewarded(item: Any, reward: float) -> Any:
    traces = [msgspec.structs.replace(trace, reward=reward) for trace in item.trajectory.traces]
    return msgspec.structs.replace(
        item,
        session=msgspec.structs.replace(item.session, reward=reward),
        trajectory=msgspec.structs.replace(item.trajectory, traces=traces),
    )


def halves(item: Any) -> Any:
    """Every other session is split, so that groups and mini-batches have both kinds."""
    return split(item) if item.session.reward in (1.0, 1 / 3) else item


def gradient(asked: dict[str, Any], kind: type[Any], reduction: str, change: Any) -> tuple[Any, int]:
    cfg = configured(
        asked,
        **{
            "trainer.algorithm.loss_reduction": reduction,
            "trainer.algorithm.max_seq_len": 256,
            "trainer.train_batch_size": 2,
            "trainer.policy_mini_batch_size": 2,
            "trainer.max_training_steps": 1,
            "trainer.eval_interval": -1,
        },
    )
    torch.manual_seed(0)
    trainer = trained(asked, cfg, Given(asked["settings"], change), kind, steps=False)
    (found,) = trainer.dispatch.gradients
    return found, len(trainer._callback_handler.callbacks[0].found[0]["sequences"])


def splitting(asked: dict[str, Any]) -> dict[str, Any]:
    """How far the gradients of whole and of split sessions are apart, relative to their size."""

    def apart(kind: type[Any], reduction: str) -> float:
        (whole, rows), (parts, more) = (gradient(asked, kind, reduction, one) for one in (lambda item: item, halves))
        assert (rows, more) == (8, 12)
        assert whole.norm() > 0
        return float((whole - parts).norm() / whole.norm())

    reductions = ("token_mean", "prompt_mean", "sequence_mean", "seq_mean_token_sum_norm")
    found = {reduction: apart(make_polar_trainer(RayPPOTrainer), reduction) for reduction in reductions}
    return found | {"sequence_mean, by SkyRL alone": apart(RayPPOTrainer, "sequence_mean")}


def main() -> None:
    what, asked, found = sys.argv[1:]
    told = globals()[what](json.loads(Path(asked).read_text()))
    Path(found).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
