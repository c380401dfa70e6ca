"""verl's trainer modes with Polar in them: `polar_sync`, `polar_colocate_async`, `polar_separate_async`.

verl imports this module by itself (VERL_USE_EXTERNAL_MODULES=polar.bridges.verl.trainer) and finds them by name. Each
is the mode of that name, with its settings (`trainer.v1.sync`, ...), and

- names the groups: by step and task, so that a trainer that was killed gets again what has run already. A row whose
  task is not in the files ends the training here: in an agent loop verl would take it for a group that failed;
- tells Polar of verl's engines: their addresses when they are up, their version (verl's step) after each update, and
  that calls must wait in between. Calls that run are waited for, since verl would cut them off;
- proves at each step that they have verl's weights: what they said of the tokens that they sampled is what verl's actor
  says. Where it isn't, the training ends with WeightMismatchError. (With `rollout_correction.bypass_mode` verl's
  actor isn't asked, and nothing is proved.) Before that, that they are of verl's temperature;
- keeps the number of optimizer steps where sessions of several traces make more rows than sessions;
- refuses what would make the gradient depend on how sessions are split (`check_config`).

Not run here: `polar_separate_async`, whose update of weights needs GPUs. Only its standalone engines serve Polar.
"""

import math
import sys
from collections.abc import Container, Iterable
from typing import Any

from polar.bridges.bridge import BlockingBridge, TrainerBridge
from polar.bridges.rollouts import GroupKeys, check_logit_scales
from polar.bridges.settings import BridgeSettings
from polar.bridges.verl.agent_loop import (
    AGENT_LOOP_NAME,
    KEY_FIELD,
    SAMPLES_FIELD,
    SCALES_FIELD,
    VALIDATION_PREFIX,
    parse_loop_settings,
)
from polar.errors import ConfigError
from polar.weight_sync.base import WeightMismatchError
from polar.weight_sync.probe import choose_tolerance

MODES = ("sync", "colocate_async", "separate_async")
_TOKEN_LOSS_MODES = ("token-mean", "token-sum")


def register() -> None:
    """Registers Polar's trainer modes with verl."""
    from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer

    for mode in MODES:
        register_trainer(f"polar_{mode}")(make_polar_trainer(get_trainer_cls(mode), mode))


def check_config(config: Any) -> None:
    """Raises ConfigError for what goes by row where sessions may have several."""
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if mode not in _TOKEN_LOSS_MODES:
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode={mode} weighs rows, and a session may have several: set it to "
            f"{' or '.join(_TOKEN_LOSS_MODES)}."
        )
    estimator = config.algorithm.adv_estimator
    if estimator != "grpo":
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} goes by row, and a session may have several: set it to grpo, which "
            "verl computes by session."
        )
    if config.algorithm.use_kl_in_reward:
        raise ConfigError(
            "algorithm.use_kl_in_reward adds up over a row, and a session may have several: set it to False, and "
            "actor_rollout_ref.actor.use_kl_loss to True."
        )
    correction = config.algorithm.get("rollout_correction") or {}
    for name in ("rollout_is", "rollout_rs"):
        level = correction.get(name)
        if level and not str(level).startswith("token"):
            raise ConfigError(
                f"algorithm.rollout_correction.{name}={level} goes by row, and a session may have several: choose one "
                "that goes by token."
            )


def check_same_weights(recorded: Any, recomputed: Any, mask: Any, *dtypes: str) -> None:
    """Compares the engines' log-probabilities with the actor's; `dtypes` are the types that they compute in. The mean
    decides, since among many tokens some always differ widely. Raises WeightMismatchError."""
    mean_difference = float(abs(recorded - recomputed)[mask == 1].mean())
    allowed = choose_tolerance(*dtypes).mean
    if mean_difference > allowed:
        raise WeightMismatchError(
            "The engines do not have the trainer's weights, or sample in a way that verl's actor does not know of: "
            f"log-probabilities differ by {mean_difference:.3g} in the mean; {allowed:g} is allowed."
        )


def find_loop_settings(config: Any) -> BridgeSettings:
    """Finds the settings of the agent loop `polar` in verl's list."""
    from omegaconf import OmegaConf
    from verl.utils.import_utils import resolve_config_path

    path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    if path:
        for agent_loop in OmegaConf.load(resolve_config_path(path)):
            if agent_loop.name == AGENT_LOOP_NAME:
                return parse_loop_settings(agent_loop.settings)
    raise ConfigError(
        f"There is no agent loop {AGENT_LOOP_NAME!r}: "
        "actor_rollout_ref.rollout.agent.agent_loop_config_path names a list with it."
    )


def check_tasks(task_ids: Iterable[Any], known_tasks: Container[str]) -> None:
    """Raises ConfigError for a row whose task is not in the files."""
    for task_id in task_ids:
        if str(task_id) not in known_tasks:
            raise ConfigError(
                f"There is no task {str(task_id)!r} in the files that the agent loop {AGENT_LOOP_NAME!r} has "
                "as `tasks`: a row of "
                "verl's data names one in its column `task_id`."
            )


