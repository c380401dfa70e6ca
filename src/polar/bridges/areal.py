"""AReaL: a workflow whose episode is a group of sessions, and an engine that Polar follows.

    from polar.bridges.areal import PolarWorkflow, follow

    with PPOTrainer(config, train_dataset=rows, valid_dataset=held_out) as trainer:   # each row has a task_id
        follow(trainer, "polar.toml")
        polar = PolarWorkflow("polar.toml", gconfig=config.gconfig)
        trainer.train(workflow=polar, eval_workflow=PolarWorkflow("polar.toml", samples=1, gconfig=config.eval_gconfig))

    gconfig: {n_samples: 1}                                   # an episode is a group, of the bridge's `samples`
    actor: {reward_norm: null, adv_norm: null, kl_ctl: 0.0}   # advantages come from the bridge

Who divides: AReaL's loss is a mean over all tokens that train, so tokens count and not rows, and splitting a session
changes nothing within an update; `weight` is not applied. (`ppo_n_minibatches` cuts a batch by rows: with more than
one, which rows go together depends on how many there are.) `rewards` are advantages over the sessions of a group; AReaL
would take them over rows, so `follow` refuses `reward_norm`, `adv_norm` by group, and whatever else goes by rows.

Versions are AReaL's own, and each token has its own in `versions`. AReaL pauses its rollouts, updates weights, sets
their version, saves, evaluates and only then resumes: `follow` has Polar's generation stand still until the version is
set, so that an evaluation runs with the new weights. Sessions that train and run already go on with them too. A group
without a session to train on is rejected (None), as AReaL has it. So is an episode that fails: where recorded
log-probabilities are not of `gconfig`'s temperature, AReaL logs that for each of them, and gets none.

What is left out: rewards of single turns.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from polar.bridges.advantages import compute_session_advantages
from polar.bridges.bridge import BlockingBridge, TrainerBridge
from polar.bridges.rollouts import GroupKeys, build_sampling_overrides, check_temperature, get_shared_groups
from polar.bridges.settings import SettingsSource, load_settings
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.areal import ArealExporter, to_tensors

_REQUIRED_ACTOR_SETTINGS = {"discount": 1.0, "gae_lambda": 1.0, "kl_ctl": 0.0, "overlong_reward_penalty": False}
"""Required values: with others a token's advantage would depend on its row."""

_keys_by_engine: WeakKeyDictionary[Any, GroupKeys] = WeakKeyDictionary()
"""By AReaL engine. AReaL creates a workflow that is given by name anew for each episode, so keys can't be kept
there."""


