"""A matrix, run to its end: model after model, all harnesses of a model at the same time.

Each model has a data folder of its own, whose store is the truth: a session that has a reward there is never run again,
so whoever starts anew goes on. One that the platform failed is tried again, a bounded number of times in each run. A
session that its task would mask at a limit, or exclude for tampering, earns 0 here: it did not solve it.

The settings are one TOML file. Paths of tasks and output are relative to its folder.
"""

import tomllib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from polar import config, validation_errors
from polar.config import EngineSettings, Settings
from polar.data.collection import Collection
from polar.errors import ConfigError
from polar.matrix.results import Matrix, ModelSessions, make_cell
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.node.node import NodeLoad
from polar.records.sample import add_task_key
from polar.records.task import TaskRequest
from polar.tasks import read_sources
from polar.tasks.overrides import Overrides


class MatrixModel(EngineSettings):
    """An engine that serves it, as [engine] in polar.toml."""

    kind: str = "vllm"


class MatrixSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: list[str] = Field(min_length=1, description="files and folders, as `polar run` takes them")
    harnesses: list[str] = Field(min_length=1, description="NAME or NAME@VERSION")
    models: dict[str, MatrixModel] = Field(min_length=1)
    samples: int = Field(1, gt=0, description="sessions of each task, with each model and harness")
    attempts: int = Field(3, gt=0, description="tries of a session, where the platform fails")
    backend: str | None = Field(None, description="where all tasks run, whatever they say")
    timeout: float | None = Field(None, gt=0, description="seconds of each session's run, likewise")
    output: str = Field("matrix", description="the folder of everything that is kept")
    polar: dict[str, dict[str, Any]] = Field({}, description="other settings of polar.toml, by section")
    folder: Path = Field(Path(), exclude=True, description="what relative paths are relative to")

    @field_validator("harnesses")
    @classmethod
    def _drop_duplicates(cls, harnesses: list[str]) -> list[str]:
        return list(dict.fromkeys(harnesses))

    @field_validator("models")
    @classmethod
    def _check_folder_names(cls, models: dict[str, MatrixModel]) -> dict[str, MatrixModel]:
        """A model's name is that of a folder."""
        for name in models:
            if "/" in name or name in (".", "..") or not name.isprintable():
                raise ValueError(f"{name!r} is the name of a folder as well, so without slashes")
        return models

    @property
    def task_paths(self) -> list[Path]:
        return [self.folder / path for path in self.tasks]

    @property
    def output_folder(self) -> Path:
        return (self.folder / self.output).absolute()

    def get_data_folder(self, model: str) -> Path:
        """The model's data folder."""
        return self.output_folder / model

    def make_model_settings(self, name: str) -> Settings:
        """Those of a gateway in front of the model's engine, with a store of its own. A key that the model hasn't is
        that of polar.toml, or of POLAR_ENGINE__API_KEY. Raises ConfigError."""
        common = config.load(overrides={**self.polar, "gateway": config.PRIVATE_GATEWAY, "store": {"url": None}})
        engine = self.models[name]
        if engine.api_key is None:
            engine = engine.model_copy(update={"api_key": common.engine.api_key})
        return common.model_copy(update={"engine": engine})


def load_matrix_settings(path: Path, **overrides: Any) -> MatrixSettings:
    """`overrides` win; None is none. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Can't read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    given_overrides = {name: value for name, value in overrides.items() if value is not None}
    try:
        return MatrixSettings.model_validate(table | given_overrides | {"folder": path.parent})
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {validation_errors.format_validation_errors(error, subject='the settings')}."
        ) from error


class MatrixWatcher(Protocol):
    def show_model(self, model: str, sessions: int, load: Callable[[], NodeLoad]) -> AbstractAsyncContextManager[None]:
        """Holds while so many sessions of a model run."""
        ...

    def on_session_ended(self, finished: FinishedSession) -> None: ...


class _MatrixTask(Struct, frozen=True):
    """A task in a harness."""

    harness: str
    task: str
    task_request: TaskRequest

    @property
    def key(self) -> str:
        return str(self.task_request.metadata["task_key"])


class MatrixRun:
    def __init__(self, settings: MatrixSettings) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._tasks = [
            _make_matrix_task(task, source, harness, settings)
            for source, task in read_sources(settings.task_paths, backend=settings.backend)
            for harness in settings.harnesses
        ]

    async def run(self, watcher: MatrixWatcher) -> None:
        """Raises PolarError where something can't be run at all."""
        for model in self._settings.models:
            if not all(one.graded == one.asked for one in (await self.load_matrix()).cells if one.model == model):
                await self._run_model(model, watcher)

    async def _run_model(self, model: str, watcher: MatrixWatcher) -> None:
        async with LocalRollout(
            self._settings.make_model_settings(model), self._settings.get_data_folder(model)
        ) as rollout:
            plans = await rollout.plan(wanted.task_request for wanted in self._tasks)
            sessions = Collection(plans, rollout.get_usage, max_attempts=self._settings.attempts)
            await sessions.resume(rollout.plane.store)
            async with watcher.show_model(model, sessions.num_left, rollout.get_load):
                async for finished in rollout.run(sessions):
                    watcher.on_session_ended(finished)

    async def load_matrix(self) -> Matrix:
        """What there is so far."""
        settings = self._settings
        keys: dict[str, dict[str, str]] = {harness: {} for harness in settings.harnesses}
        for wanted in self._tasks:
            keys[wanted.harness][wanted.task] = wanted.key
        cells = []
        for model in settings.models:
            sessions = await ModelSessions.load(settings.get_data_folder(model))
            cells += [
                make_cell(sessions, model, harness, keys[harness], settings.samples) for harness in settings.harnesses
            ]
        tasks = len(self._tasks) // len(settings.harnesses)
        return Matrix(list(settings.models), settings.harnesses, tasks, settings.samples, cells)


def _make_matrix_task(task: TaskRequest, source: str, harness: str, settings: MatrixSettings) -> _MatrixTask:
    if task.evaluator is None:
        raise ConfigError(f"The task {task.task_id} has no evaluator, so nothing tells whether it was solved.")
    request = Overrides(harness, samples=settings.samples, timeout=settings.timeout).apply(task)
    changes = {name: "zero" for name in ("on_timeout", "on_length") if getattr(request, name) == "mask"}
    if request.suspicious == "exclude":
        changes["suspicious"] = "zero"
    request = request.model_copy(update={"task_id": f"{harness}/{task.task_id}", **changes})
    return _MatrixTask(harness, task.task_id, add_task_key(request, source))
