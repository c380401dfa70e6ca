"""What builders cost end to end: the same training with `per_request`, `prefix_merging` and `prefix_tree`.

    python examples/lookup/ablation.py FOLDER [--model MODEL] [--turns 6] [--tokens 8] [--system 45] [--groups 16] ...

Sampling and training run asynchronously, as always. An update of the weights computes about as many tokens whatever the
builder, one group at least, so one that hands out every context again and again takes more updates for the same
sessions. Told are the updates, the time, and the share of it in which the GPU was busy, all without the first step,
which has nothing to compute while the first sessions run, and compiles, and without the last, behind which a checkpoint
is written. FOLDER/ablation.json has everything.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from polar.train.metrics import StepMetrics
from polar.train.run import train
from polar.train.settings import TrainSettings

BUILDERS = "per_request", "prefix_merging", "prefix_tree"
AGENT = Path(__file__).with_name("talker.py")


def write_tasks(folder: Path, wanted: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    agent = f"{sys.executable} -S -E {AGENT.absolute()} {wanted.turns} {wanted.tokens} {wanted.system}"
    tasks = [
        {
            "task_id": f"talk-{number}",
            "instruction": "Talk.",
            "runtime": {"backend": "local"},
            "agent": {"custom_shell": {"command": agent}},
            # Half of the sessions earn something: what doesn't matter here.
            "evaluator": {
                "strategy": "answer",
                "config": {"expected": "[a-m][^a-z]*$", "match": "regex", "pattern": "(?s)(.+)"},
            },
        }
        for number in range(wanted.steps * wanted.groups)
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(task) for task in tasks))


def settings(folder: Path, builder: str, wanted: argparse.Namespace) -> TrainSettings:
    write_tasks(folder, wanted)
    return TrainSettings.model_validate(
        {
            "name": builder,
            "folder": folder,
            "output": ".",
            "steps": wanted.steps,
            "model": {
                "folder": str(wanted.model.absolute()) if wanted.model else None,
                "dtype": wanted.dtype,
                "compiled": wanted.compiled,
            },
            "tasks": {"train": ["train.jsonl"]},
            "rollout": {"group_size": 8, "groups_per_step": wanted.groups, "max_lag": 1, "builder": builder},
            "grpo": {"filter": False},  # this is about cost: groups without a signal cost as much
            "optimizer": {"lr": 1e-6, "update_tokens": wanted.update_tokens},
            "checkpoint": {"every": 1000},
            "polar": {
                "engine": {"options": {"context_length": 4096, "memory_gib": wanted.memory, "dtype": wanted.dtype}},
                "node": {"run_workers": 64, "init_workers": 8, "postrun_workers": 8},
            },
        }
    )


def seconds(steps: list[StepMetrics], *names: str) -> float:
    return sum(step.seconds.get(name, 0.0) for step in steps for name in names)


def run(folder: Path, builder: str, wanted: argparse.Namespace) -> dict:
    history = asyncio.run(train(settings(folder, builder, wanted))).history
    steps = [step for step in history if 1 < step.step < wanted.steps]
    busy = [step.gpu_busy for step in steps if step.gpu_busy is not None]
    return {
        "builder": builder,
        "steps": len(steps),
        "sessions": sum(step.sessions for step in steps),
        "updates": sum(step.updates for step in steps),
        "computed": sum(step.tokens_computed for step in steps),
        "trained": sum(step.tokens_trained for step in steps),
        "seconds": seconds(steps, "wait", "compute", "sync"),
        "computing": seconds(steps, "compute"),
        "scoring": seconds(steps, "score"),  # of that: with old weights, where a step has several updates
        "syncing": seconds(steps, "sync"),
        "waiting": seconds(steps, "wait"),
        "gpu_busy": sum(busy) / len(busy) if busy else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The same training with each builder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--builder", action="append", choices=BUILDERS, help="only this one")
    parser.add_argument("--model", type=Path, help="a model's folder [the demo's]")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="for CUDA alone")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=16, help="GiB of the engine's keys and values")
    parser.add_argument("--turns", type=int, default=6, help="of a session")
    parser.add_argument("--tokens", type=int, default=8, help="sampled in a turn, at most")
    parser.add_argument("--system", type=int, default=45, help="length of the system prompt, times 22 tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16, help="of 8 sessions, in a step")
    parser.add_argument("--update-tokens", type=int, default=65536)
    wanted = parser.parse_args()
    told = []
    for builder in wanted.builder or BUILDERS:
        told.append(run(wanted.folder / builder, builder, wanted))
        (wanted.folder / "ablation.json").write_text(json.dumps(told))
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in told[-1].items()
            )
        )


if __name__ == "__main__":
    main()
