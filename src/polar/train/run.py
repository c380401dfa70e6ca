"""A complete training run: everything that `polar train` does, callable from programs."""

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
"""An engine kind without weights: training runs without sending them, which tests everything else."""


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
        """The mean reward of the held-out tasks before the first step."""
        return next((metrics.held_out for metrics in self.history if metrics.step == 0), None)

    @property
    def held_out_after(self) -> float | None:
        """Their mean reward after the last step. None if that evaluation failed."""
        return self.history[-1].held_out


async def train(settings: TrainSettings, observer: TrainingObserver | None = None) -> TrainingResult:
    """Runs training to its end, resuming from the output folder's last checkpoint. Raises PolarError."""
    tasks = read_tasks(settings)
    folder = await asyncio.to_thread(resolve_model_folder, settings)
    output = settings.output_folder
    async with contextlib.AsyncExitStack() as stack:
        service: ServiceProcess | None = None
        url, token = settings.rollout.url, settings.rollout.token
        engine = EngineSettings(kind=settings.sync.kind or "", api_key=settings.sync.api_key)
        if url is None:
            service_settings, variables = build_service_settings(settings, folder)
            engine, token = service_settings.engine, service_settings.server.token
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
        weights_lost = asyncio.Event() if service is None else service.restarted
        training = train_with_client(
            client, settings, learner, publisher, tasks, observer or NullObserver(), weights_lost
        )
        try:
            history = await (training if service is None else _run_until_service_fails(training, service))
        finally:
            if publisher is not None:
                await publisher.close()
        result = TrainingResult(history, output, output / "model", output / "reward.png")
        await asyncio.to_thread(export_model, learner.model, folder, result.model)
        await asyncio.to_thread(plot_rewards, history, result.plot, settings.name)
        return result


async def train_with_client(
    client: AsyncClient,
    settings: TrainSettings,
    learner: Learner,
    publisher: WeightPublisher | None,
    tasks: TrainingTasks,
    observer: TrainingObserver,
    weights_lost: asyncio.Event,
) -> list[StepMetrics]:
    """Trains against a running service, with a freshly loaded learner. `weights_lost` is set when engines may have lost
    their weights."""
    output, rollout = settings.output_folder, settings.rollout
    checkpoints = CheckpointStore(output, settings.checkpoint.keep)
    name = checkpoints.load_or_create_run_id(settings.name, settings.seed, [task.task_id for task in tasks.train])
    progress = await asyncio.to_thread(checkpoints.load, learner)
    if learner.tree_unsupported_reason is not None and rollout.builder == TREE_BUILDER:
        rollout = rollout.model_copy(update={"builder": TRACE_BUILDER})
        observer.on_message(f"{learner.tree_unsupported_reason} Merged traces are trained instead.")
    remaining_groups = (settings.steps - progress.step) * rollout.groups_per_step
    rollouts = RolloutScheduler(
        client,
        tasks.train,
        rollout,
        name=name,
        seed=settings.seed,
        cursor=progress.cursor,
        settled=progress.settled,
        limit=len(progress.settled) + remaining_groups,
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
                observer=observer,
                weights_lost=weights_lost,
                gpu=gpu,
            )
            return await trainer.run()


def read_tasks(settings: TrainSettings) -> TrainingTasks:
    """Loads the training and held-out tasks. Raises ConfigError."""
    task_settings = settings.tasks
    overrides = Overrides(
        harness=task_settings.harness,
        model=task_settings.model,
        timeout=task_settings.timeout,
        image=task_settings.image,
    )

    def read(paths: list[str]) -> list[TaskRequest]:
        resolved_paths = [settings.resolve_path(path) for path in paths]
        return [overrides.apply(task) for task in load_tasks(resolved_paths, backend=task_settings.backend)]

    training, held_out = read(task_settings.train), read(task_settings.held_out)
    for name, tasks in (("train", training), ("held_out", held_out)):
        if ungraded := [task.task_id for task in tasks if task.evaluator is None]:
            raise ConfigError(f"tasks.{name}: {ungraded[0]!r} has no evaluator, so there is nothing to learn from.")
    if shared_ids := {task.task_id for task in training} & {task.task_id for task in held_out}:
        raise ConfigError(f"tasks: {min(shared_ids)!r} is held out, and trained on as well.")
    return TrainingTasks(training, held_out)


def resolve_model_folder(settings: TrainSettings) -> Path:
    if settings.model.folder is not None:
        return settings.resolve_path(settings.model.folder)
    from polar.models import ensure_default_model

    return ensure_default_model()


@contextlib.contextmanager
def _clean_up_weights(output: Path, state: Path | None) -> Iterator[None]:
    """Removes the staged weights at the end of a run. If it fails or is interrupted, the weights that its engine will
    start with are kept in the output folder."""
    try:
        yield
    except BaseException:
        move_weights_to_disk(output, state)
        raise
    remove_staged_weights(output)


async def _run_until_service_fails(running: Coroutine[Any, Any, T], service: ServiceProcess) -> T:
    """Waits for the training, or raises the service's error as soon as the service can't be kept running."""
    training = asyncio.ensure_future(running)
    service_failure = asyncio.ensure_future(service.wait_until_failed())
    try:
        await asyncio.wait({training, service_failure}, return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            await service_failure
        return await training
    finally:
        training.cancel()
        service_failure.cancel()
        await asyncio.gather(training, service_failure, return_exceptions=True)
