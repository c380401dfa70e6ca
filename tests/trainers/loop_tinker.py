"""Tinker's `Datum`s of Polar's rollouts, and its loss as documented, on the CPU (tests/trainers/test_tinker.py).

    python loop_tinker.py WHAT ASKED FOUND          both are files of JSON

Datums are Tinker's own. Its service can't be reached: `Local` computes the loss that it documents under
`importance_sampling`, the sum over tokens of -exp(logprob - sampled logprob) * advantage, with a model of transformers.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from splitting import split
from tinker import Datum
from transformers import AutoModelForCausalLM

from polar.bridges.bridge import BlockingBridge
from polar.bridges.tinker import Tinker, build_batch


class Local:
    """A TrainingClient of one process."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def forward_backward(self, datums: list[Datum], loss_fn: str) -> Any:
        assert loss_fn == "importance_sampling"
        self.optimizer.zero_grad()
        for datum in datums:
            given = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            logits = self.model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0]
            logprobs = torch.log_softmax(logits, -1).gather(-1, given["target_tokens"].long()[:, None])[:, 0]
            (-(torch.exp(logprobs - given["logprobs"]) * given["advantages"]).sum()).backward()
        return torch.cat([one.grad.flatten() for one in self.model.parameters()]).clone()

    def optim_step(self) -> None:
        self.optimizer.step()

    def load(self, asked: dict[str, Any], version: int) -> None:
        file = Path(asked["folder"], f"{version}.safetensors")
        save_file({name: tensor.clone() for name, tensor in self.model.state_dict().items()}, file)
        body = json.dumps({"path": str(file), "version": version}).encode()
        request = urllib.request.Request(
            asked["engine"] + "/update_weights", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200


def told(datum: Datum) -> dict[str, Any]:
    given = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    return {"model_input": datum.model_input.to_ints(), **given}


def train(asked: dict[str, Any]) -> dict[str, Any]:
    client = Local(asked["model"])
    before = torch.cat([one.detach().flatten() for one in client.model.parameters()]).clone()
    steps = []
    with Tinker(asked["settings"]) as polar:
        for step in range(2):
            batch = polar.batch(asked["tasks"], step)
            client.forward_backward(batch.datums, loss_fn="importance_sampling")
            client.optim_step()
            with polar.updating(step + 1):
                client.load(asked, step + 1)
            steps.append({"datums": [told(datum) for datum in batch.datums], "rewards": batch.rewards})
    after = torch.cat([one.detach().flatten() for one in client.model.parameters()])
    return {"steps": steps, "moved": (after - before).abs().max().item()}


def splitting(asked: dict[str, Any]) -> dict[str, float]:
    """How far gradients are apart, relative to their size, when each call of some sessions is a datum of its own."""
    with BlockingBridge(asked["settings"]) as bridge:
        groups = bridge.run_groups(["plain-0", "plain-1"], "splitting")
    for group in groups:  # so that there is something to learn
        for place, item in enumerate(group.items):
            item.session.reward = float(place % 2)
    whole = [gradient(asked, groups, per_token=per_token) for per_token in (False, True)]
    for group in groups:
        group.items = [split(item) if place % 2 else item for place, item in enumerate(group.items)]
    parts = [gradient(asked, groups, per_token=per_token) for per_token in (False, True)]
    return {
        "gradient": min(one.norm().item() for one in whole),
        "apart": max(((one - other).norm() / one.norm()).item() for one, other in zip(whole, parts, strict=True)),
    }


def gradient(asked: dict[str, Any], groups: Any, *, per_token: bool) -> Any:
    return Local(asked["model"]).forward_backward(
        build_batch(groups, per_token=per_token).datums, "importance_sampling"
    )


def main() -> None:
    what, question, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(globals()[what](json.loads(Path(question).read_text()))))


if __name__ == "__main__":
    main()