class PolarWorkflow:
    """An `areal.api.RolloutWorkflow`: AReaL takes an instance of it, or its name and `workflow_kwargs`."""

    def __init__(
        self, source: SettingsSource = None, *, samples: int | None = None, gconfig: Any = None, normalize: bool = True
    ) -> None:
        """`samples` are sessions of a group, if not as the settings say. `gconfig` is AReaL's: its temperature and the
        like go over the harness's; without it, those of the service's [engine.sampling] and the tasks do. Without
        `normalize`, `rewards` are those of the sessions as they are."""
        _register_workflow()
        self._settings = load_settings(source)
        self._samples = samples
        self._sampling = None if gconfig is None else _build_sampling(gconfig)
        self._temperature: float | None = None if gconfig is None else gconfig.temperature
        self._normalize = normalize

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Runs a group and returns all traces of its sessions, padded to one length."""
        from areal.infra import workflow_context
        from areal.utils import stats_tracker
        from areal.utils.data import concat_padded_tensors

        try:
            task = str(data["task_id"])
        except KeyError:
            raise ConfigError(f"A row of AReaL's data has no task_id, but only {', '.join(data)}.") from None
        evaluates = workflow_context.get().is_eval
        key = self._make_group_key(engine, task, evaluates=evaluates)
        rollouts = get_shared_groups(self._settings).rollouts
        group = await rollouts.run_group(task, key, samples=self._samples, sampling=self._sampling)
        if self._temperature is not None and not evaluates:
            check_temperature(group.items, self._temperature)
        scope = stats_tracker.get(workflow_context.stat_scope())
        for reward in group.rewards:
            scope.scalar(reward=reward)
        if not group.items:
            return None
        advantages = compute_session_advantages(group.rewards) if self._normalize and not evaluates else group.rewards
        rows = [
            to_tensors(row, advantage)
            for item, advantage in zip(group.items, advantages, strict=True)
            for row in ArealExporter().build_lines(item)
        ]
        return dict(concat_padded_tensors(rows))

    def _make_group_key(self, engine: Any, task: str, *, evaluates: bool) -> str:
        """The group's key: a task runs once per version, and again if the data repeats it. Each rank has its own
        groups."""
        key = f"{'eval-' if evaluates else ''}v{engine.get_version()}{_make_rank_suffix(engine)}"
        return _keys_by_engine.setdefault(engine, GroupKeys()).make_key(key, f"{self._settings.name}/{task}")


def follow(trainer: Any, source: SettingsSource = None) -> "ArealBridge":
    """Attaches the trainer's engines to Polar and pauses generation while they get new weights. Raises ConfigError for
    a configuration that depends on rows instead of sessions, or computes at another temperature."""
    config = trainer.config
    if config.gconfig.n_samples != 1:
        raise ConfigError("gconfig.n_samples must be 1: an episode is a whole group, of the bridge's `samples`.")
    adv_norm = config.actor.adv_norm
    if config.actor.reward_norm is not None or (
        adv_norm is not None and "group" in (adv_norm.mean_level, adv_norm.std_level)
    ):
        raise ConfigError("actor.reward_norm and adv_norm by group go by rows, not sessions: set them to null.")
    for name, required in _REQUIRED_ACTOR_SETTINGS.items():
        if getattr(config.actor, name) != required:
            raise ConfigError(f"actor.{name} must be {required}: it goes by rows, and a session may have several.")
    if getattr(trainer, "critic", None) is not None:
        raise ConfigError("A critic values rows, and a session may have several: train without one.")
    if config.actor.temperature != config.gconfig.temperature:
        raise ConfigError("actor.temperature must be gconfig.temperature: the one trains what the other samples.")
    bridge = ArealBridge(BlockingBridge(source), trainer.rollout)
    bridge.install_hooks(trainer)
    return bridge


class ArealBridge(TrainerBridge):
    """Pauses Polar's generation while AReaL's engines get weights or sleep."""

    def __init__(self, bridge: BlockingBridge, engine: Any) -> None:
        super().__init__(bridge)
        self._engine = engine
        self._is_frozen = False
        self._is_asleep = False

    def install_hooks(self, trainer: Any) -> None:
        self._attach()
        engine = self._engine
        engine.set_version = partial(self._on_set_version, engine.set_version)
        engine.pause, engine.resume = partial(self._on_pause, engine.pause), partial(self._on_resume, engine.resume)
        if not getattr(trainer, "_should_offload_rollout", False):
            return
        engine.offload, engine.onload = (
            partial(self._on_offload, engine.offload),
            partial(self._on_onload, engine.onload),
        )
        if (eval_engine := getattr(trainer, "eval_rollout", None)) is not None:  # uses the same servers
            eval_engine.pause, eval_engine.resume = (
                partial(self._on_pause, eval_engine.pause),
                partial(self._on_resume, eval_engine.resume),
            )
            eval_engine.offload, eval_engine.onload = (
                partial(self._on_offload, eval_engine.offload),
                partial(self._on_onload, eval_engine.onload),
            )

    def _attach(self) -> None:
        self.bridge.run(self.engines.attach(_list_engine_urls(self._engine), self._engine.get_version()))

    def _resume_unless_asleep(self) -> None:
        if not self._is_asleep:  # otherwise AReaL wakes them later and resumes
            self._attach()
            self._is_frozen = False

    def _on_pause(self, pause: Callable[[], Any]) -> Any:
        result = pause()  # no further episodes
        self.bridge.run(self.engines.freeze("drain"))
        self._is_frozen = True
        return result

    def _on_resume(self, resume: Callable[[], Any]) -> Any:
        if self._is_frozen:
            self._resume_unless_asleep()
        return resume()

    def _on_set_version(self, set_version: Callable[[int], Any], version: int) -> Any:
        """AReaL calls this when the weights are loaded, and evaluates before it resumes."""
        result = set_version(version)
        self._resume_unless_asleep()
        return result

    def _on_offload(self, offload: Callable[[], Any]) -> Any:
        self._is_asleep = True
        return offload()

    def _on_onload(self, onload: Callable[..., Any], tags: list[str] | None = None) -> Any:
        result = onload() if tags is None else onload(tags=tags)
        self._is_asleep = self._is_asleep and tags is not None  # tags: a partial wake-up, to load weights
        return result


def _make_rank_suffix(engine: Any) -> str:
    """The suffix of the engine's rank in its keys. The first rank and a single engine have none: AReaL gives a single
    engine a random name."""
    name = str(getattr(engine, "engine_id", ""))
    return f"-r{name}" if re.fullmatch("[1-9][0-9]{0,8}", name) else ""


def _build_sampling(gconfig: Any) -> SamplingOverrides:
    temperature = 0.0 if gconfig.greedy else gconfig.temperature
    return build_sampling_overrides(temperature=temperature, top_p=gconfig.top_p, top_k=gconfig.top_k)


def _list_engine_urls(engine: Any) -> list[str]:
    """The addresses of the inference servers: those a controller started, or those an engine talks to."""
    if getattr(engine, "server_infos", None):
        return [f"http://{server.host}:{server.port}" for server in engine.server_infos]
    return [f"http://{address}" for address in getattr(engine, "_engine", engine).addresses]


def _register_workflow() -> None:
    """Registers the workflow as a virtual subclass, since AReaL checks for its own class."""
    from areal.api import RolloutWorkflow

    RolloutWorkflow.register(PolarWorkflow)


if "areal" in sys.modules:  # AReaL imports this module by name and checks the class at once
    _register_workflow()
