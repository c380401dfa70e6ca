"""The settings of a training run: one TOML file. Paths in it are relative to the file's folder."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from polar import validation_errors
from polar.config import DEFAULT_RUN, SamplingOverrides
from polar.errors import ConfigError


class SettingsSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_run_name(name: str) -> str:
    """It begins the names of tasks, and is that of a folder."""
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise ValueError("it is the name of a folder, so without slashes")
    return name


class LoraSettings(SettingsSection):
    rank: int = Field(16, gt=0, description="of the adapters")
    alpha: float = Field(32, gt=0, description="their scale, times the rank")
    targets: list[str] | Literal["all-linear"] = Field("all-linear", description="modules that get adapters")


class ModelSettings(SettingsSection):
    folder: str | None = Field(None, description="of a Hugging Face model [default: that of the embedded engine]")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights that are trained")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ... [default: a GPU if there is one]")
    threads: int | None = Field(None, gt=0, description="of PyTorch on the CPU")
    compiled: bool = Field(True, description="on a GPU: takes a minute at the start, and pays with larger models")
    lora: LoraSettings | None = Field(None, description="adapters alone are trained [default: the weights themselves]")
    trainable_layers: int | None = Field(None, gt=0, description="only so many of the last layers [default: all]")

    @model_validator(mode="after")
    def _check_one_method(self) -> "ModelSettings":
        if self.lora is not None and self.trainable_layers is not None:
            raise ValueError("it takes either `lora` or `trainable_layers`")
        return self


class TaskSettings(SettingsSection):
    """As `polar run` takes them: files and folders, and what is wanted otherwise than they say."""

    train: list[str] = Field(min_length=1, description="files and folders of tasks to train on")
    held_out: list[str] = Field([], description="tasks that only measure")
    harness: str | None = Field(None, description="run this one instead of the tasks' own")
    backend: str | None = Field(None, description="of all tasks' runtimes")
    image: str | None = Field(None, description="of all tasks' runtimes")
    model: str | None = Field(None, description="the model name that harnesses are told to ask for")
    timeout: float | None = Field(None, gt=0, description="seconds of each session's run")


class RolloutSettings(SettingsSection):
    url: str | None = Field(None, description="of a server that runs [default: one is started, and ended, here]")
    token: str | None = Field(None, repr=False, description="of that server")
    run: str = Field(DEFAULT_RUN, min_length=1, max_length=200, description="whose engines hold this policy")
    config: str | None = Field(None, description="settings of the server that is started here")
    group_size: int = Field(8, gt=1, description="sessions of a task")
    groups_per_step: int = Field(8, gt=0, description="tasks whose groups make a step")
    max_lag: int = Field(1, ge=0, description="steps that the policy may be ahead of what sampled a token")
    builder: str = Field("prefix_tree", description="how sessions come: as one tree a group, or as traces")
    verify_share: float = Field(1.0, ge=0, le=1, description="of sessions that are checked when they are received")
    sampling: SamplingOverrides = SamplingOverrides(temperature=1.0)


class GrpoSettings(SettingsSection):
    advantage: Literal["mean", "leave_one_out"] = Field(
        "mean", description="a reward less the mean of its group, or of the others in it"
    )
    scale: bool = Field(True, description="advantages are divided by the group's standard deviation")
    clip_low: float = Field(0.2, ge=0, lt=1, description="clip range below 1")
    clip_high: float = Field(0.28, ge=0, description="clip range above 1")
    tis_cap: float = Field(2.0, gt=0, description="the largest importance weight of a token")
    kl: float = Field(0.0, ge=0, description="weight of the divergence from the initial model")
    normalise: Literal["session", "token"] = Field("session", description="each session weighs the same, or each token")
    filter: bool = Field(True, description="groups whose sessions all earned the same are left out")
    refill: int = Field(0, ge=0, description="groups that a step may take besides, in place of those")


class OptimizerSettings(SettingsSection):
    lr: float = Field(1e-6, gt=0, description="learning rate of AdamW")
    betas: tuple[float, float] = Field((0.9, 0.999), description="of AdamW")
    eps: float = Field(1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    warmup: int = Field(0, ge=0, description="updates during which the rate grows to `lr`")
    max_norm: float = Field(1.0, gt=0, description="longer gradients are shortened to this")
    epochs: int = Field(1, gt=0, description="times that a batch is gone through")
    minibatches: int = Field(1, gt=0, description="updates in each of them")
    update_tokens: int | None = Field(
        None, gt=0, description="that an update computes, about, instead of `minibatches`: whole groups, one at least"
    )
    chunk_tokens: int | None = Field(
        None, gt=0, description="that go through the model at once [default: as memory allows]"
    )
    kept_tokens: int | None = Field(
        None, ge=0, description="whose activations are kept; the rest is computed twice [default: as memory allows]"
    )


class EvaluationSettings(SettingsSection):
    every: int | None = Field(None, gt=0, description="steps [default: before the first and after the last one]")
    samples: int = Field(1, gt=0, description="sessions of each held-out task")
    temperature: float | None = Field(None, ge=0, description="[default: as in training]")


class CheckpointSettings(SettingsSection):
    every: int = Field(1, gt=0, description="steps")
    keep: int = Field(2, gt=0, description="newest checkpoints that stay on disk")


class MetricsSettings(SettingsSection):
    """`metrics.jsonl` is written in any case."""

    tensorboard: bool = Field(False, description="write events for TensorBoard")
    wandb: str | None = Field(None, description="the W&B project that metrics go to")


class SyncSettings(SettingsSection):
    """Weights to engines."""

    kind: str | None = Field(None, description="of the engines, where the server isn't started here")
    api_key: str | None = Field(None, repr=False, description="of the engines")
    transport: str | None = Field(
        None, description="how weights get there; vllm_ipc: in memory, on one GPU [default: as the engines' kind does]"
    )
    tolerance: float | None = Field(None, gt=0, description="of log-probabilities, engine against trainer")
    patience: float = Field(300, gt=0, description="seconds to wait for an engine that is away")


class TrainSettings(SettingsSection):
    name: Annotated[str, AfterValidator(_check_run_name)] = Field(
        "train", min_length=1, max_length=80, description="of the run"
    )
    output: str | None = Field(None, description="[default: runs/NAME]")
    seed: int = Field(0, ge=0, description="of the order of tasks, and of the model's new parts")
    steps: int = Field(gt=0, description="updates of the policy")
    model: ModelSettings = ModelSettings()
    tasks: TaskSettings
    rollout: RolloutSettings = RolloutSettings()
    grpo: GrpoSettings = GrpoSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    metrics: MetricsSettings = MetricsSettings()
    sync: SyncSettings = SyncSettings()
    polar: dict[str, dict[str, Any]] = Field({}, description="settings of the server that is started here, by section")
    folder: Path = Field(Path(), exclude=True, description="what relative paths are relative to")

    @model_validator(mode="after")
    def _check_server_settings(self) -> "TrainSettings":
        if self.rollout.url is None:
            return self
        if self.rollout.config is not None or self.polar:
            raise ValueError(
                "rollout.url names a server that runs: `rollout.config` and [polar] are for one started here"
            )
        if self.sync.kind is None:
            raise ValueError(
                'rollout.url names a server that runs: say of which kind its engines are, sync.kind = "vllm"'
            )
        return self

    def resolve_path(self, written: str) -> Path:
        return (self.folder / written).absolute()

    @property
    def output_folder(self) -> Path:
        return self.resolve_path(self.output or f"runs/{self.name}")


def load_settings(path: Path, **overrides: Any) -> TrainSettings:
    """`overrides` are of the topmost level, and win; None is none. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Can't read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    if "folder" in table:
        raise ConfigError(f"{path}: folder: there is no such field.")
    wanted = {name: value for name, value in overrides.items() if value is not None}
    try:
        return TrainSettings.model_validate({"folder": path.parent} | table | wanted)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {validation_errors.format_validation_errors(error, subject='the settings')}."
        ) from error
