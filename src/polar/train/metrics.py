"""What a run reports: a line of JSON for each step, TensorBoard and W&B if wanted, and a plot at the end."""

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError
from polar.train.checkpoint import truncate_after_step
from polar.train.settings import MetricsSettings, TrainSettings

STEP_PHASES = "wait", "compute", "checkpoint", "sync", "evaluate"
"""Of a step."""


class StepMetrics(Struct):
    """Numbers that a step has none of are null: one in which no group had a signal has no loss, say."""

    step: int
    version: int  # of the weights that it ended with
    reward: float | None = None  # mean over the sessions that came in, filtered ones too
    held_out: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    updates: int = 0
    kl_behaviour: float | None = None
    kl_initial: float | None = None
    ratio_mean: float | None = None
    ratio_max: float | None = None
    ratio_on_policy: float | None = None  # mean over tokens of the newest weights
    truncated: float | None = None
    clipped: float | None = None
    lag_mean: float | None = None  # over tokens
    lag_max: int | None = None
    tokens_computed: int = 0
    tokens_unique: int = 0
    tokens_trained: int = 0
    memory_retries: int = 0  # how often memory ran out, and something was computed again with less kept
    groups: int = 0  # that were trained on
    groups_filtered: dict[str, int] = field(default_factory=dict)
    groups_on_their_way: int = 0
    sessions: int = 0  # that were trained on
    sessions_suspicious: int = 0  # that came in with proven tampering, trained on or not
    sessions_excluded: dict[str, int] = field(default_factory=dict)
    sessions_verified: int = 0  # that were checked when they came in
    sessions_held_back: int = 0  # that failed verification, here or at the service
    tokens_excluded: dict[str, int] = field(default_factory=dict)
    held_out_excluded: dict[str, int] = field(default_factory=dict)
    probe_largest: float | None = None  # engine against trainer, after the update
    stood_still: float | None = None  # seconds without generation
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, and of parts of them
    gpu_busy: float | None = None

    def flatten(self) -> dict[str, float]:
        """The numeric values, by name; values of a dictionary are named `field/key`."""
        numbers: dict[str, float] = {}
        for name, value in msgspec.to_builtins(self).items():
            for inner, number in value.items() if isinstance(value, dict) else [(None, value)]:
                if number is not None:
                    numbers[name if inner is None else f"{name}/{inner}"] = number
        return numbers


class MetricsLog:
    """Appends steps to metrics.jsonl and to the configured writers. Use as a context manager."""

    def __init__(self, output: Path, settings: TrainSettings, step: int, run: str) -> None:
        """Continues after `step`. Lines of later steps, whose weights were lost, are removed."""
        self.history = truncate_after_step(output / "metrics.jsonl", step, StepMetrics)
        self._file = (output / "metrics.jsonl").open("ab")
        self._writers = _create_writers(output, settings.metrics, settings, step, run)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for writer in self._writers:
            writer.close()

    def write(self, metrics: StepMetrics) -> None:
        self.history.append(metrics)
        self._file.write(msgspec.json.encode(metrics) + b"\n")
        self._file.flush()
        for writer in self._writers:
            writer.write(metrics)


class _TensorBoard:
    def __init__(self, output: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("metrics.tensorboard takes the package tensorboard: pip install tensorboard.") from error
        self._writer = SummaryWriter(str(output / "tensorboard"), purge_step=step + 1)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.flatten().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, output: Path, project: str, run: str, settings: TrainSettings) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ConfigError("metrics.wandb takes the package wandb: pip install wandb.") from error
        config = settings.model_dump(mode="json", exclude={"rollout": {"token"}, "sync": {"api_key"}, "polar": True})
        self._run = wandb.init(project=project, id=run, name=run, dir=str(output), resume="allow", config=config)
        # W&B's own step only grows: after a resume it would drop the steps that are trained again.
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(metrics.flatten())

    def close(self) -> None:
        self._run.finish()


def _create_writers(
    output: Path, metrics_settings: MetricsSettings, settings: TrainSettings, step: int, run: str
) -> list[Any]:
    writers: list[Any] = [_TensorBoard(output, step)] if metrics_settings.tensorboard else []
    if metrics_settings.wandb is not None:
        writers.append(_Wandb(output, metrics_settings.wandb, run, settings))
    return writers


class GpuMonitor:
    """Measures the utilization of this machine's GPUs by all processes. Use as an async context manager. Without
    nvidia-smi it measures nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self._program = shutil.which("nvidia-smi") if enabled else None
        self.utilizations: list[float] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reader_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "GpuMonitor":
        if self._program is not None:
            options = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500")
            pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(self._program, *options, stdout=pipe, stderr=nothing)
            self._reader_task = asyncio.create_task(self._read(self._process))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                self._process.kill()
            await self._process.wait()
        if self._reader_task is not None:
            await self._reader_task

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # a GPU that does not report it
                self.utilizations.append(float(line) / 100)

    def take_utilization(self) -> float | None:
        """The mean utilization since the last call."""
        utilizations, self.utilizations = self.utilizations, []
        return sum(utilizations) / len(utilizations) if utilizations else None


def plot_rewards(history: Sequence[StepMetrics], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    training = [(metrics.step, metrics.reward) for metrics in history if metrics.reward is not None and metrics.step]
    held_out = [(metrics.step, metrics.held_out) for metrics in history if metrics.held_out is not None]
    if training:
        axes.plot(
            *zip(*training, strict=True), color="#7aa6c2", marker=".", label="training tasks, while they are sampled"
        )
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#c1440e", marker="o", label="held-out tasks")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if training or held_out:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
