"""A training run from its settings to its end: everything that `polar train` does, for programs as well."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from polar.client.async_client import AsyncClient
from polar.client.given import tasks_of
from polar.config import EngineSettings
from polar.errors import ConfigError
from polar.rollout.models import TaskRequest
from polar.rollout.overrides import Overrides
from polar.train import picture
from polar.train.checkpoint import Checkpoints
from polar.train.computing import computed
from polar.train.evaluation import Evaluation
from polar.train.launching import ServiceProcess, service_settings, state_file
from polar.train.learner import Learner
from polar.train.metrics import GpuWatch, Metrics, StepMetrics
from polar.train.model import export
from polar.train.rollouts import Rollouts
from polar.train.settings import TrainSettings
from polar.train.syncing.staging import clear, put_away
from polar.train.trainer import Engines, Nobody, Trainer, Watcher
from polar.train.weights import EngineWeights
from polar.trajectory.session import MERGED, TREE

T = TypeVar("T")

_WITHOUT_WEIGHTS = "scripted"
"""Engines that have none: training goes on without telling them, which shows that everything else works."""


class Tasks(Struct):
    train: list[TaskRequest]
    held_out: list[TaskRequest]


class Outcome(Struct):
    history: list[StepMetrics]
    output: Path
    model: Path
    picture: Path

    @property
    def before(self) -> float | None:
        """What the held-out tasks earned before the first step."""
        return next((told.held_out for told in self.history if told.step == 0), None)

    @property
    def after(self) -> float | None:
        """What they earned after the last one; none of an earlier one's, where that evaluation failed."""
        return self.history[-1].held_out


async def train(settings: TrainSettings, watcher: Watcher | None = None) -> Outcome:
    """To its end, or on from where an earlier process with the same output folder got. Raises PolarError."""
    tasks = read_tasks(settings)
    folder = await asyncio.to_thread(model_folder, settings)
    output = settings.output_folder
    async with contextlib.AsyncExitStack() as stack:
        service: ServiceProcess | None = None
        url, token = settings.rollout.url, settings.rollout.token
        engine = EngineSettings(kind=settings.sync.kind or "", api_key=settings.sync.api_key)
        if url is None:
            known, variables = service_settings(settings, folder)
            engine, token = known.engine, known.server.token
            stack.enter_context(_tidy(output, state_file(settings, engine)))  # once the service has ended
            service = await stack.enter_async_context(ServiceProcess(settings, variables, output))
            url = service.url
        learner = await computed(Learner, folder, settings)
        client = await stack.enter_async_context(AsyncClient(url, token, settings.rollout.run))
        engines: EngineWeights | None = None
        if engine.kind != _WITHOUT_WEIGHTS:
            engines = EngineWeights(client, engine, settings.sync, learner, output)
        disturbed = asyncio.Event() if service is None else service.restarted
        training = train_at(client, settings, learner, engines, tasks, watcher or Nobody(), disturbed)
        try:
            history = await (training if service is None else _unless_over(training, service))
        finally:
            if engines is not None:
                await engines.close()
        outcome = Outcome(history, output, output / "model", output / "reward.png")
        await asyncio.to_thread(export, learner.model, folder, outcome.model)
        await asyncio.to_thread(picture.draw, history, outcome.picture, settings.name)
        return outcome


async def train_at(
    client: AsyncClient,
    settings: TrainSettings,
    learner: Learner,
    engines: Engines | None,
    tasks: Tasks,
    watcher: Watcher,
    disturbed: asyncio.Event,
) -> list[StepMetrics]:
    """At a service that runs; the learner is as it was loaded. `disturbed` is set when engines may have lost their
    weights."""
    output, rollout = settings.output_folder, settings.rollout
    checkpoints = Checkpoints(output, settings.checkpoint.keep)
    name = checkpoints.identity(settings.name, settings.seed, [task.task_id for task in tasks.train])
    progress = await asyncio.to_thread(checkpoints.load, learner)
    if learner.not_over_trees is not None and rollout.builder == TREE:
        rollout = rollout.model_copy(update={"builder": MERGED})
        watcher.says(f"{learner.not_over_trees} Merged traces are trained instead.")
    left = (settings.steps - progress.step) * rollout.groups_per_step
    rollouts = Rollouts(
        client,
        tasks.train,
        rollout,
        name=name,
        seed=settings.seed,
        cursor=progress.cursor,
        settled=progress.settled,
        limit=len(progress.settled) + left,
    )
    gpu = GpuWatch(wanted=learner.model.device.type == "cuda")
    with Metrics(output, settings, progress.step, name) as metrics:
        async with rollouts, gpu:
            trainer = Trainer(
                settings,
                learner=learner,
                rollouts=rollouts,
                engines=engines,
                evaluation=Evaluation(client, tasks.held_out, settings.evaluation, rollout, name=name),
                checkpoints=checkpoints,
                metrics=metrics,
                progress=progress,
                watcher=watcher,
                disturbed=disturbed,
                gpu=gpu,
            )
            return await trainer.run()


def read_tasks(settings: TrainSettings) -> Tasks:
    """Raises ConfigError."""
    wanted = settings.tasks
    overrides = Overrides(harness=wanted.harness, model=wanted.model, timeout=wanted.timeout, image=wanted.image)

    def read(paths: list[str]) -> list[TaskRequest]:
        given = [settings.path(path) for path in paths]
        return [overrides.apply(task) for task in tasks_of(given, backend=wanted.backend)]

    training, held_out = read(wanted.train), read(wanted.held_out)
    for name, tasks in (("train", training), ("held_out", held_out)):
        if without := [task.task_id for task in tasks if task.evaluator is None]:
            raise ConfigError(f"tasks.{name}: {without[0]!r} has no evaluator, so there is nothing to learn from.")
    if both := {task.task_id for task in training} & {task.task_id for task in held_out}:
        raise ConfigError(f"tasks: {min(both)!r} is held out, and trained on as well.")
    return Tasks(training, held_out)


def model_folder(settings: TrainSettings) -> Path:
    if settings.model.folder is not None:
        return settings.path(settings.model.folder)
    from polar.models import default_model

    return default_model()


@contextlib.contextmanager
def _tidy(output: Path, state: Path | None) -> Iterator[None]:
    """Of the weights that engines were given, a run that is interrupted, or fails, leaves those that its engine will
    begin with, in its own folder; one that has got to its end leaves none."""
    try:
        yield
    except BaseException:
        put_away(output, state)
        raise
    clear(output)


async def _unless_over(running: Coroutine[Any, Any, T], service: ServiceProcess) -> T:
    """Unless the service can't be kept up: that is the error then."""
    training = asyncio.ensure_future(running)
    over = asyncio.ensure_future(service.over())
    try:
        await asyncio.wait({training, over}, return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            await over
        return await training
    finally:
        training.cancel()
        over.cancel()
        await asyncio.gather(training, over, return_exceptions=True)
