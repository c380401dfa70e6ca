"""TRL's own classes, with Polar in them. Imported by `rollout_func` where TRL is wanted, and nowhere else."""

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from polar.bridges.advantages import compute_session_advantages
from polar.bridges.bridge import BlockingBridge
from polar.bridges.rollouts import SessionGroup, check_temperature
from polar.bridges.trl.rollout_func import OWNER_KEY, RolloutFunc, build_rows, recorded_reward
from polar.config import EngineSettings, SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import list_version_runs
from polar.export.trl import to_sample
from polar.weight_sync.files import remove_staged_weights
from polar.weight_sync.probe import Scorer, make_scorer
from polar.weight_sync.publisher import ModelWeightPublisher, PlainScoringModel

log = logging.getLogger(__name__)

_TOKEN_LOSS_TYPES = ("dapo", "cispo")
"""Losses that are divided by all tokens that train, in whichever row."""


def check_config(args: GRPOConfig) -> None:
    """Splitting a session into rows must change nothing. Raises ConfigError."""
    if args.loss_type not in _TOKEN_LOSS_TYPES:
        raise ConfigError(
            f"loss_type={args.loss_type!r} counts rows or what is in a small batch, so how much a session weighs would "
            f"depend on how many traces it has: use {' or '.join(map(repr, _TOKEN_LOSS_TYPES))}."
        )
    required: dict[str, Any] = {
        "importance_sampling_level": "token",  # else a ratio of a row, which is a part of a session
        "off_policy_mask_threshold": None,  # likewise
        "mask_truncated_completions": False,  # a session ends as its harness says
        "use_vllm": False,  # the engines are those of the service
    }
    for name, value in required.items():
        if getattr(args, name) != value:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} does not go with Polar's sessions: leave it at {value!r}."
            )


class PolarGRPOTrainer(GRPOTrainer):
    """Of a session of several traces, TRL sees the first one; the other rows follow behind all sessions."""

    def __init__(
        self,
        rollouts: RolloutFunc,
        engine: EngineSettings | None,
        *,
        args: GRPOConfig,
        train_dataset: Any = None,
        reward_funcs: Any = recorded_reward,
        **given: Any,
    ) -> None:
        check_config(args)
        if train_dataset is None:
            train_dataset = Dataset.from_list(rollouts.build_dataset_rows())
        super().__init__(
            args=args, train_dataset=train_dataset, reward_funcs=reward_funcs, rollout_func=rollouts, **given
        )
        self._row_sessions: list[int] = []
        if engine is not None:
            self.add_callback(WeightSyncCallback(self, rollouts.bridge, engine))

    def round_up_rows(self, count: int) -> int:
        """So many rows that every process has the same number, and every small batch of a process as well."""
        parts = self.args.steps_per_generation if self.model.training else 1
        counts = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device))
        return -(-int(counts.max()) // parts) * parts

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids, completion_ids, mask, completions, logprobs, extra, *images = super()._generate(prompts)
        self._row_sessions = extra.pop(OWNER_KEY)
        return ids, completion_ids, mask, completions[: len(prompts)], logprobs, extra, *images

    def _calculate_rewards(self, inputs: Any, prompts: list[Any], completions: Any, completion_ids: Any) -> Any:
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids[: len(prompts)])

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["advantages"] = output["advantages"][self._row_sessions]
        if "sampling_per_token_logps" in output:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output


class _BlockingPublisher:
    """The trainer's model in the run's engines, for a trainer without an event loop. The model must not change while a
    method runs."""

    def __init__(
        self, bridge: BlockingBridge, engine: EngineSettings, model: Any, output: Path, score: Scorer | None = None
    ) -> None:
        self._bridge = bridge
        self._publisher = ModelWeightPublisher(bridge.rollouts.client, engine, PlainScoringModel(model, score), output)
        self._output = output
        self.version = 0  # of the weights that the engines have, once they were published
        atexit.register(remove_staged_weights, output)  # what lies in memory would outlive a trainer that fails

    def publish(self) -> None:
        """Raises SyncError: engines did not take the weights, or sample with others."""
        self.version = self._bridge.run(self._publisher.publish_next())

    def close(self) -> None:
        self._bridge.run(self._publisher.close())
        remove_staged_weights(self._output)


class WeightSyncCallback(TrainerCallback):
    """The engines have the model's weights when training begins, and after each step. A SyncError ends the training."""

    def __init__(self, trainer: GRPOTrainer, bridge: BlockingBridge, engine: EngineSettings) -> None:
        self._trainer = trainer
        self._bridge = bridge
        self._engine = engine
        self.publisher: _BlockingPublisher | None = None  # of the main process, while it trains

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.is_world_process_zero:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            self.publisher = _BlockingPublisher(self._bridge, self._engine, model, Path(args.output_dir))
        self.on_step_end()
        if state.is_world_process_zero:
            self._bridge.run(self._bridge.engines.resume_if_paused())  # engines that had these weights got no update

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.publisher is not None:
            self.publisher.publish()
        PartialState().wait_for_everyone()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.publisher is not None:
            self.publisher.close()


