"""Learning curves: the same training, seed by seed, with exact trajectories and with ones that are broken on purpose.

    python examples/lookup/learning.py FOLDER [--seeds 3] [--hops 2] [--digits 4] [--steps 40]

Each seed is trained twice, all at the same time. `exact` is Polar as it is. `broken` samples with histories that
are tokenised anew (`continuation = "off"`) and merges turns by comparing prompts only, as other systems do: sampled
tokens stand where the next prompt had their text, tokenised otherwise. FOLDER/curves.json and curves.png have the
held-out rewards.
"""

import argparse
import asyncio
import atexit
import json
import signal
import subprocess
import sys
from pathlib import Path

from polar.demo import tasks
from polar.demo.questions import make_questions
from polar.train import groups
from polar.train.run import train
from polar.train.settings import load_settings
from polar.trajectory.checker import SessionChecker

ARMS = "exact", "broken"

SETTINGS = """\
name = "{name}"
output = "."
seed = {seed}
steps = {steps}

[model]
{model}dtype = "float32"
compiled = false       # the model is small

[tasks]
train = ["train.jsonl"]
held_out = ["held-out.jsonl"]

[rollout]
group_size = 8
groups_per_step = {groups}
max_lag = 1
builder = "{builder}"

[optimizer]
lr = {rate}
betas = [0.9, 0.95]
warmup = 5             # Adam's first steps are as large as any, whatever the gradient
chunk_tokens = 2048    # several runs share a device
kept_tokens = 4096

[evaluation]
every = {every}

[checkpoint]
every = 1000
keep = 1

[polar.engine]
continuation = "{continuation}"

[polar.engine.options]
dtype = "float32"
context_length = 512
memory_gib = 4

[polar.node]
run_workers = 32
init_workers = 8
postrun_workers = 8
"""


# One run


def break_trajectories() -> None:
    """From here on a session's calls are merged wherever one prompt begins with another."""
    exact = groups.build_group_from_traces
    unchecked = SessionChecker(share=0)  # would hold back what is broken on purpose

    def broken(data: bytes, index: int, _checker: SessionChecker) -> groups.RolloutGroup:
        group = json.loads(data)
        for result in group["results"]:
            if result.get("trajectory"):
                result["trajectory"]["traces"] = _merged(result["trajectory"]["traces"])
        return exact(json.dumps(group).encode(), index, unchecked)

    groups.build_group_from_traces = broken


def _merged(calls: list[dict]) -> list[dict]:
    """What stands between two turns is taken from the later prompt, behind the first end-of-turn token in it."""
    chains: list[list[dict]] = []
    for call in sorted(calls, key=lambda call: call["metadata"]["spans"][0]["exchange_id"]):
        fitting = [chain for chain in chains if _begins(call["prompt_ids"], chain[-1]["prompt_ids"])]
        if fitting:
            fitting[-1].append(call)
        else:
            chains.append([call])
    return [_trace(chain) for chain in chains]


def _begins(ids: list[int], other: list[int]) -> bool:
    return ids[: len(other)] == other


def _trace(chain: list[dict]) -> dict:
    ends = [call["response_ids"][-1] for call in chain if call["finish_reason"] == "stop"]
    first = chain[0]
    whole = {"prompt_ids": first["prompt_ids"], "reward": first["reward"], "exchange_ids": []}
    whole |= {"response_ids": [], "loss_mask": [], "response_logprobs": [], "policy_versions": []}
    spans, scales, weight, before = [], {}, 0.0, None
    for call in chain:
        if before is not None:
            beyond = call["prompt_ids"][len(before["prompt_ids"]) :]
            if not ends or ends[0] not in beyond:
                break
            own_end = before["response_ids"][-1] == ends[0]
            between = beyond[beyond.index(ends[0]) + own_end :]
            whole["response_ids"] += between
            whole["loss_mask"] += [0] * len(between)
            whole["response_logprobs"] += [0.0] * len(between)
            whole["policy_versions"] += [-1] * len(between)
        start = len(whole["response_ids"])
        for name in ("response_ids", "loss_mask", "response_logprobs", "policy_versions", "exchange_ids"):
            whole[name] += call[name]
        spans.append(call["metadata"]["spans"][0] | {"start": start, "stop": len(whole["response_ids"])})
        scales |= call["metadata"].get("scales", {})
        weight += call["weight"]
        before = call
    return whole | {"weight": weight, "metadata": {"spans": spans, "scales": scales}}


# All of them


def prepare(folder: Path, arm: str, seed: int, wanted: argparse.Namespace) -> Path:
    asked = make_questions(
        train=wanted.steps * wanted.groups, held_out=wanted.held_out, seed=seed, hops=wanted.hops, digits=wanted.digits
    )
    tasks.write_tasks(folder, asked, wanted.hops, options="--http")
    exact = arm == ARMS[0]
    settings = SETTINGS.format(
        name=f"{arm}-{seed}",
        seed=seed,
        steps=wanted.steps,
        groups=wanted.groups,
        rate=wanted.rate,
        every=wanted.every,
        model=f"folder = {json.dumps(str(wanted.model.absolute()))}\n" if wanted.model else "",
        builder="prefix_tree" if exact else "per_request",
        continuation="auto" if exact else "off",
    )
    (folder / "train.toml").write_text(settings)
    return folder / "train.toml"


def curves(folder: Path, names: list[str]) -> dict[str, list[dict]]:
    found = {}
    for name in names:
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [json.loads(line) for line in lines]
    return found


def draw(told: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"exact": "tab:blue", "broken": "tab:red"}
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, steps in told.items():
        arm, _, seed = name.partition("-")
        points = [(step["step"], step["held_out"]) for step in steps if step.get("held_out") is not None]
        axes.plot(*zip(*points, strict=True), color=colours[arm], marker=".", label=arm if seed == "0" else None)
    axes.set(xlabel="step", ylabel="held-out reward", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves with exact trajectories, and with broken ones.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--one", choices=ARMS, help="only the run in FOLDER, which was prepared")
    parser.add_argument("--arm", action="append", choices=ARMS, help="only this one")
    parser.add_argument("--model", type=Path, help="a model's folder [the demo's]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hops", type=int, default=2)
    parser.add_argument("--digits", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="in a step")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    parser.add_argument("--rate", type=float, default=3e-5, help="of learning")
    wanted = parser.parse_args()
    if wanted.one:
        if wanted.one != ARMS[0]:
            break_trajectories()
        asyncio.run(train(load_settings(wanted.folder / "train.toml")))
        return
    names = [f"{arm}-{seed}" for seed in range(wanted.seeds) for arm in wanted.arm or ARMS]
    running: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    atexit.register(lambda: [process.terminate() for process in running])  # whatever ends this ends them
    for name in names:
        folder = wanted.folder / name
        arm, _, seed = name.partition("-")
        prepare(folder, arm, int(seed), wanted)
        with (folder / "log").open("wb") as log:
            command = [sys.executable, __file__, str(folder), "--one", arm]
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    failed = [name for name, process in zip(names, running, strict=True) if process.wait()]
    told = curves(wanted.folder, [name for name in names if name not in failed])
    (wanted.folder / "curves.json").write_text(json.dumps(told))
    for name, steps in told.items():
        held = [f"{step['held_out']:.2f}" for step in steps if step.get("held_out") is not None]
        print(f"{name:10} {' '.join(held)}")
    for name in failed:
        print(f"{name} failed: see {wanted.folder / name / 'log'}")
    draw(told, wanted.folder / "curves.png")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
