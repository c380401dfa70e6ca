"""The training loop: groups of rollouts in, updated weights out, back into the engines that sample the next groups.

    groups ─► advantages ─► Learner ─► checkpoint ─► engines (new version) ─► groups of the next steps

Sampling continues while a step is computed. After a crash, another process with the same output folder resumes from the
last checkpoint. Groups that were sampled meanwhile are still at the service and are used.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.records.session import HOLD_REASONS
from polar.torch_runtime import run_on_compute_thread
from polar.train.batch import TrainingGroup, mark_stale_sessions, select_training_sessions
from polar.train.checkpoint import CheckpointStore, JournalEntry, Progress
from polar.train.groups import RolloutGroup, TokenColumns
from polar.train.learner import Learner, LearnerStats, compute_mean_ratio
from polar.train.metrics import GpuMonitor, MetricsLog, StepMetrics
from polar.train.rollouts import Evaluation, RolloutScheduler
from polar.train.settings import TrainSettings
from polar.weight_sync.base import ProbeFailedError, SyncError
from polar.weight_sync.publisher import EngineVersions
from polar.weight_sync.updater import SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_UPDATE_ATTEMPTS = 3


class WeightPublisher(Protocol):
    """Sends weights to the engines; implemented by `polar.weight_sync.publisher.ModelWeightPublisher`."""

    async def read_versions(self) -> EngineVersions: ...

    async def has_trainer_weights(self, version: int) -> bool:
        """Whether all engines sample with the trainer's weights."""
        ...

    async def publish(self, version: int) -> SyncReport:
        """Sends the trainer's weights to the engines. Raises SyncError."""
        ...


class TrainingObserver(Protocol):
    """Is notified of what the trainer does."""

    def on_begin(self, history: list[StepMetrics], steps: int) -> None: ...

    def on_wait(self, ready: int, wanted: int) -> None:
        """The trainer waits for groups: `ready` of `wanted` have finished."""
        ...

    def on_learn(self, step: int, sessions: int) -> None: ...

    def on_evaluate(self, step: int) -> None: ...

    def on_message(self, text: str) -> None:
        """A message for the user."""
        ...

    def on_step(self, metrics: StepMetrics) -> None:
        """A step has finished."""
        ...


class NullObserver:
    def on_begin(self, history: list[StepMetrics], steps: int) -> None: ...

    def on_wait(self, ready: int, wanted: int) -> None: ...

    def on_learn(self, step: int, sessions: int) -> None: ...

    def on_evaluate(self, step: int) -> None: ...

    def on_message(self, text: str) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...


class _CollectedGroups(Struct):
    """The groups collected for one step."""

    groups: list[RolloutGroup] = field(default_factory=list)  # all of them
    trained: list[TrainingGroup] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)


