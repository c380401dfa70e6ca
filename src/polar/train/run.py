"""A training run from its settings to its end: everything that `polar train` does, for programs as well."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from polar.client.async_client import AsyncClient
from polar.client.submission import load_tasks
from polar.config import EngineSettings
from polar.errors import ConfigError
from polar.records.task import TaskRequest
from polar.tasks.overrides import Overrides
from polar.torch_runtime import run_on_compute_thread
from polar.train.checkpoint import CheckpointStore, export_model
from polar.train.learner import Learner
from polar.train.metrics import GpuMonitor, MetricsLog, StepMetrics, plot_rewards
from polar.train.rollouts import Evaluation, RolloutScheduler
from polar.train.service_process import ServiceProcess, build_service_settings, get_engine_state_file
from polar.train.settings import TrainSettings
from polar.train.trainer import NullObserver, Trainer, TrainingObserver, WeightPublisher
from polar.trajectory.session import TRACE_BUILDER, TREE_BUILDER
from polar.weight_sync.files import move_weights_to_disk, remove_staged_weights
from polar.weight_sync.publisher import ModelWeightPublisher

T = TypeVar("T")

_WEIGHTLESS_ENGINE_KIND = "scripted"
"""Engines that have none: training goes on without telling them, which shows that everything else works."""


class TrainingTasks(Struct):
    train: list[TaskRequest]
    held_out: list[TaskRequest]


class TrainingResult(Struct):
    history: list[StepMetrics]
    output: Path
    model: Path
    plot: Path

    @property
    def held_out_before(self) -> float | None:
        """What the held-out tasks earned before the first step."""
        return next((metrics.held_out for metrics in self.history if metrics.step == 0), None)

    @property
    def held_out_after(self) -> float | None:
        """What they earned after the last one; none of an earlier one's, where that evaluation failed."""
        return self.history[-1].held_out


async def train(settings: TrainSettings, watcher: TrainingObserver | None = None) -> TrainingResult:
    """To its end, or on from where an earlier process with the same output folder got. Raises PolarError."""
    tasks = read_tasks(settings)
    folder = await asyncio.to_thread(resolve_model_folder, settings)
    output = settings.output_folder
    async with contextlib.AsyncExitStack() as stack:
        service: ServiceProcess | None = None
        url, token = settings.rollout.url, settings.rollout.token
        engine = EngineSettings(kind=settings.sync.kind or "", api_key=settings.sync.api_key)
        if url is None:
            known, variables = build_service_settings(settings, folder)
            engine, token = known.engine, known.server.token
            stack.enter_context(
                _clean_up_weights(output, get_engine_state_file(settings, engine))
            )  # once the service has ended
            service = await stack.enter_async_context(ServiceProcess(settings, variables, output))
            url = service.url
        learner = await run_on_compute_thread(Learner, folder, settings)
        client = await stack.enter_async_context(AsyncClient(url, token, settings.rollout.run))
        publisher: ModelWeightPublisher | None = None
        if engine.kind != _WEIGHTLESS_ENGINE_KIND:
            sync = settings.sync
            publisher = ModelWeightPublisher(
                client,
                engine,
                learner,
                output,
                transport=sync.transport,
                tolerance=sync.tolerance,
                patience=sync.patience,
            )
        disturbed = asyncio.Event() if service is None else service.restarted
        training = train_with_client(client, settings, learner, publisher, tasks, watcher or NullObserver(), disturbed)
        try:
            history = await (training if service is None else _run_until_service_fails(training, service))
        finally:
            if publisher is not None:
                await publisher.close()
        outcome = TrainingResult(history, output, output / "model", output / "reward.png")
        await asyncio.to_thread(export_model, learner.model, folder, outcome.model)
        await asyncio.to_thread(plot_rewards, history, outcome.plot, settings.name)
        return outcome


