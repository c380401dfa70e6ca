"""What builders cost end to end: the same training with `per_request`, `prefix_merging` and `prefix_tree`.

    python examples/lookup/ablation.py FOLDER [--hops 8] [--steps 8] [--update-tokens 16384]

Sampling and training run asynchronously, as always. An update of the weights computes about as many tokens whatever the
builder, so one that hands out every context again and again takes more updates for the same sessions. Told are the
updates, the minutes, and the share of the time in which the GPU was busy. FOLDER/ablation.json has everything.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

from polar.demo import tasks
from polar.demo.questions import questions
from polar.train.running import train
from polar.train.settings import TrainSettings

BUILDERS = "per_request", "prefix_merging", "prefix_tree"


def settings(folder: Path, builder: str, wanted: argparse.Namespace) -> TrainSettings:
    asked = questions(train=wanted.steps * wanted.groups, held_out=1, seed=0, hops=wanted.hops, digits=4)
    tasks.write(folder, asked, wanted.hops, options="--http")
    return TrainSettings.model_validate(
        {
            "name": builder,
            "folder": folder,
            "output": ".",
            "steps": wanted.steps,
            "model": {"folder": str(wanted.model.absolute()) if wanted.model else None},
            "tasks": {"train": ["train.jsonl"]},
            "rollout": {"group_size": 8, "groups_per_step": wanted.groups, "max_lag": 1, "builder": builder},
            "grpo": {"filter": False},  # this is about cost: sessions of a model that fails cost as much
            "optimizer": {"lr": 1e-6, "update_tokens": wanted.update_tokens},
            "checkpoint": {"every": 1000},
            "polar": {
                "engine": {"options": {"context_length": 1024, "memory_gib": 8, "dtype": "float32"}},
                "node": {"run_workers": 64, "init_workers": 8, "postrun_workers": 8},
            },
        }
    )


def run(folder: Path, builder: str, wanted: argparse.Namespace) -> dict:
    began = time.monotonic()
    history = asyncio.run(train(settings(folder, builder, wanted))).history
    steps = [step for step in history if step.step > 0]
    busy = [step.gpu_busy for step in steps if step.gpu_busy is not None]
    return {
        "builder": builder,
        "sessions": sum(step.sessions for step in steps),
        "updates": sum(step.updates for step in steps),
        "computed": sum(step.tokens_computed for step in steps),
        "trained": sum(step.tokens_trained for step in steps),
        "seconds": time.monotonic() - began,
        "learning": sum(step.seconds.get("compute", 0.0) for step in steps),
        "waiting": sum(step.seconds.get("wait", 0.0) for step in steps),
        "gpu_busy": sum(busy) / len(busy) if busy else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The same training with each builder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--builder", action="append", choices=BUILDERS, help="only this one")
    parser.add_argument("--model", type=Path, help="a model's folder [the demo's]")
    parser.add_argument("--hops", type=int, default=8, help="look-ups of a question: the turns of a session")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="of 8 sessions, in a step")
    parser.add_argument("--update-tokens", type=int, default=16384)
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
