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
    """Adds the modes to verl's."""
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
        chosen = correction.get(name)
        if chosen and not str(chosen).startswith("token"):
            raise ConfigError(
                f"algorithm.rollout_correction.{name}={chosen} goes by row, and a session may have several: choose one "
                "that goes by token."
            )


def check_same_weights(recorded: Any, recomputed: Any, mask: Any, *dtypes: str) -> None:
    """Of tokens, what the engines said and what the actor does; `dtypes` are those that they compute in. The mean
    tells: among very many tokens some are far apart, whatever the weights. Raises WeightMismatchError."""
    apart = float(abs(recorded - recomputed)[mask == 1].mean())
    allowed = choose_tolerance(*dtypes).mean
    if apart > allowed:
        raise WeightMismatchError(
            "The engines do not have the trainer's weights, or sample in a way that verl's actor does not know of: "
            f"log-probabilities differ by {apart:.3g} in the mean; {allowed:g} is allowed."
        )


def find_loop_settings(config: Any) -> BridgeSettings:
    """Those of the agent loop `polar` in verl's list."""
    from omegaconf import OmegaConf
    from verl.utils.import_utils import resolve_config_path

    path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    if path:
        for one in OmegaConf.load(resolve_config_path(path)):
            if one.name == AGENT_LOOP_NAME:
                return parse_loop_settings(one.settings)
    raise ConfigError(
        f"There is no agent loop {AGENT_LOOP_NAME!r}: "
        "actor_rollout_ref.rollout.agent.agent_loop_config_path names a list with it."
    )


def check_tasks(named: Iterable[Any], known: Container[str]) -> None:
    """Raises ConfigError."""
    for task in named:
        if str(task) not in known:
            raise ConfigError(
                f"There is no task {str(task)!r} in the files that the agent loop {AGENT_LOOP_NAME!r} has "
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

        validating = "validate" in prompts
        step = f"{VALIDATION_PREFIX if validating else 'step-'}{prompts['global_steps']}"
        asked = self._rollout.val_kwargs.n if validating else self._rollout.n
        samples = list(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [asked] * len(prompts)
        keys = [self._keys.next_key(step, str(task)) for task in prompts["task_id"]]
        assign_non_tensor_stack(prompts, KEY_FIELD, keys)
        assign_non_tensor_stack(prompts, SAMPLES_FIELD, [int(count) for count in samples])
        return self._manager.generate_sequences(prompts)


class VerlBridge(TrainerBridge):
    """What verl's trainer tells Polar of its engines."""

    def __init__(self, bridge: BlockingBridge) -> None:
        super().__init__(bridge)
        self._next_version: int | None = None  # of the update that has begun

    def begin_update(self, version: int) -> None:
        """Calls that run are waited for, and others wait from here on, until the update is finished. An update that has
        begun keeps its version."""
        if self._next_version is None:
            self.bridge.run(self.engines.freeze("drain"))
            self._next_version = version

    def finish_update(self) -> None:
        """The engines have the weights."""
        assert self._next_version is not None
        self.bridge.run(self.engines.finish_update(self._next_version))
        self._next_version = None


def make_polar_trainer(base: Any, mode: str) -> Any:
    """verl's trainer of this mode, with Polar in it."""

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
            separate = getattr(self, "standalone_server_manager", None)
            addresses = (separate or self.llm_server_manager).get_addresses()
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
            """Here and not in the agent loop, whose errors verl takes for groups that failed."""
            import transfer_queue

            rollout = self.config.actor_rollout_ref.rollout
            keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
            if keys and rollout.calculate_log_probs:
                fields = ["extra_fields"]
                data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
                for extra in map(dict, data["extra_fields"]):
                    check_logit_scales(str(extra["session_id"]), extra.get(SCALES_FIELD, []), rollout.temperature)

        def _check_weights(self, batch: Any) -> None:
            """Of what was sampled with the weights that the actor has now."""
            import transfer_queue

            it = self.config.actor_rollout_ref
            fresh = [
                key
                for key, tag in zip(batch.keys, batch.tags, strict=True)
                if tag["min_global_steps"] == self.global_steps - 1 and not tag.get("is_padding")
            ]
            if fresh and it.rollout.calculate_log_probs:
                fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
                data = transfer_queue.kv_batch_get(keys=fresh, partition_id=batch.partition_id, select_fields=fields)
                own = it.actor.get("fsdp_config") or it.actor.get("megatron") or {}
                dtypes = str(it.rollout.dtype), str(own.get("dtype", "bfloat16"))
                check_same_weights(*(data[field].values() for field in fields), *dtypes)

        def _optimizer_steps(self) -> int:
            """Of a batch, as configured in prompts."""
            prompts = self.config.data.train_batch_size // self.parameter_sync_step
            return max(1, prompts // self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

        def _get_required_batch_multiple(self, dp_size: int) -> int:
            """verl fills a batch up with rows that don't train, until it can be divided by this: by the optimizer's
            steps, each by the ranks, and what a rank has by its micro-batches."""
            it = self.config.actor_rollout_ref
            sizes = [it.actor.ppo_micro_batch_size_per_gpu, it.rollout.log_prob_micro_batch_size_per_gpu]
            if self.use_reference_policy:
                sizes.append(it.ref.log_prob_micro_batch_size_per_gpu)
            micro = 1 if it.actor.use_dynamic_bsz else math.lcm(*(size or 1 for size in sizes))
            return self._optimizer_steps() * math.lcm(dp_size * micro, it.rollout.n)

        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            """verl counts a mini-batch in rows, `ppo_mini_batch_size * n`. Here it is a share of the batch, however
            many rows its sessions have."""
            actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
            configured = actor.ppo_mini_batch_size
            actor.ppo_mini_batch_size = len(batch) // (self._optimizer_steps() * rollout.n)
            try:
                return super()._update_actor(batch, metrics)
            finally:
                actor.ppo_mini_batch_size = configured

    PolarTrainer.__name__ = PolarTrainer.__qualname__ = f"Polar{base.__name__}"
    return PolarTrainer


if "verl" in sys.modules:  # it imports this module for what is registered here
    register()