# The asynchronous trainer


def make_async_grpo_trainer(bridge: BlockingBridge, engine: EngineSettings, *, args: Any, **given: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    transfer = WeightTransfer(bridge, engine, Path(args.output_dir))
    worker = RolloutWorker(bridge, transfer, args)
    data = given.pop("train_dataset", None) or Dataset.from_list([{"prompt": task} for task in bridge.rollouts.tasks])
    worker.tasks = list(data["prompt"])
    trainer = AsyncGRPOTrainer(args=args, train_dataset=data, rollout_worker=worker, weight_transfer=transfer, **given)
    transfer.model = trainer.accelerator.unwrap_model(trainer.model)
    return trainer


class WeightTransfer:
    """A `WeightTransferProtocol`: one call does all, since the service is paused, labels and is resumed along with
    it."""

    model: Any

    def __init__(self, bridge: BlockingBridge, engine: EngineSettings, output: Path) -> None:
        self._bridge = bridge
        self._engine = engine
        self._output = output
        self._publisher: _BlockingPublisher | None = None

    @property
    def version(self) -> int:
        """As the service labels tokens."""
        assert self._publisher is not None
        return self._publisher.version

    def init_weight_transfer(self) -> None:
        self._publisher = _BlockingPublisher(self._bridge, self._engine, self.model, self._output, self._score)
        self._bridge.run(self._bridge.engines.resume_if_paused())

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """What it gives lacks frozen and tied weights, and engines want all: the model has them."""
        for _ in iterator:  # every process takes part in it
            pass
        assert self._publisher is not None
        self._publisher.publish()

    def resume(self) -> None: ...

    def _score(self, prompt: list[int], sampled: list[int]) -> Sequence[float]:
        """Its attention knows nothing but trees."""
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        over_trees = base.config._attn_implementation
        base.set_attn_implementation("sdpa")
        try:
            return make_scorer(self.model)(prompt, sampled)
        finally:
            base.set_attn_implementation(over_trees)

    def destroy(self) -> None:
        """The last call of a training: the worker has stopped."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._bridge.close()


class RolloutWorker:
    """A `RolloutWorkerProtocol`: groups of sessions run while the trainer trains; a sample is a trace."""

    tasks: list[str]

    def __init__(self, bridge: BlockingBridge, transfer: WeightTransfer, args: Any) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._bridge = bridge
        self._transfer = transfer
        self._args = args
        self._first = 0  # the version that it begins with
        self._version_offset = 0  # the trainer's count of versions, behind the service's
        self._failure: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, name="polar-rollouts", daemon=True)

    def start(self) -> None:
        self._first = self._transfer.version
        self._thread.start()

    def make_group_key(self, number: int) -> str:
        """Of a group. Who goes on from a checkpoint begins with other weights, and so with another version: what was
        trained on already does not come again. With the same weights nothing was, and it does."""
        return f"async-{self._first}.{number}"

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._version_offset = self._transfer.version - model_version

    def check_health(self, stale_after_s: float) -> None:  # noqa: ARG002
        """Sessions may take as long as they like; the client gives a service up that is away for too long."""
        if self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        try:
            self._bridge.run(self._produce())
        except Exception as error:  # noqa: BLE001 -- raised by check_health
            self._failure = error

    async def _produce(self) -> None:
        """Endlessly, round by round. So many groups run at once as the trainer can take before they are stale."""
        ahead = max(1, self._args.max_inflight_tasks // self._args.num_generations)
        running: set[asyncio.Task[tuple[int, SessionGroup]]] = set()
        number = 0
        try:
            while not self._stopped.is_set():
                while len(running) < ahead:
                    running.add(asyncio.ensure_future(self._run_group(number)))
                    number += 1
                done, running = await asyncio.wait(running, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await asyncio.to_thread(self._put_group, *task.result())
        finally:
            for task in running:
                task.cancel()

    async def _run_group(self, number: int) -> tuple[int, SessionGroup]:
        sampling = SamplingOverrides(temperature=self._args.temperature)
        task = self.tasks[number % len(self.tasks)]
        samples = self._args.num_generations
        group = await self._bridge.rollouts.run_group(
            task, self.make_group_key(number), samples=samples, sampling=sampling
        )
        check_temperature(group.items, self._args.temperature)
        return number, group

    def _put_group(self, number: int, group: SessionGroup) -> None:
        if group.left_out:
            log.warning("%s: %d sessions can't be trained on: %s", group.name, group.left_out.total(), group.left_out)
        if not group.items:
            return
        advantages = compute_session_advantages(group.rewards, ddof=0, epsilon=1e-8)  # as TRL's own worker has them
        for item, advantage in zip(group.items, advantages, strict=True):
            for row, trace in zip(build_rows(item), item.trajectory.traces, strict=True):
                oldest_version = min(list_version_runs(trace), default=self._transfer.version)
                version = oldest_version - self._version_offset
                self._put_sample(to_sample(row, advantage=advantage, model_version=version, group_id=number))

    def _put_sample(self, sample: Any) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self.rollout_buffer.put(sample, timeout=0.2)
                return
