"""A matrix, run to its end: model after model, all harnesses of a model at the same time.

Each model has a data folder of its own, whose store is the truth: a session that has a reward there is never run again,
so whoever starts anew goes on. One that the platform failed is tried again, a bounded number of times in each run. A
session that its task would mask at a limit, or exclude for tampering, earns 0 here: it did not solve it.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from polar.data.collection import Collection
from polar.errors import ConfigError
from polar.matrix.results import Matrix, ModelSessions, make_cell
from polar.matrix.settings import MatrixSettings
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.node.node import NodeLoad
from polar.records.sample import with_task_key
from polar.records.task import TaskRequest
from polar.tasks import read_sources
from polar.tasks.overrides import Overrides


class MatrixWatcher(Protocol):
    def show_model(self, model: str, sessions: int, load: Callable[[], NodeLoad]) -> AbstractAsyncContextManager[None]:
        """Holds while so many sessions of a model run."""
        ...

    def session_ended(self, finished: FinishedSession) -> None: ...


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
        async with LocalRollout(self._settings.model_settings(model), self._settings.data_folder(model)) as rollout:
            plans = await rollout.plan(wanted.task_request for wanted in self._tasks)
            sessions = Collection(plans, rollout.used, max_attempts=self._settings.attempts)
            await sessions.resume(rollout.plane.store)
            async with watcher.show_model(model, sessions.num_left, rollout.load):
                async for finished in rollout.run(sessions):
                    watcher.session_ended(finished)

    async def load_matrix(self) -> Matrix:
        """What there is so far."""
        settings = self._settings
        keys: dict[str, dict[str, str]] = {harness: {} for harness in settings.harnesses}
        for wanted in self._tasks:
            keys[wanted.harness][wanted.task] = wanted.key
        cells = []
        for model in settings.models:
            seen = await ModelSessions.load(settings.data_folder(model))
            cells += [
                make_cell(seen, model, harness, keys[harness], settings.samples) for harness in settings.harnesses
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
    return _MatrixTask(harness, task.task_id, with_task_key(request, source))