async def train_with_client(
    client: AsyncClient,
    settings: TrainSettings,
    learner: Learner,
    publisher: WeightPublisher | None,
    tasks: TrainingTasks,
    watcher: TrainingObserver,
    weights_lost: asyncio.Event,
) -> list[StepMetrics]:
    """At a service that runs; the learner is as it was loaded. `weights_lost` is set when engines may have lost
    their weights."""
    output, rollout = settings.output_folder, settings.rollout
    checkpoints = CheckpointStore(output, settings.checkpoint.keep)
    name = checkpoints.load_or_create_run_id(settings.name, settings.seed, [task.task_id for task in tasks.train])
    progress = await asyncio.to_thread(checkpoints.load, learner)
    if learner.tree_unsupported_reason is not None and rollout.builder == TREE_BUILDER:
        rollout = rollout.model_copy(update={"builder": TRACE_BUILDER})
        watcher.on_message(f"{learner.tree_unsupported_reason} Merged traces are trained instead.")
    left = (settings.steps - progress.step) * rollout.groups_per_step
    rollouts = RolloutScheduler(
        client,
        tasks.train,
        rollout,
        name=name,
        seed=settings.seed,
        cursor=progress.cursor,
        settled=progress.settled,
        limit=len(progress.settled) + left,
    )
    gpu = GpuMonitor(enabled=learner.model.device.type == "cuda")
    with MetricsLog(output, settings, progress.step, name) as metrics:
        async with rollouts, gpu:
            trainer = Trainer(
                settings,
                learner=learner,
                rollouts=rollouts,
                publisher=publisher,
                evaluation=Evaluation(client, tasks.held_out, settings.evaluation, rollout, name=name),
                checkpoints=checkpoints,
                metrics=metrics,
                progress=progress,
                observer=watcher,
                weights_lost=weights_lost,
                gpu=gpu,
            )
            return await trainer.run()


def read_tasks(settings: TrainSettings) -> TrainingTasks:
    """Raises ConfigError."""
    wanted = settings.tasks
    overrides = Overrides(harness=wanted.harness, model=wanted.model, timeout=wanted.timeout, image=wanted.image)

    def read(paths: list[str]) -> list[TaskRequest]:
        given = [settings.resolve_path(path) for path in paths]
        return [overrides.apply(task) for task in load_tasks(given, backend=wanted.backend)]

    training, held_out = read(wanted.train), read(wanted.held_out)
    for name, tasks in (("train", training), ("held_out", held_out)):
        if without := [task.task_id for task in tasks if task.evaluator is None]:
            raise ConfigError(f"tasks.{name}: {without[0]!r} has no evaluator, so there is nothing to learn from.")
    if both := {task.task_id for task in training} & {task.task_id for task in held_out}:
        raise ConfigError(f"tasks: {min(both)!r} is held out, and trained on as well.")
    return TrainingTasks(training, held_out)


def resolve_model_folder(settings: TrainSettings) -> Path:
    if settings.model.folder is not None:
        return settings.resolve_path(settings.model.folder)
    from polar.models import ensure_default_model

    return ensure_default_model()


@contextlib.contextmanager
def _clean_up_weights(output: Path, state: Path | None) -> Iterator[None]:
    """Of the weights that engines were given, a run that is interrupted, or fails, leaves those that its engine will
    begin with, in its own folder; one that has got to its end leaves none."""
    try:
        yield
    except BaseException:
        move_weights_to_disk(output, state)
        raise
    remove_staged_weights(output)


async def _run_until_service_fails(running: Coroutine[Any, Any, T], service: ServiceProcess) -> T:
    """Unless the service can't be kept up: that is the error then."""
    training = asyncio.ensure_future(running)
    over = asyncio.ensure_future(service.wait_until_failed())
    try:
        await asyncio.wait({training, over}, return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            await over
        return await training
    finally:
        training.cancel()
        over.cancel()
        await asyncio.gather(training, over, return_exceptions=True)