class NamingAgentLoopManager:
    """verl's manager of agent loops, with a name for each prompt's group."""

    def __init__(self, manager: Any, config: Any, tasks: Container[str]) -> None:
        """`tasks` are those that rows may name."""
        self._manager = manager
        self._tasks = tasks
        self._rollout = config.actor_rollout_ref.rollout
        self._keys = GroupKeys()

    def generate_sequences(self, prompts: Any) -> Any:
        """Raises ConfigError for a row that names no task."""
        check_tasks(prompts["task_id"], self._tasks)
        from verl.utils.tensordict_utils import assign_non_tensor_stack

        is_validation = "validate" in prompts
        step = f"{VALIDATION_PREFIX if is_validation else 'step-'}{prompts['global_steps']}"
        default_samples = self._rollout.val_kwargs.n if is_validation else self._rollout.n
        samples = list(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [default_samples] * len(prompts)
        keys = [self._keys.make_key(step, str(task)) for task in prompts["task_id"]]
        assign_non_tensor_stack(prompts, KEY_FIELD, keys)
        assign_non_tensor_stack(prompts, SAMPLES_FIELD, [int(count) for count in samples])
        return self._manager.generate_sequences(prompts)


class VerlBridge(TrainerBridge):
    """Passes weight updates of verl's trainer on to Polar."""

    def __init__(self, bridge: BlockingBridge) -> None:
        super().__init__(bridge)
        self._next_version: int | None = None  # of the update that has begun

    def begin_update(self, version: int) -> None:
        """Waits for running calls and holds new ones until the update is finished. An update that has begun keeps its
        version."""
        if self._next_version is None:
            self.bridge.run(self.engines.freeze("drain"))
            self._next_version = version

    def finish_update(self) -> None:
        """The engines have the weights."""
        assert self._next_version is not None
        self.bridge.run(self.engines.finish_update(self._next_version))
        self._next_version = None


def make_polar_trainer(base: Any, mode: str) -> Any:
    """Creates verl's trainer class of this mode with Polar's hooks."""

    class PolarTrainer(base):
        def __init__(self, config: Any) -> None:
            from omegaconf import open_dict

            check_config(config)
            self.polar = VerlBridge(BlockingBridge(find_loop_settings(config)))
            with open_dict(config):
                config.trainer.v1.trainer_mode = mode  # verl looks up the mode's settings by its name
            super().__init__(config)

        def on_init_end(self) -> None:
            super().on_init_end()
            standalone_manager = getattr(self, "standalone_server_manager", None)
            addresses = (standalone_manager or self.llm_server_manager).get_addresses()
            urls = [f"http://{address}" for address in addresses]
            self.polar.bridge.run(self.polar.engines.attach(urls, self.global_steps))

        def fit(self, agent_loop_manager: Any) -> None:
            try:
                super().fit(NamingAgentLoopManager(agent_loop_manager, self.config, self.polar.rollouts.tasks))
            finally:
                self.polar.close()

        def on_sample_end(self) -> None:
            if mode != "separate_async":  # whose engines alone go on while it trains
                self.polar.begin_update(self.global_steps)
            super().on_sample_end()

        def on_step_end(self) -> None:
            self.polar.begin_update(self.global_steps)
            super().on_step_end()
            self.polar.finish_update()

        def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
            self._check_temperature(batch)
            batch = super()._compute_old_log_prob(batch, metrics)
            self._check_weights(batch)
            return batch

        def _check_temperature(self, batch: Any) -> None:
            """Checked here, because verl treats errors of an agent loop as failed groups."""
            import transfer_queue

            rollout = self.config.actor_rollout_ref.rollout
            keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
            if keys and rollout.calculate_log_probs:
                fields = ["extra_fields"]
                data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
                for extra in map(dict, data["extra_fields"]):
                    check_logit_scales(str(extra["session_id"]), extra.get(SCALES_FIELD, []), rollout.temperature)

        def _check_weights(self, batch: Any) -> None:
            """Compares tokens that were sampled with the actor's current weights."""
            import transfer_queue

            rollout_config = self.config.actor_rollout_ref
            on_policy_keys = [
                key
                for key, tag in zip(batch.keys, batch.tags, strict=True)
                if tag["min_global_steps"] == self.global_steps - 1 and not tag.get("is_padding")
            ]
            if on_policy_keys and rollout_config.rollout.calculate_log_probs:
                fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
                data = transfer_queue.kv_batch_get(
                    keys=on_policy_keys, partition_id=batch.partition_id, select_fields=fields
                )
                engine_config = rollout_config.actor.get("fsdp_config") or rollout_config.actor.get("megatron") or {}
                dtypes = str(rollout_config.rollout.dtype), str(engine_config.get("dtype", "bfloat16"))
                check_same_weights(*(data[field].values() for field in fields), *dtypes)

        def _count_optimizer_steps(self) -> int:
            """The optimizer steps of a batch, as configured in prompts."""
            prompts = self.config.data.train_batch_size // self.parameter_sync_step
            return max(1, prompts // self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

        def _get_required_batch_multiple(self, dp_size: int) -> int:
            """verl pads a batch with rows that don't train to a multiple of this: of the optimizer steps, the ranks,
            and the micro-batches of a rank."""
            rollout_config = self.config.actor_rollout_ref
            sizes = [
                rollout_config.actor.ppo_micro_batch_size_per_gpu,
                rollout_config.rollout.log_prob_micro_batch_size_per_gpu,
            ]
            if self.use_reference_policy:
                sizes.append(rollout_config.ref.log_prob_micro_batch_size_per_gpu)
            micro_batch_size = 1 if rollout_config.actor.use_dynamic_bsz else math.lcm(*(size or 1 for size in sizes))
            return self._count_optimizer_steps() * math.lcm(dp_size * micro_batch_size, rollout_config.rollout.n)

        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            """verl counts a mini-batch in rows, `ppo_mini_batch_size * n`. Here it is a share of the batch, however
            many rows its sessions have."""
            actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
            configured = actor.ppo_mini_batch_size
            actor.ppo_mini_batch_size = len(batch) // (self._count_optimizer_steps() * rollout.n)
            try:
                return super()._update_actor(batch, metrics)
            finally:
                actor.ppo_mini_batch_size = configured

    PolarTrainer.__name__ = PolarTrainer.__qualname__ = f"Polar{base.__name__}"
    return PolarTrainer


if "verl" in sys.modules:  # it imports this module for what is registered here
    register()
