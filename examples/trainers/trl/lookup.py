"""The demo's task, learnt with TRL instead of Polar's own trainer: GRPO over sessions of an agent that looks things up.

    python examples/trainers/trl/lookup.py FOLDER --model DIR [--steps 14] [--polar .venv/bin/polar] [--json]

Everything is of this machine. `polar up`, with the embedded engine, is started beside this program, and ends with it.
It may be of another environment (--polar), since this one talks to it over HTTP. Prints what the held-out questions
earned before and after; FOLDER keeps tasks, sessions and the log of each step.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig

from polar.bridges.trl import grpo_trainer
from polar.demo import tasks
from polar.demo.questions import make_questions

SESSIONS = 8  # in a group
GROUPS = 4  # in a step
ENGINE = {"kind": "embedded", "options": {"dtype": "float32", "threads": 1, "context_length": 512, "memory_gib": 1}}


@contextlib.contextmanager
def service(polar: str, folder: Path, model: Path) -> Iterator[str]:
    """Where it is controlled."""
    options = json.dumps(ENGINE["options"])
    environment = os.environ | {
        "POLAR_ENGINE__KIND": "embedded",
        "POLAR_ENGINE__MODEL": str(model.absolute()),
        "POLAR_ENGINE__OPTIONS": options,
        "POLAR_NODE__RUN_WORKERS": "12",
    }
    command = [polar, "up", "--json", "--config", os.devnull, "--data", str(folder / "service")]
    command += ["--port", "0", "--control-port", "0"]
    with (folder / "service.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        if not told:
            raise SystemExit(f"polar up did not start: see {folder / 'service.log'}")
        yield json.loads(told)["control"]
    finally:
        process.terminate()
        process.wait()


def names(file: Path) -> Dataset:
    return Dataset.from_list([{"prompt": json.loads(line)["task_id"]} for line in file.read_text().splitlines()])


def learner(folder: Path) -> Any:
    """The last half of the layers is trained, as in the demo."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.requires_grad_(False)
    layers = model.model.layers
    for layer in layers[len(layers) // 2 :]:
        layer.requires_grad_(True)
    return model


class Progress(TrainerCallback):
    """In place of TRL's own, which prints to stdout, where the result goes."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:  # noqa: ARG002
        for name, what in (("reward", "sessions"), ("eval_reward", "held-out sessions")):
            if name in logs:
                print(f"step {state.global_step}: {what} earned {logs[name]:.2f}", file=sys.stderr, flush=True)


def train(wanted: argparse.Namespace, url: str) -> list[dict[str, Any]]:
    """The trainer's log."""
    files = {name: wanted.folder / f"{name}.jsonl" for name in ("train", "held-out")}
    tokenizer = AutoTokenizer.from_pretrained(wanted.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = grpo_trainer(
        {"server": url, "tasks": [str(file) for file in files.values()], "name": "lookup"},
        engine=ENGINE,
        model=learner(wanted.model),
        processing_class=tokenizer,
        train_dataset=names(files["train"]),
        eval_dataset=names(files["held-out"]),
        args=GRPOConfig(
            output_dir=str(wanted.folder / "trl"),
            max_steps=wanted.steps,
            num_generations=SESSIONS,
            per_device_train_batch_size=SESSIONS,
            gradient_accumulation_steps=GROUPS,
            num_generations_eval=1,
            per_device_eval_batch_size=wanted.held_out,
            eval_on_start=True,
            eval_strategy="steps",
            eval_steps=wanted.steps,
            learning_rate=wanted.rate,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            epsilon_high=0.28,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            bf16=False,
            use_cpu=wanted.cpu,
            disable_tqdm=True,
            report_to=[],
            seed=wanted.seed,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress)
    trainer.train()
    return trainer.state.log_history


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with TRL over Polar's sessions, on the demo's questions.")
    parser.add_argument("folder", type=Path, help="of everything that is kept; a new one")
    parser.add_argument("--model", type=Path, required=True, help="its folder; the demo has SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=14, help="[14]")
    parser.add_argument("--held-out", type=int, default=64, help="questions [64]")
    parser.add_argument("--rate", type=float, default=5e-5, help="of learning [5e-5]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--threads", type=int, default=1, help="that the trainer computes in [1]")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--polar", default="polar", help="the command that runs the service [polar]")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    started_at = time.monotonic()
    asked = make_questions(train=wanted.steps * GROUPS, held_out=wanted.held_out, seed=wanted.seed)
    tasks.write_tasks(wanted.folder, asked, 1)
    with service(wanted.polar, wanted.folder, wanted.model) as url:
        history = train(wanted, url)
    (wanted.folder / "history.json").write_text(json.dumps(history))
    held_out = [line["eval_reward"] for line in history if "eval_reward" in line]
    told = {
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "rewards": [line["reward"] for line in history if "reward" in line],
        "seconds": round(time.monotonic() - started_at, 1),
    }
    if wanted.json:
        print(json.dumps(told))
    else:
        print(f"held-out questions: {told['held_out_before']:.0%} right before, {told['held_out_after']:.0%} after")


if __name__ == "__main__":
    main()
