"""Miles' own rollout manager over Polar's rollouts, on the CPU (tests/trainers/test_slime.py).

    python loop_miles.py WHAT ASKED FOUND          both are files of JSON

Flags, data source, rollout manager, conversion, data path, advantages and loss are Miles'. What stands in for the rest:
a model of transformers and a plain optimizer, for Megatron; `Router`, for SGLang's router, which names the engine; and
nothing for SGLang and Megatron themselves, which Miles imports at its top.
"""

import for_miles  # noqa: F401  # isort: skip

import argparse
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ray
import torch
from miles.backends.training_utils import data as miles_data
from miles.backends.training_utils import parallel
from miles.backends.training_utils.loss import (
    compute_advantages_and_returns,
    get_log_probs_and_entropy,
    loss_function,
)
from miles.ray.rollout import RolloutManager
from miles.utils import arguments
from miles.utils.types import Sample
from safetensors.torch import save_file
from splitting import split
from transformers import AutoModelForCausalLM

from polar.bridges import slime
from polar.bridges.bridge import BlockingBridge
from polar.bridges.slime import build_samples, pad_to_ranks

KEYS = [
    "tokens",
    "loss_masks",
    "response_lengths",
    "total_lengths",
    "advantages",
    "returns",
    "log_probs",
    "rollout_log_probs",
]


class Router(BaseHTTPRequestHandler):
    engine = ""

    def do_GET(self) -> None:
        found = self.path == "/workers"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"workers": [{"url": self.engine}]}).encode() if found else b"")

    def log_message(self, *_: Any) -> None: ...


def flags(asked: dict[str, Any], *more: str) -> Any:
    """As they are given on Miles' command line."""
    nothing = lambda parser, **_: parser  # noqa: E731
    arguments.add_sglang_arguments = nothing
    arguments.RouterArgs = argparse.Namespace(add_cli_args=nothing)
    parser = argparse.ArgumentParser()
    parser = arguments.get_miles_extra_args_provider()(parser)
    written = f"""
        --rollout-function-path polar.bridges.slime.generate_rollout
        --eval-function-path polar.bridges.slime.generate_rollout
        --custom-reward-post-process-path polar.bridges.slime.normalize_rewards
        --custom-config-path {asked["settings"]}
        --prompt-data {asked["rows"]} --input-key task_id
        --eval-prompt-data held {asked["rows"]} --n-samples-per-eval-prompt 1
        --rollout-batch-size 2 --n-samples-per-prompt 4 --use-dynamic-global-batch-size
        --advantage-estimator grpo --hf-checkpoint {asked["model"]} --use-tis
    """.split()
    args = parser.parse_args([*written, *more])
    given = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "calculate_per_token_loss": False,
        "debug_train_only": True,  # no engines of its own are started
        "global_batch_size": 8,
        "micro_batch_size": 64,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": asked["router"],
        "sglang_speculative_algorithm": None,
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
    }
    for name, value in given.items():  # of other parsers, and what Miles' checks put there
        if getattr(args, name, None) is None or name == "debug_train_only":
            setattr(args, name, value)
    args.polar = json.loads(Path(args.custom_config_path).read_text())["polar"]
    args.eval_datasets = arguments._resolve_eval_datasets(args)
    args.folder = asked["folder"]
    return args


