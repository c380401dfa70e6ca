"""A matrix, run to its end: model after model, all harnesses of a model at the same time.

Each model has a data folder of its own, whose store is the truth: a session that has a reward there is never run again,
so whoever starts anew goes on. One that the platform failed is tried again, a bounded number of times in each run. A
session that its task would mask at a limit, or exclude for tampering, earns 0 here: it did not solve it.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from polar.data.collecting import Collection
from polar.errors import ConfigError
from polar.matrix.results import Matrix, Seen, cell
from polar.matrix.settings import MatrixSettings
from polar.node.finished import Finished
from polar.node.local import LocalRollout
from polar.node.node import Load
from polar.rollout.models import TaskRequest
from polar.rollout.overrides import Overrides
from polar.rollout.samples import keyed
from polar.tasks import read_sources


class Watcher(Protocol):
    def running(self, model: str, sessions: int, load: Callable[[], Load]) -> AbstractAsyncContextManager[None]:
        """Holds while so many sessions of a model run."""
        ...

    def ended(self, finished: Finished) -> None: ...


class _Wanted(Struct, frozen=True):
    """A task in a harness."""

    harness: str
    task: str
    request: TaskRequest

    @property
    def key(self) -> str:
        return str(self.request.metadata["task_key"])


class Run:
    def __init__(self, settings: MatrixSettings) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._wanted = [
            _wanted(task, source, harness, settings)
            for source, task in read_sources(settings.task_paths, backend=settings.backend)
            for harness in settings.harnesses
        ]

    async def to_its_end(self, watcher: Watcher) -> None:
        """Raises PolarError where something can't be run at all."""
        for model in self._settings.models:
            if not all(one.graded == one.asked for one in (await self.matrix()).cells if one.model == model):
                await self._run(model, watcher)

    async def _run(self, model: str, watcher: Watcher) -> None:
        async with LocalRollout(self._settings.of_model(model), self._settings.data(model)) as rollout:
            plans = await rollout.plan(wanted.request for wanted in self._wanted)
            sessions = Collection(plans, rollout.used, attempts=self._settings.attempts)
            await sessions.resume(rollout.plane.store)
            async with watcher.running(model, sessions.left, rollout.load):
                async for finished in rollout.run(sessions):
                    watcher.ended(finished)

    async def matrix(self) -> Matrix:
        """What there is so far."""
        settings = self._settings
        keys: dict[str, dict[str, str]] = {harness: {} for harness in settings.harnesses}
        for wanted in self._wanted:
            keys[wanted.harness][wanted.task] = wanted.key
        cells = []
        for model in settings.models:
            seen = await Seen.of(settings.data(model))
            cells += [cell(seen, model, harness, keys[harness], settings.samples) for harness in settings.harnesses]
        tasks = len(self._wanted) // len(settings.harnesses)
        return Matrix(list(settings.models), settings.harnesses, tasks, settings.samples, cells)


def _wanted(task: TaskRequest, source: str, harness: str, settings: MatrixSettings) -> _Wanted:
    if task.evaluator is None:
        raise ConfigError(f"The task {task.task_id} has no evaluator, so nothing tells whether it was solved.")
    request = Overrides(harness, samples=settings.samples, timeout=settings.timeout).apply(task)
    changes = {name: "zero" for name in ("on_timeout", "on_length") if getattr(request, name) == "mask"}
    if request.suspicious == "exclude":
        changes["suspicious"] = "zero"
    request = request.model_copy(update={"task_id": f"{harness}/{task.task_id}", **changes})
    return _Wanted(harness, task.task_id, keyed(request, source))
