"""New weights for a vLLM server while sessions run: how long generation stands still, and whether every token is
labelled with the weights that sampled it.

    load (processes) ──► gateway (a process: every call captured) ──► engine
    this process: a model whose weights it changes ──► the engine, again and again ──► what was captured, recomputed

The weights of a version follow from its number, so that each captured token can be scored with the weights of its own
version, and with others. A boundary between two versions within a call is right where shifting it would fit the
recorded log-probabilities no better.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer
from benchmarks.process import run_async
from benchmarks.vllm.benchmark import GATEWAY, Bench, VllmPlan, inspect_engine
from benchmarks.vllm.load import LoadJob, SessionShape
from polar.config import EngineSettings
from polar.weight_sync.publisher import ModelWeightPublisher, PlainScoringModel

Logprobs = NDArray[np.float64]
_MAX_SHIFT = 6
"""Tokens by which a boundary is tried to be shifted."""
_CLEAR_GAIN = 0.5
"""Nats: a shift that fits no better than by this is noise of half precision."""


class UpdatePlan(Struct, frozen=True):
    updates: int = 5
    sessions: int = 64
    interval: float = 3.0  # seconds between two updates
    checked: int = 8  # sessions whose tokens are recomputed
    noise: float = 0.5  # of each version, in standard deviations of a tensor's weights
    shape: SessionShape = SessionShape()


class Boundary(Struct):
    """Between two versions within a call."""

    best_shift: int  # the shift that fits the recorded log-probabilities best; 0: it stands where it belongs
    gain: float  # by how much that fits better


class UpdateReport(Struct):
    plan: UpdatePlan
    stood_still: list[float] = field(default_factory=list)  # seconds without generation, by update
    steps: list[dict[str, float]] = field(default_factory=list)  # seconds of each update's steps
    tokens: int = 0  # recomputed
    unknown: int = 0  # of them without a version
    by_version: dict[int, int] = field(default_factory=dict)
    mean_difference: float = 0.0  # of log-probabilities, recorded against those of the labelled version
    largest_difference: float = 0.0
    other_difference: float = 0.0  # mean, against those of the version before or behind
    boundaries: list[Boundary] = field(default_factory=list)
    incomplete_calls: int = 0

    @property
    def wrong_boundaries(self) -> int:
        return sum(boundary.best_shift != 0 and boundary.gain > _CLEAR_GAIN for boundary in self.boundaries)

    @property
    def passed(self) -> bool:
        return bool(self.tokens and not self.unknown and not self.wrong_boundaries and not self.incomplete_calls) and (
            self.mean_difference < self.other_difference / 2
        )


class CapturedCall(Struct):
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int | None] | None = None


class VersionedModel:
    """A model on the engine's device whose weights follow from a version's number."""

    def __init__(self, folder: Path, device: str, noise: float) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        if any(folder.glob("*.safetensors")):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        else:
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        self.model: Any = model.to(device).eval()
        self._noise = noise
        self._base = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def set_version(self, version: int) -> None:
        import torch

        generator = torch.Generator(self.model.device).manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                base = self._base[name]
                if base.dim() < 2:  # norms and biases
                    continue
                drawn = torch.empty_like(base).normal_(generator=generator)
                parameter.copy_(base + self._noise * base.float().std().to(base.dtype) * drawn)

    def score(self, call: CapturedCall) -> Logprobs:
        return np.array(PlainScoringModel(self.model).score(call.prompt_ids, call.sampled_ids))


async def run(
    plan: UpdatePlan,
    url: str,
    model_folder: Path,
    progress: Progress,
    *,
    transport: str,
    device: str,
    tokenizer: str | None = None,
) -> UpdateReport:
    name, folder = await inspect_engine(url, tokenizer)
    report = UpdateReport(plan)
    load = VllmPlan(levels=(plan.sessions,), shape=plan.shape, kept=plan.checked)
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-bench-")))
        job = LoadJob(GATEWAY, url.rstrip("/"), name, folder, plan.shape, first=0, sessions=0)
        bench = await Bench.start(stack, load, job, scratch / "data", scratch)
        model = await asyncio.to_thread(VersionedModel, model_folder, device, plan.noise)
        engine = EngineSettings(kind="vllm", urls=[url], model=name)
        publisher = ModelWeightPublisher(
            bench.client, engine, PlainScoringModel(model.model), scratch, transport=transport
        )
        stack.push_async_callback(publisher.close)
        version = 0
        captured: list[str] = []
        while version < plan.updates:
            # The first update is made before the sessions begin: nobody knows the weights of version 0 here.
            sessions = asyncio.create_task(bench.measure(GATEWAY, plan.sessions)) if version else None
            while version < plan.updates and (sessions is None or not sessions.done()):
                version += 1
                await asyncio.to_thread(model.set_version, version)
                done = await publisher.publish(version)
                report.stood_still.append(done.paused_seconds)
                report.steps.append(done.seconds)
                progress(f"version {version}: generation stood still for {done.paused_seconds:.2f} s")
                if sessions is None:
                    break
                await asyncio.wait([sessions], timeout=plan.interval)
            if sessions is not None:
                measured, named = await sessions
                captured += named
                progress(measured.summary)
                report.incomplete_calls += measured.not_whole + measured.tally.errors
        async with aiohttp.ClientSession() as http:
            calls = [call for name in captured for call in await _read_calls(http, bench.control_url, name)]
        progress(f"recomputing {len(calls)} calls")
        await asyncio.to_thread(check_calls, report, model, calls)
    return report


async def _read_calls(http: aiohttp.ClientSession, control_url: str, session_id: str) -> list[CapturedCall]:
    async with http.get(f"{control_url}/sessions/{session_id}/exchanges") as answer:
        return msgspec.json.decode(await answer.read(), type=list[CapturedCall])


def check_calls(report: UpdateReport, model: VersionedModel, calls: Sequence[CapturedCall]) -> None:
    """Scores each call with the weights of its versions and of their neighbours: one version after the other, since
    making a version's weights takes longer than a pass."""
    wanted = [_find_versions(call) for call in calls]
    scores: list[dict[int, Logprobs]] = [{} for _ in calls]
    for version in sorted({version for versions in wanted for version in versions}):
        model.set_version(version)
        for call, versions, scored in zip(calls, wanted, scores, strict=True):
            if version in versions:
                scored[version] = model.score(call)
    own, other = list[float](), list[float]()
    for call, scored in zip(calls, scores, strict=True):
        recorded = np.array(call.logprobs)
        labels = call.policy_versions or [None] * len(call.sampled_ids)
        for place, label in enumerate(labels):
            report.tokens += 1
            if label is None:
                report.unknown += 1
                continue
            report.by_version[label] = report.by_version.get(label, 0) + 1
            own.append(abs(recorded[place] - scored[label][place]))
            other += [abs(recorded[place] - values[place]) for version, values in scored.items() if version != label]
        report.boundaries += find_boundaries(recorded, labels, scored)
    report.mean_difference, report.largest_difference = float(np.mean(own or [0])), float(np.max(own or [0]))
    report.other_difference = float(np.mean(other or [0]))