class Manager(RolloutManager.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Miles' own, in this process; it keeps what it would write to its logs."""

    def _save_debug_rollout_data(self, data: Any, rollout_id: int, evaluation: bool) -> None:
        if evaluation:
            self.evaluated = data["held"]["samples"]


def manager_of(args: Any) -> Any:
    manager = Manager(args, None)
    manager.set_train_parallel_config({"dp_size": 1})
    args.debug_train_only = False
    return manager


class Trainer:
    """One rank: Miles' data path, advantages and loss, and an optimizer."""

    def __init__(self, args: Any, folder: str) -> None:
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def step(self, boxes: Any) -> tuple[dict[str, Any], dict[str, float], Any]:
        """What the loss is given, what is logged of it, and the gradient."""
        data = miles_data.get_rollout_data(self.args, boxes)
        given = {name: data[name] for name in ("tokens", "loss_masks", "rollout_log_probs", "rewards", "raw_reward")}
        if self.args.use_dynamic_global_batch_size:
            assert data["dynamic_global_batch_size"] == len(data["tokens"])
        with torch.no_grad():
            lengths = {"total_lengths": data["total_lengths"], "response_lengths": data["response_lengths"]}
            logits = self.logits(data["tokens"])
            made = get_log_probs_and_entropy(logits, args=self.args, unconcat_tokens=data["tokens"], **lengths)
            data["log_probs"] = made["log_probs"]
        compute_advantages_and_returns(self.args, data)
        iterators, (number,) = miles_data.get_data_iterator(self.args, self.model, data)
        self.optimizer.zero_grad()
        for _ in range(number):
            batch = miles_data.get_batch(iterators[0], KEYS, pad_multiplier=1)
            loss, _, logged = loss_function(self.args, batch, number, self.logits(batch["unconcat_tokens"]))
            loss.backward()
        gradient = torch.cat([one.grad.flatten() for one in self.model.parameters()]).clone()
        count, *values = logged["values"].tolist()
        told = dict(zip(logged["keys"], (value / count for value in values), strict=True))
        return {name: [_list(one) for one in values] for name, values in given.items()}, told, gradient

    def update_weights(self, engine: str, version: int) -> None:
        """For Miles' own, which is SGLang's and Megatron's matter."""
        file = Path(self.args.folder, f"{version}.safetensors")
        save_file({name: tensor.clone() for name, tensor in self.model.state_dict().items()}, file)
        body = json.dumps({"path": str(file), "version": version}).encode()
        asked = urllib.request.Request(engine + "/update_weights", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200

    def logits(self, sequences: list[Any]) -> Any:
        """Packed, as Megatron has them."""
        return torch.cat([self.model(input_ids=ids[None]).logits for ids in sequences], dim=1)


def _list(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Two rollouts with a step for each, and an evaluation."""
    args = flags(asked, "--entropy-coef", "0.01")  # weights move, whatever the sessions earned
    manager = manager_of(args)
    trainer = Trainer(args, asked["model"])
    before = torch.cat([one.detach().flatten() for one in trainer.model.parameters()]).clone()
    steps, logs = [], []
    for rollout_id in range(2):
        given, told, _ = trainer.step(manager.generate(rollout_id))
        trainer.optimizer.step()
        trainer.update_weights(asked["engine"], rollout_id + 1)
        steps.append(given)
        logs.append(told)
    manager.eval(1)
    evaluated = manager.evaluated
    after = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
    return {
        "steps": steps,
        "logs": logs,
        "moved": (after - before).abs().max().item(),
        "evaluated": [sample.metadata | {"versions": sample.weight_versions} for sample in evaluated],
        "on_their_way": len(manager.data_source.get_metadata()["polar_on_their_way"]),
    }


def splitting(asked: dict[str, Any]) -> dict[str, float]:
    """How far gradients are apart, relative to their size, when each call of the sessions is a sample of its own."""
    found = {}
    with BlockingBridge(asked["polar"]) as bridge:
        groups = bridge.run_groups(["plain-0", "plain-1"], "splitting")
    for name in ("mean over samples", "mean over tokens", "mean over samples, by Miles alone"):
        args = flags(asked)
        args.calculate_per_token_loss = name == "mean over tokens"
        manager = manager_of(args)
        if "alone" in name:
            manager.custom_reward_post_process_func = weightless
        gradients = []
        for change in (lambda item: item, split):  # of every other session
            samples = []
            for group in groups:
                for place, item in enumerate(group.items):  # so that there is something to learn
                    item.session.reward = float(place % 2)
                    for trace in item.trajectory.traces:
                        trace.reward = float(place % 2)
                given = [Sample(group_index=len(samples), index=len(samples) * 8 + n) for n in range(len(group.items))]
                changed = [change(item) if place % 2 else item for place, item in enumerate(group.items)]
                samples.append(build_samples(args, given, changed))
            rows = [one for group in pad_to_ranks(args, samples) for session in group for one in session]
            manager._dynamic_global_batch_size = manager._compute_dynamic_global_batch_size(len(rows))
            trained = manager._convert_samples_to_train_data(rows)
            trainer = Trainer(args, asked["model"])
            _, _, gradient = trainer.step(manager._split_train_data_by_dp(trained, 1))
            tokens = sum(sum(mask) for mask in trained["loss_masks"])
            gradients.append(gradient / (tokens if args.calculate_per_token_loss else 1))
        whole, parts = gradients
        found[name] = ((whole - parts).norm() / whole.norm()).item()
    return found


def weightless(args: Any, samples: list[Any]) -> Any:
    """By session, but each sample with the advantage of all of it."""
    args.calculate_per_token_loss = True
    raw, rewards = slime.normalize_rewards(args, samples)
    args.calculate_per_token_loss = False
    return raw, rewards


def main() -> None:
    what, question, answer = sys.argv[1:]
    asked = json.loads(Path(question).read_text())
    Router.engine = asked["engine"]
    router = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=router.serve_forever, daemon=True).start()
    asked["router"] = router.server_port
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    alone = parallel.GroupInfo(rank=0, size=1, group=None)
    kinds = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(kinds, alone)))
    try:
        Path(answer).write_text(json.dumps(globals()[what](asked)))
    finally:
        slime.close()
        torch.distributed.destroy_process_group()
        ray.shutdown()
        router.shutdown()


if __name__ == "__main__":
    main()