class Trainer:
    def __init__(
        self,
        settings: TrainSettings,
        *,
        learner: Learner,
        rollouts: RolloutScheduler,
        publisher: WeightPublisher | None,
        evaluation: Evaluation,
        checkpoints: CheckpointStore,
        metrics: MetricsLog,
        progress: Progress,
        observer: TrainingObserver,
        weights_lost: asyncio.Event,
        gpu: GpuMonitor,
    ) -> None:
        """Without `publisher` no weights are sent (an engine without a model). `weights_lost` is set when engines may
        have lost their weights."""
        self._settings = settings
        self._learner = learner
        self._rollouts = rollouts
        self._publisher = publisher
        self._evaluation = evaluation
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._progress = progress
        self._observer = observer
        self._weights_lost = weights_lost
        self._gpu = gpu
        self._trained_sessions = {name for entry in checkpoints.read_journal(progress.step) for name in entry.sessions}
        self._entries: list[JournalEntry] = []  # of steps since the last checkpoint
        self._seconds: dict[str, float] = {}

    async def run(self) -> list[StepMetrics]:
        progress, last = self._progress, self._settings.steps
        self._observer.on_begin(self._metrics.history, last)
        await self._align_engines()
        await self._rollouts.submit_next_groups()
        if not any(metrics.step == progress.step for metrics in self._metrics.history):
            metrics = StepMetrics(progress.step, progress.version)
            await self._evaluate(metrics)
            self._report(metrics)
        while progress.step < last:
            await self._run_step()
        return self._metrics.history

    # One step

    async def _run_step(self) -> None:
        progress = self._progress
        self._seconds = {}
        with self._time_phase("wait"):
            collected = await self._collect_groups()
        metrics = self._build_metrics(collected)
        metrics.step = progress.step + 1
        if collected.trained:
            self._observer.on_learn(metrics.step, metrics.sessions)
            with self._time_phase("compute"):
                learned = await run_on_compute_thread(self._learner.step, collected.trained, metrics.step)
            self._add_learner_stats(metrics, collected.trained, learned)
        progress.step += 1
        if collected.trained and self._publisher is not None:  # otherwise the current version has these weights already
            progress.version += 1
        progress.steps_of[progress.version] = progress.step
        progress.cursor = collected.groups[-1].cursor
        self._rollouts.settle(collected.groups)
        self._entries.append(
            JournalEntry(progress.step, [name for group in collected.trained for name in group.sessions])
        )
        self._trained_sessions.update(self._entries[-1].sessions)
        evaluation_is_due = self._evaluation.is_due(
            progress.step, self._settings.steps
        )  # evaluated weights must not be lost
        if (
            evaluation_is_due
            or progress.step % self._settings.checkpoint.every == 0
            or progress.step == self._settings.steps
        ):
            with self._time_phase("checkpoint"):
                await asyncio.to_thread(self._checkpoints.save, progress, self._learner, self._entries)
            self._entries = []
        if collected.trained:
            with self._time_phase("sync"):
                report = await self._publish_weights()
            if report is not None:
                metrics.probe_largest, metrics.stood_still = report.difference.largest, report.paused_seconds
                self._seconds |= report.seconds
        metrics.version = progress.version
        await self._rollouts.submit_next_groups()
        with self._time_phase("evaluate"):
            await self._evaluate(metrics)
        metrics.seconds, metrics.gpu_busy = self._seconds, self._gpu.take_utilization()
        metrics.groups_on_their_way = self._rollouts.in_flight
        self._report(metrics)

    async def _collect_groups(self) -> _CollectedGroups:
        """Collects a step's worth of groups. Up to `grpo.refill` further ones replace groups without a signal."""
        settings = self._settings
        collected = _CollectedGroups()
        group_count, refill = settings.rollout.groups_per_step, settings.grpo.refill
        while len(collected.groups) < group_count or (refill and len(collected.trained) < group_count):
            self._observer.on_wait(len(collected.groups), group_count)
            group = await self._wait_with_current_weights(self._rollouts.take_group)
            self._exclude_sessions(group)
            outcome = select_training_sessions(group, settings.grpo)
            collected.groups.append(group)
            if isinstance(outcome, TrainingGroup):
                collected.trained.append(outcome)
                continue
            collected.filtered[outcome] += 1
            if refill:
                refill -= 1
                self._rollouts.limit += 1
                self._rollouts.settle([group])
                await self._rollouts.submit_next_groups()
        collected.trained.sort(
            key=lambda group: group.index
        )  # so that the order in which they finished does not matter
        return collected

    def _exclude_sessions(self, group: RolloutGroup) -> None:
        """Marks sessions that must not be trained on: stale ones, and ones that were trained on before."""
        mark_stale_sessions(group, self._compute_lag, self._settings.rollout.max_lag)
        if any(member.reason == "stale" for member in group.members):
            self._weights_lost.set()  # engines that lost their weights may sample with old ones
        for member in group.members:
            if member.session_id in self._trained_sessions:
                member.reason = "trained_before"

    def _compute_lag(self, version: int) -> int:
        """How many steps the current weights are ahead of `version`. An unknown version was made by an earlier process
        after the checkpoint that this one resumed from, and was lost with it."""
        earlier_versions = [known_version for known_version in self._progress.steps_of if known_version <= version]
        if not earlier_versions:
            return 1 + self._progress.step + self._settings.rollout.max_lag  # unknown: too old
        nearest = max(earlier_versions)
        return max(0, self._progress.step - self._progress.steps_of[nearest] - (version - nearest))

    # Engines

    async def _wait_with_current_weights(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Waits for an operation that needs sampling. Before and during the wait, engines that may have lost their
        weights get them again."""
        await self._realign_if_lost()
        waiting = asyncio.ensure_future(operation())
        try:
            while not waiting.done():
                weights_lost = asyncio.ensure_future(self._weights_lost.wait())
                try:
                    await asyncio.wait({waiting, weights_lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    weights_lost.cancel()
                await self._realign_if_lost()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _realign_if_lost(self) -> None:
        if self._weights_lost.is_set():
            self._weights_lost.clear()
            await self._align_engines()

    async def _align_engines(self) -> None:
        """Ensures that the engines have the current weights under the current version. A version that the service or an
        engine knows may denote weights that an earlier process lost. Then the current weights get a larger version."""
        if self._publisher is None:
            return
        own, engine_versions = self._progress.version, await self._publisher.read_versions()
        if (
            engine_versions.labeled == {own}
            and engine_versions.held <= {own}
            and await self._publisher.has_trainer_weights(own)
        ):
            return
        newest = max(engine_versions.labeled | engine_versions.held, default=0)
        if newest > own or own in engine_versions.labeled:
            self._progress.version = max(newest, own) + 1
            self._progress.steps_of[self._progress.version] = self._progress.step
        await self._publish_weights()

    async def _publish_weights(self) -> SyncReport | None:
        if self._publisher is None:
            return None
        for attempt in range(1, _MAX_UPDATE_ATTEMPTS + 1):
            try:
                return await self._publisher.publish(self._progress.version)
            except SyncError as error:
                if attempt == _MAX_UPDATE_ATTEMPTS:
                    raise
                log.warning("Sending the weights to the engines again: %s", error)
                if isinstance(error, ProbeFailedError):
                    self._progress.version += 1
                    self._progress.steps_of[self._progress.version] = self._progress.step
        raise AssertionError  # the last attempt returns or raises

    # Held-out tasks

    async def _evaluate(self, metrics: StepMetrics) -> None:
        """Runs the evaluation if it is due. The weights stay unchanged meanwhile, and training tasks are still
        sampled."""
        if self._evaluation.is_due(metrics.step, self._settings.steps):
            self._observer.on_evaluate(metrics.step)
            result = await self._wait_with_current_weights(partial(self._evaluation.run, metrics.step))
            metrics.version = self._progress.version
            metrics.held_out, metrics.held_out_excluded = result.reward, result.reasons

    # Metrics

    def _build_metrics(self, collected: _CollectedGroups) -> StepMetrics:
        members = [member for group in collected.groups for member in group.members]
        rewards = [member.reward for member in members if member.reward is not None]
        excluded: Counter[str] = Counter(member.reason for member in members if member.reason is not None)
        tokens: Counter[str] = Counter()
        for group in collected.groups:
            tokens.update(group.excluded_tokens)
        metrics = StepMetrics(
            step=0,
            version=self._progress.version,
            reward=float(np.mean(rewards)) if rewards else None,
            tokens_unique=sum(group.unique for group in collected.groups),
            groups=len(collected.trained),
            groups_filtered=dict(collected.filtered),
            sessions=sum(len(group.sessions) for group in collected.trained),
            sessions_suspicious=sum(member.suspicious for member in members),
            sessions_excluded=dict(excluded),
            sessions_verified=sum(group.verified_sessions for group in collected.groups),
            sessions_held_back=sum(excluded[reason] for reason in HOLD_REASONS),
            tokens_excluded=dict(tokens),
        )
        if metrics.sessions_held_back:
            self._observer.on_message(
                f"{metrics.sessions_held_back} of {len(members)} sessions failed verification and are not trained on: "
                "see the log, here and at the service."
            )
        if collected.trained:
            lags = self._compute_token_lags(_concatenate_columns(collected.trained))
            metrics.lag_mean, metrics.lag_max = float(lags.mean()), int(lags.max())
        return metrics

    def _add_learner_stats(self, metrics: StepMetrics, groups: Sequence[TrainingGroup], learned: LearnerStats) -> None:
        for name in ("loss", "grad_norm", "learning_rate", "updates", "kl_behaviour", "kl_initial", "ratio_mean"):
            setattr(metrics, name, getattr(learned, name))
        metrics.ratio_max, metrics.truncated, metrics.clipped = learned.ratio_max, learned.truncated, learned.clipped
        metrics.tokens_computed, metrics.tokens_trained = learned.computed_tokens, learned.trained_tokens
        metrics.memory_retries = learned.memory_retries
        columns = _concatenate_columns(groups)
        newest = columns.version == self._progress.version
        metrics.ratio_on_policy = compute_mean_ratio(columns, learned.logprobs, newest)
        self._seconds |= learned.seconds

    def _compute_token_lags(self, columns: TokenColumns) -> NDArray[np.int64]:
        versions, version_indices = np.unique(columns.version, return_inverse=True)
        return np.array([self._compute_lag(int(version)) for version in versions])[version_indices]

    def _report(self, metrics: StepMetrics) -> None:
        self._metrics.write(metrics)
        self._observer.on_step(metrics)

    @contextmanager
    def _time_phase(self, phase: str) -> Iterator[None]:
        started_at = time.monotonic()
        yield
        self._seconds[phase] = time.monotonic() - started_at


def _concatenate_columns(groups: Sequence[TrainingGroup]) -> TokenColumns:
    return TokenColumns.concatenate([group.columns for group in groups])