def _find_versions(call: CapturedCall) -> set[int]:
    labels = {label for label in call.policy_versions or () if label is not None}
    return labels | {label + 1 for label in labels if label > 1} | {label - 1 for label in labels if label > 1}


def find_boundaries(
    recorded: Logprobs, labels: Sequence[int | None], scored: dict[int, Logprobs]
) -> Iterator[Boundary]:
    """For each change of version: the place that the recorded log-probabilities speak for."""
    for place in range(1, len(labels)):
        before, after = labels[place - 1], labels[place]
        if before is None or after is None or before == after:
            continue
        near = slice(max(0, place - _MAX_SHIFT), min(len(labels), place + _MAX_SHIFT))
        costs: dict[int, float] = {}
        for shift in range(near.start - place, near.stop - place + 1):
            where = np.arange(near.start, near.stop)
            expected = np.where(where < place + shift, scored[before][near], scored[after][near])
            costs[shift] = float(np.abs(recorded[near] - expected).sum())
        best = min(costs, key=lambda shift: (costs[shift], abs(shift)))
        yield Boundary(best, costs[0] - costs[best])


def print_report(report: UpdateReport, console: Console) -> None:
    table = Table(title="Weights for a vLLM server while sessions run", title_justify="left")
    for name in ("update", "stood still, s", *(report.steps[0] if report.steps else ())):
        table.add_column(name, justify="right")
    for number, (seconds, steps) in enumerate(zip(report.stood_still, report.steps, strict=True), 1):
        table.add_row(str(number), f"{seconds:.2f}", *(f"{value:.2f}" for value in steps.values()))
    console.print(table)
    console.print(
        f"{report.tokens:,} tokens recomputed ({report.unknown} without a version): log-probabilities are "
        f"{report.mean_difference:.3f} from those of their version's weights on average, "
        f"{report.largest_difference:.3f} at most, and {report.other_difference:.3f} from those of the neighbouring "
        "versions. "
        f"{len(report.boundaries)} changes of version within a call, {report.wrong_boundaries} of them misplaced; "
        f"{report.incomplete_calls} calls incomplete.",
        highlight=False,
    )


@click.command("vllm-updates")
@click.argument("url")
@click.option(
    "--model",
    "model_folder",
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Take the model's shape, and its weights if there are any, from this folder.",
)
@click.option("--transport", default="vllm_ipc", show_default=True, help="Send weights this way.")
@click.option("--device", default="cuda", show_default=True, help="Keep the trainer's model there.")
@click.option("--updates", type=click.IntRange(min=2), help="Make this many updates.")
@click.option("--sessions", type=click.IntRange(min=1), help="Hold so many sessions at once.")
@click.option("--checked", type=click.IntRange(min=1), help="Recompute so many of each round's sessions.")
@click.option("--interval", type=float, help="Wait this many seconds between two updates.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Use the tokenizer and chat template in this folder [default: where the server has its model from].",
)
@json_option
def command(
    url: str,
    model_folder: Path,
    transport: str,
    device: str,
    tokenizer: Path | None,
    as_json: bool,
    **sizes: float | None,
) -> None:
    """Update the weights of the vLLM server at URL while sessions run, and recompute what was captured.

    Exit with status 1 where a token has no version, or another one's weights.
    """
    plan = msgspec.structs.replace(UpdatePlan(), **{name: size for name, size in sizes.items() if size is not None})
    folder = None if tokenizer is None else str(tokenizer)
    report = run_async(
        run(plan, url, model_folder, make_progress_printer(), transport=transport, device=device, tokenizer=folder)
    )
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        print_report(report, make_console(150))
    if not report.passed:
        raise SystemExit(1)
