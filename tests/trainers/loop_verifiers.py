"""verifiers 0.4's own evaluation loop over Polar's environment, and a step as prime-rl takes it from the branches.

    python loop_verifiers.py train|splitting ASKED FOUND

prime-rl has no package: its samples are verifiers' branches (ids, mask, log-probabilities, advantages that its
algorithm put on the nodes), and its loss is a sum over tokens that train, by their number in the batch.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from splitting import split
from transformers import AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainers" / "verifiers"


def episodes(asked: dict[str, Any]) -> list[Any]:
    """By verifiers' own runner, of the example's plug-in."""
    sys.path.insert(0, str(EXAMPLE))
    os.environ["POLAR_BRIDGE"] = asked["settings"]
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    config = {
        "env": {"taskset": {"id": "polar-tasks"}},
        "select": {"include": {"ids": asked["tasks"]}},
        "sampling": {"max_tokens": 5},
        "model": "tiny",
        "num_rollouts": 4,
        "output_dir": asked["output"],
        "push": False,
        "rich": None,
    }
    return asyncio.run(run_eval(EvalConfig.model_validate(config)))


def assign(traces: list[Any], rewards: list[float]) -> None:
    """Advantages over a group's episodes."""
    mean = sum(rewards) / len(rewards)
    for trace, reward in zip(traces, rewards, strict=True):
        for node in trace.nodes:
            if node.sampled:
                node.advantages = [reward - mean] * sum(node.mask)


def samples(traces: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "ids": branch.token_ids,
            "mask": branch.sampled_mask,
            "logprobs": branch.logprobs,
            "advantages": branch.advantages,
        }
        for trace in traces
        for branch in trace.branches
        if branch.trainable
    ]


def loss(model: Any, rows: list[dict[str, Any]]) -> tuple[Any, float]:
    """And by how much the model's log-probabilities differ from the recorded ones."""
    total, count, differ = torch.zeros(()), 0, 0.0
    for row in rows:
        ids, mask = torch.tensor(row["ids"]), torch.tensor(row["mask"])[1:]
        scored = model(ids[None]).logits[0, :-1].log_softmax(-1)
        current = scored.gather(-1, ids[1:, None]).squeeze(-1)
        recorded = torch.tensor(row["logprobs"])[1:]
        terms = torch.tensor(row["advantages"])[1:] * (current - recorded).exp()
        total, count = total - terms[mask].sum(), count + int(mask.sum())
        differ = max(differ, float((current - recorded)[mask].abs().max()))
    return total / count, differ


def train(asked: dict[str, Any]) -> dict[str, Any]:
    ran = episodes(asked)
    traces = [trace for episode in ran for trace in episode.traces]
    for task in asked["tasks"]:
        group = [trace for trace in traces if trace.task.key == task]
        rewards = [trace.reward for trace in group]
        assign(group, rewards if len(set(rewards)) > 1 else [1.0, *[0.0] * (len(group) - 1)])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype="float32")
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    value, differ = loss(model, samples(traces))
    value.backward()
    optimizer.step()
    moved = max(float((old - new).abs().max()) for old, new in zip(before, model.parameters(), strict=True))
    return {
        "ok": [episode.ok for episode in ran],
        "errors": [error.message for trace in traces for error in trace.errors],
        "sessions": [
            {
                "polar": trace.info.get("polar"),
                "reward": trace.reward,
                "samples": samples([trace]),
                "output": trace.num_output_tokens,
                "total": trace.num_total_tokens,
            }
            for trace in traces
        ],
        "said": [[message.role for message in branch.messages] for trace in traces for branch in trace.branches],
        "moved": moved,
        "differ": differ,
    }


def splitting(asked: dict[str, Any]) -> dict[str, Any]:
    """A session's gradient as one trace, and in as many as it has calls."""
    from verifiers.v1.graph import MessageNode

    from polar.bridges.bridge import BlockingBridge
    from polar.bridges.verifiers import build_nodes
    from polar.records.result import TraceResult

    like = episodes(asked | {"tasks": asked["tasks"][:1]})[0].traces[0]
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype="float32")

    def trace_of(item: Any, result: Any) -> Any:
        blank = [TraceResult(prompt_ids=[], response_ids=[], loss_mask=[]) for _ in range(len(item.trajectory.traces))]
        told = result.model_copy(update={"trajectory": result.trajectory.model_copy(update={"traces": blank})})
        made = [MessageNode.model_validate(node) for node in build_nodes(item, told)]
        return like.model_copy(update={"nodes": made, "calls": []})

    def gradient(items: list[Any], results: list[Any]) -> tuple[Any, int]:
        model.zero_grad()
        traces = [trace_of(*pair) for pair in zip(items, results, strict=True)]
        assign(traces, [1.0, *[0.0] * (len(traces) - 1)])
        rows = samples(traces)
        loss(model, rows)[0].backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters()]), len(rows)

    with BlockingBridge(asked["settings"]) as bridge:
        (group,) = bridge.run_groups(asked["tasks"][:1], "splitting")
    whole, rows = gradient(group.items, group.results)
    parts, more = gradient([split(group.items[0]), *group.items[1:]], group.results)
    return {"rows": [rows, more], "largest": float(whole.abs().max()), "differ": float((whole - parts).abs().max())}


def main() -> None:
    what, asked, found = sys.argv[1:]
    Path(found).write_text(json.dumps(globals()[what](json.loads(Path(asked).read_text()))))


if __name__ == "__main__":
    main()
